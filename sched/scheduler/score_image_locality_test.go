package scheduler

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// holding is a node with images of sizes in MiB.
func holding(name string, sizes map[string]int64) *schedtest.NodeBuilder {
	b := schedtest.Node(name)
	for image, size := range sizes {
		b.N.Status.Images = append(b.N.Status.Images, corev1.ContainerImage{Names: []string{image}, SizeBytes: size << 20})
	}
	return b
}

func running(images ...string) *schedtest.PodBuilder {
	b := schedtest.Pod("p")
	b.P.Spec.Containers = nil
	for _, image := range images {
		b.P.Spec.Containers = append(b.P.Spec.Containers, corev1.Container{Image: image})
	}
	return b
}

func TestScoreImageLocality(t *testing.T) {
	const web, model = "docker.io/library/web:latest", "example.com/model:3"
	nodes := func(n ...*schedtest.NodeBuilder) []*schedtest.NodeBuilder { return n }
	volume := running("web")
	volume.P.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: model}}}}
	initial := running("web")
	initial.P.Spec.InitContainers = []corev1.Container{{Image: model}}
	a := func(name string, size int64) *schedtest.NodeBuilder {
		return holding("a", map[string]int64{name: size})
	}
	b := schedtest.Node("b")
	for _, tt := range []struct {
		name  string
		nodes []*schedtest.NodeBuilder
		pod   *schedtest.PodBuilder
		want  int64 // of node a; b's is 0. -1: no opinion
	}{
		{"no node has it", nodes(schedtest.Node("a"), b), running("web"), -1},
		{"one of two has it", nodes(a(web, 1046), b), running("web"), 51}, // (523 - 23) / (1000 - 23)
		{"another tag", nodes(a(web, 1046), b), running("web:2"), -1},
		{"a small one", nodes(a(web, 40), b), running("web"), 0},
		{"no more than all of it", nodes(a(web, 100000), b), running("web"), 100},
		{"one of two containers'", nodes(a(model, 2046), b), running("web", model), 50}, // (1023 - 23) / (2000 - 23)
		{"of an init container", nodes(a(model, 2046), b), initial, 50},
		{"of a volume", nodes(a(model, 2046), b), volume, 50},
		{"all have it", nodes(a(web, 500), holding("b", map[string]int64{web: 500})), running("web"), -1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := world(tt.nodes)
			value := scoreImageLocality(s, newPodInfo(tt.pod.Obj()))
			if value == nil || tt.want < 0 {
				if (value == nil) != (tt.want < 0) {
					t.Fatalf("an opinion: %t", value != nil)
				}
				return
			}
			if got, other := value(s.nodes["a"]), value(s.nodes["b"]); got != tt.want || other != 0 {
				t.Errorf("%d and %d, want %d and 0", got, other, tt.want)
			}
		})
	}
}

// An image that is removed, and one of a node that is, count no more.
func TestImagesThatGo(t *testing.T) {
	const web = "docker.io/library/web:1"
	s := world([]*schedtest.NodeBuilder{holding("a", map[string]int64{web: 500, "x:1": 1}), holding("b", map[string]int64{web: 600}), schedtest.Node("c")})
	held := func() (out []string) {
		for n := range s.images[web] {
			out = append(out, n.name)
		}
		return out
	}
	s.setNode(holding("a", map[string]int64{"x:1": 1}).Obj())
	if got := strings.Join(held(), " "); got != "b" {
		t.Errorf("%s have the image, want b", got)
	}
	s.removeNode("b")
	if len(s.images) != 1 {
		t.Errorf("left are %v, want x:1", s.images)
	}
	s.setNode(holding("b", map[string]int64{web: 600}).Obj())
	if got := strings.Join(held(), " "); got != "b" {
		t.Errorf("%s have the image, want b, which is back", got)
	}
}

// The scheduler's choice follows from it, if it is all the difference.
func TestPodsGoWhereTheirImageIs(t *testing.T) {
	s := world([]*schedtest.NodeBuilder{schedtest.Node("a"), holding("b", map[string]int64{"example.com/model:3": 10000}), schedtest.Node("c")})
	for range 20 {
		p := newPodInfo(running("example.com/model:3").Obj())
		if got := best(s, p, runFilters(s, p).fit).name; got != "b" {
			t.Fatalf("chose %s, want b", got)
		}
	}
}

func TestImageName(t *testing.T) {
	for ref, want := range map[string]string{
		"web":                         "docker.io/library/web:latest",
		"web:1":                       "docker.io/library/web:1",
		"me/web":                      "docker.io/me/web:latest",
		"docker.io/web:1":             "docker.io/library/web:1",
		"index.docker.io/me/web:1":    "docker.io/me/web:1",
		"example.com/web":             "example.com/web:latest",
		"localhost/web:1":             "localhost/web:1",
		"host:5000/a/b/web":           "host:5000/a/b/web:latest",
		"host:5000/web:2":             "host:5000/web:2",
		"web@sha256:ab":               "docker.io/library/web@sha256:ab",
		"example.com/web:1@sha256:ab": "example.com/web@sha256:ab",
	} {
		if got := imageName(ref); got != want {
			t.Errorf("%s: %s, want %s", ref, got, want)
		}
	}
}
