package agent

import (
	"errors"
	"testing"

	"k8s.io/client-go/tools/record"

	"github.com/clusterd/clusterd/agent/runtime"
)

func TestTellUpgrade(t *testing.T) {
	for _, tt := range []struct {
		upgrade runtime.Upgrade
		want    string
	}{
		{runtime.Upgrade{}, ""},
		{runtime.Upgrade{From: "sha256:1", To: "sha256:2"}, "Normal RuntimeUpgraded The container supervisor was replaced by this clusterd's; containers run on"},
		{runtime.Upgrade{To: "sha256:2", Err: errors.New("version 99")}, "Warning RuntimeNotUpgraded The container supervisor of a former clusterd goes on: version 99"},
	} {
		r := record.NewFakeRecorder(1)
		emitUpgradeEvent(r, nodeRef("n1"), tt.upgrade)
		close(r.Events)
		if got := <-r.Events; got != tt.want {
			t.Errorf("%+v: %q, want %q", tt.upgrade, got, tt.want)
		}
	}
}
