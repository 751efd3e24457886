package scheduler

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Between these sums of sizes the score grows from 0 to maxScore: less is pulled in
// no time, more of a container counts no more.
const (
	littleImage = 23 << 20
	largeImage  = 1000 << 20
)

// images are the images that nodes have, as their statuses tell: by name, how large
// each is on which node.
type images map[string]map[*nodeInfo]int64

// reimaged takes note of what images the node has by now, and had before.
func (s *snapshot) reimaged(n *nodeInfo, before, now []corev1.ContainerImage) {
	if slices.EqualFunc(before, now, func(a, b corev1.ContainerImage) bool {
		return a.SizeBytes == b.SizeBytes && slices.Equal(a.Names, b.Names)
	}) {
		return
	}
	for i := range before {
		for _, name := range before[i].Names {
			if delete(s.images[name], n); len(s.images[name]) == 0 {
				delete(s.images, name)
			}
		}
	}
	for i := range now {
		for _, name := range now[i].Names {
			if s.images[name] == nil {
				s.images[name] = map[*nodeInfo]int64{}
			}
			s.images[name][n] = now[i].SizeBytes
		}
	}
}

// scoreImageLocality prefers nodes that have the pod's images, large ones above all.
// One that few nodes have counts less, or its pods would pile up on those.
func scoreImageLocality(s *snapshot, p *podInfo) func(*nodeInfo) int64 {
	if len(s.images) == 0 {
		return nil
	}
	wanted := imagesOf(p.pod)
	var some []map[*nodeInfo]int64
	for _, name := range wanted {
		if nodes := s.images[name]; len(nodes) > 0 {
			some = append(some, nodes)
		}
	}
	// What every node has makes no difference, unless others go with it.
	if !slices.ContainsFunc(some, func(nodes map[*nodeInfo]int64) bool { return len(nodes) < len(s.list) }) {
		return nil
	}
	most := int64(largeImage * len(wanted))
	return func(n *nodeInfo) (sum int64) {
		for _, nodes := range some {
			if size := nodes[n]; size > 0 {
				sum += int64(float64(size) * float64(len(nodes)) / float64(len(s.list)))
			}
		}
		return maxScore * (min(max(sum, littleImage), most) - littleImage) / (most - littleImage)
	}
}

// imagesOf are the names of the pod's images, as nodes tell them.
func imagesOf(pod *corev1.Pod) (out []string) {
	for i := range pod.Spec.InitContainers {
		out = append(out, imageName(pod.Spec.InitContainers[i].Image))
	}
	for i := range pod.Spec.Containers {
		out = append(out, imageName(pod.Spec.Containers[i].Image))
	}
	for i := range pod.Spec.Volumes {
		if v := pod.Spec.Volumes[i].Image; v != nil {
			out = append(out, imageName(v.Reference))
		}
	}
	return out
}

// imageName completes an image's name with what may be left out of it: the registry,
// its directory "library", the tag. A digest makes a tag needless.
func imageName(ref string) string {
	name, digest, byDigest := strings.Cut(ref, "@")
	registry, path, ok := strings.Cut(name, "/")
	if !ok || !strings.ContainsAny(registry, ".:") && registry != "localhost" {
		registry, path = "docker.io", name
	}
	if registry == "index.docker.io" {
		registry = "docker.io"
	}
	if registry == "docker.io" && !strings.Contains(path, "/") {
		path = "library/" + path
	}
	repository, tag, tagged := strings.Cut(path, ":")
	switch {
	case byDigest:
		return registry + "/" + repository + "@" + digest
	case !tagged:
		tag = "latest"
	}
	return registry + "/" + repository + ":" + tag
}
