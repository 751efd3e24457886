// Package fieldref reads single fields of a pod, as the downward API offers
// them to environment variables and files.
package fieldref

import (
	"fmt"
	"sort"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Metadata reads the fields that files and variables share: metadata.name,
// .namespace, .uid, .labels, .annotations and single ones of these. ok is
// false for a path that is none of them.
func Metadata(pod *v1.Pod, path string) (value string, ok bool) {
	if p, key, found := subscript(path); found {
		switch p {
		case "metadata.labels":
			return pod.Labels[key], true
		case "metadata.annotations":
			return pod.Annotations[key], true
		}
		return "", false
	}
	switch path {
	case "metadata.name":
		return pod.Name, true
	case "metadata.namespace":
		return pod.Namespace, true
	case "metadata.uid":
		return string(pod.UID), true
	case "metadata.labels":
		return lines(pod.Labels), true
	case "metadata.annotations":
		return lines(pod.Annotations), true
	}
	return "", false
}

// subscript splits metadata.labels['key'].
func subscript(path string) (field, key string, ok bool) {
	field, rest, ok := strings.Cut(path, "['")
	if !ok || !strings.HasSuffix(rest, "']") {
		return "", "", false
	}
	return field, strings.TrimSuffix(rest, "']"), true
}

// lines writes a map as key="value" lines, sorted.
func lines(m map[string]string) string {
	out := make([]string, 0, len(m))
	for k, v := range m {
		out = append(out, k+"="+strconv.Quote(v))
	}
	sort.Strings(out)
	return strings.Join(out, "\n")
}

// Resource reads limits.* or requests.* of a container. A limit of cpu, memory or
// ephemeral-storage that is not set is the node's allocatable amount. The result
// is in units of divisor, rounded up.
func Resource(pod *v1.Pod, ref *v1.ResourceFieldSelector, containerName string, allocatable v1.ResourceList) (string, error) {
	if ref.ContainerName != "" {
		containerName = ref.ContainerName
	}
	c := find(pod, containerName)
	if c == nil {
		return "", fmt.Errorf("container %s not found", containerName)
	}
	kind, name, ok := strings.Cut(ref.Resource, ".")
	if !ok || kind != "limits" && kind != "requests" {
		return "", fmt.Errorf("unsupported container resource: %s", ref.Resource)
	}
	rn := v1.ResourceName(name)
	var q resource.Quantity
	var have bool
	if kind == "limits" {
		if q, have = c.Resources.Limits[rn]; (!have || q.IsZero()) && (rn == v1.ResourceCPU || rn == v1.ResourceMemory || rn == v1.ResourceEphemeralStorage) {
			q = allocatable[rn]
		}
	} else if q, have = c.Resources.Requests[rn]; !have {
		q = c.Resources.Limits[rn]
	}
	div := ref.Divisor
	if div.IsZero() {
		div = resource.MustParse("1")
	}
	if rn == v1.ResourceCPU {
		return strconv.FormatInt(ceil(q.MilliValue(), div.MilliValue()), 10), nil
	}
	return strconv.FormatInt(ceil(q.Value(), div.Value()), 10), nil
}

func ceil(a, b int64) int64 {
	if b <= 0 {
		return a
	}
	return (a + b - 1) / b
}

func find(pod *v1.Pod, name string) *v1.Container {
	for i := range pod.Spec.Containers {
		if pod.Spec.Containers[i].Name == name {
			return &pod.Spec.Containers[i]
		}
	}
	for i := range pod.Spec.InitContainers {
		if pod.Spec.InitContainers[i].Name == name {
			return &pod.Spec.InitContainers[i]
		}
	}
	return nil
}
