package netpol

import (
	"context"
	"net/netip"
	"testing"
	"testing/synctest"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/clusterd/clusterd/netsetup/policy"
)

// noRules is an Enforcer that has nothing to do.
type noRules struct{}

func (noRules) Set([]policy.Group) error { return nil }
func (noRules) Run(context.Context)      {}

// TestGuardWithoutAPI: while the API cannot be read a static pod starts, and
// one from the API does not.
func TestGuardWithoutAPI(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, err := New(Config{
			NodeName: "n1", Client: fake.NewClientset(), Enforcer: noRules{},
			Static: func(uid types.UID) bool { return uid == "static" },
		})
		if err != nil {
			t.Fatal(err)
		}
		// Nothing runs, so nothing was ever read.
		addrs := []netip.Addr{netip.MustParseAddr("10.244.0.7")}
		if err := m.Guard(t.Context(), "static", addrs); err != nil {
			t.Errorf("static pod: %v", err)
		}
		if err := m.Guard(t.Context(), "other", addrs); err == nil {
			t.Error("a pod of the API started before the policies were read")
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := m.Guard(ctx, "static", addrs); err == nil {
			t.Error("the caller's end is no leave to start")
		}
	})
}
