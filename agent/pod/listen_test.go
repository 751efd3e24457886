package pod

import (
	"context"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// listing is a runtime whose list is made before during is called.
type listing struct {
	Runtime
	sandboxes []api.SandboxStatus
	during    func()
}

func (l *listing) List(context.Context) ([]api.SandboxStatus, []api.ContainerStatus, error) {
	made := slices.Clone(l.sandboxes)
	if l.during != nil {
		l.during()
	}
	return made, nil, nil
}

// TestListOfForgotten: the bug of issue 9 was that a sandbox that was removed while
// podmon's list was on its way came back by that list, and had its route for ever.
func TestListOfForgotten(t *testing.T) {
	sandbox := func(id string, uid types.UID) api.SandboxStatus {
		return api.SandboxStatus{Sandbox: api.Sandbox{ID: id, PodUID: string(uid)}}
	}
	runtime := &listing{sandboxes: []api.SandboxStatus{sandbox("gone", "u1"), sandbox("there", "u2")}}
	m := NewManager(Config{Runtime: runtime})
	m.routeTo("gone", "u1")
	runtime.during = func() { m.unroute("gone") }
	if err := m.list(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, routed := m.routes["gone"]; routed || m.records["u1"] != nil {
		t.Errorf("the list brought back what was removed: routes %v, records %v", m.routes, m.records)
	}
	if m.routes["there"] != "u2" || m.records["u2"] == nil {
		t.Errorf("what was not removed is missing: routes %v, records %v", m.routes, m.records)
	}
	if len(m.unrouted) > 0 {
		t.Errorf("remembered though no list is on its way: %v", m.unrouted)
	}
	// One made under the same id later is seen.
	runtime.during = nil
	if err := m.list(t.Context()); err != nil || m.routes["gone"] != "u1" {
		t.Errorf("routes by a later list: %v, %v", m.routes, err)
	}
}
