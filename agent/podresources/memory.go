package podresources

import (
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// memory are the amounts in the order of their types. No memory node is named:
// none is given to one container.
func memory(amounts map[string]uint64) []*podresources.ContainerMemory {
	var out []*podresources.ContainerMemory
	for _, kind := range slices.Sorted(maps.Keys(amounts)) {
		out = append(out, &podresources.ContainerMemory{MemoryType: kind, Size: amounts[kind]})
	}
	return out
}

// Memory picks what is memory of a list of resources, in bytes by type; nil:
// there is none.
func Memory(list v1.ResourceList) map[string]uint64 {
	var out map[string]uint64
	for name, q := range list {
		if name != v1.ResourceMemory && !strings.HasPrefix(string(name), v1.ResourceHugePagesPrefix) || q.Value() <= 0 {
			continue
		}
		if out == nil {
			out = map[string]uint64{}
		}
		out[string(name)] = uint64(q.Value())
	}
	return out
}
