package runtimetest_test

import (
	"testing"

	"github.com/clusterd/clusterd/agent/agenttest"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime/runtimetest"
)

// TestTwin: a runtime that lives in memory keeps the same contract. So what a
// sandbox is made of is the runtime's own matter; agent/pod's tests run whole
// pods on this one.
func TestTwin(t *testing.T) {
	runtimetest.Run(t, func(t *testing.T) runtimetest.Harness {
		r := agenttest.NewRuntime()
		r.StartErr = func(c api.Container) (string, error) {
			if c.Args[0] == "foo" {
				return `exec: "foo": executable file not found in $PATH`, nil
			}
			return "", nil
		}
		return runtimetest.Harness{
			Runtime: r,
			Sandbox: func(id string) api.Sandbox { return api.Sandbox{ID: id} },
			Container: func(sandboxID, id string) api.Container {
				return api.Container{ID: id, SandboxID: sandboxID, Args: []string{"sleep"}}
			},
			TermCode: 143,
			Broken: func(sandboxID, id string) api.Container {
				return api.Container{ID: id, SandboxID: sandboxID, Args: []string{"foo"}}
			},
		}
	})
}
