package runtime_test

import (
	"strings"
	"testing"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime/runtimetest"
)

func TestRootContract(t *testing.T) {
	needRoot(t)
	runtimetest.Run(t, func(t *testing.T) runtimetest.Harness {
		n := newNode(t)
		return runtimetest.Harness{
			Runtime: n.client,
			Sandbox: func(id string) api.Sandbox {
				return api.Sandbox{ID: id, Name: id, CgroupParent: n.cgroup + "/pod" + id}
			},
			Container: func(sandboxID, id string) api.Container { return n.spec(sandboxID, id, "sleep") },
			Ready: func(id string) {
				eventually(t, "readiness of "+id, func() bool {
					return strings.Contains(n.output(n.spec("", id)), "ready")
				})
			},
			Broken: func(sandboxID, id string) api.Container {
				c := n.spec(sandboxID, id)
				c.Args = []string{"foo"}
				return c
			},
		}
	})
}
