package pod

import (
	"testing"

	"github.com/clusterd/clusterd/agent/podstate"
)

func TestStepName(t *testing.T) {
	for want, s := range map[string]podstate.Step{"CreateSandbox": podstate.CreateSandbox{}, "Pull": podstate.Pull{}, "Start": podstate.Start{}} {
		if got := stepName(s); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
