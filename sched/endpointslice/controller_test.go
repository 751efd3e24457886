package endpointslice

import (
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// The bug of issue 9: a slice whose name was taken failed the pass.
func TestTakenName(t *testing.T) {
	client := fake.NewClientset()
	refused := schedtest.RefuseNames(client, "endpointslices", 2)
	c := &controller{client: client, pending: loop.NewPending(clock.RealClock{}, nil)}
	s := service(nil)
	plan := Plan{Create: []*discoveryv1.EndpointSlice{newSlice(s, discoveryv1.AddressTypeIPv4, nil)}}
	if err := c.execute(t.Context(), loop.KeyOf(s), plan); err != nil {
		t.Errorf("create a slice after a name that is taken: %v", err)
	}
	list, err := client.DiscoveryV1().EndpointSlices(s.Namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 || refused() != 2 {
		t.Errorf("%d names were refused, the slices are %v: %v", refused(), list.Items, err)
	}
	// Only the slice that was made is waited for in the cache.
	c.pending.SawPresent(loop.KeyOf(s), loop.KeyOf(&list.Items[0]))
	if settled, _, err := c.pending.Settled(t.Context(), loop.KeyOf(s)); !settled || err != nil {
		t.Errorf("waits for a slice that was never made: %v", err)
	}
}
