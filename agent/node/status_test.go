package node

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

func TestHugepages(t *testing.T) {
	dir := t.TempDir()
	for name, count := range map[string]string{"hugepages-2048kB": "8\n", "hugepages-1048576kB": "0\n", "other": "1\n"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name, "nr_hugepages"), []byte(count), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got := hugepages(dir)
	if len(got) != 2 || got[2<<20] != 8 || got[1<<30] != 0 {
		t.Errorf("got %v", got)
	}
	left := (&Node{}).allocatable(v1.ResourceList{v1.ResourceMemory: resource.MustParse("100Mi"), "hugepages-2Mi": resource.MustParse("16Mi")})
	if m := left[v1.ResourceMemory]; m.Value() > 84<<20 {
		t.Errorf("huge pages count as memory of pods: %s", m.String())
	}
}

func TestReserved(t *testing.T) {
	n := &Node{cfg: Config{Reserved: v1.ResourceList{v1.ResourceCPU: resource.MustParse("500m"), v1.ResourceMemory: resource.MustParse("1Gi"), "example.com/none": resource.MustParse("1")}}}
	got := n.allocatable(v1.ResourceList{v1.ResourceCPU: resource.MustParse("2"), v1.ResourceMemory: resource.MustParse("512Mi"), v1.ResourcePods: resource.MustParse("110")})
	cpu, mem, pods := got[v1.ResourceCPU], got[v1.ResourceMemory], got[v1.ResourcePods]
	if cpu.String() != "1500m" || !mem.IsZero() || pods.Value() != 110 || len(got) != 3 {
		t.Errorf("allocatable %v", got)
	}
}

func TestPressureConditions(t *testing.T) {
	n := &Node{cfg: Config{Pressure: func(c v1.NodeConditionType) bool { return c == v1.NodeDiskPressure }}}
	for _, c := range n.conditions() {
		if want := c.Type == v1.NodeDiskPressure || c.Type == v1.NodeReady; (c.Status == v1.ConditionTrue) != want {
			t.Errorf("%s is %s", c.Type, c.Status)
		}
	}
}

// Extended resources that an administrator announces by a patch of the status
// stay; what the machine itself no longer has goes.
func TestExtendedResourcesStay(t *testing.T) {
	one := resource.MustParse("1")
	now := v1.ResourceList{v1.ResourceCPU: one}
	keepExtended(now, v1.ResourceList{
		v1.ResourceCPU: resource.MustParse("7"), "example.com/gpu": one, "hugepages-2Mi": one, "kubernetes.io/batch-cpu": one, "node.kubernetes.io/x": one,
	})
	want := v1.ResourceList{v1.ResourceCPU: one, "example.com/gpu": one}
	if diff := cmp.Diff(want, now); diff != "" {
		t.Error(diff)
	}
}
