package scheduler

import (
	"errors"
	"testing"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// TestAnAllocationOfAnEarlierAttempt: of a pod's two claims the first was written
// and the second was not. Meanwhile another leader's write, which came before
// ours, gave the same device to another claim, and the watch has shown neither. When
// the pod is tried again it is not bound before the watch has come to its
// allocation, and not at all then.
func TestAnAllocationOfAnEarlierAttempt(t *testing.T) {
	for name, clashes := range map[string]bool{"two leaders": true, "one leader": false} {
		t.Run(name, func(t *testing.T) {
			pending := claimOf("q", exactly("r", 1))
			given := at(allocated(claimOf("q", exactly("r", 1)), "a", "x"), "5")
			given.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: "p", UID: schedtest.Pod("p").P.UID}}
			theirs := at(allocated(claimOf("theirs", exactly("r", 1)), "a", "x"), "4")
			snap := withDevices(t, world([]*schedtest.NodeBuilder{schedtest.Node("a")}), classOf("c"), sliceOf("a", deviceList(device("x", 1, 0))), pending)
			s := &scheduler{client: fake.NewSimpleClientset(given), clock: clock.RealClock{}, snapshot: snap, devices: snap.devices}
			pod := asks(schedtest.Pod("p"), "q").Obj()
			s.devices.wrote(given)

			p := newPodInfo(pod)
			v := runFilters(snap, p)
			if len(v.fit) != 1 {
				t.Fatal(v.explain())
			}
			choices := p.devices.choose(pod, v.fit[0])
			if len(choices) != 1 || !choices[0].wait {
				t.Fatalf("it is bound without a look at what was written before: %+v", choices)
			}
			done := make(chan error, 1)
			go func() { done <- s.bindDevices(t.Context(), pod, choices, nil) }()
			s.mu.Lock()
			if clashes {
				s.devices.show(nil, theirs)
			}
			s.mu.Unlock()
			s.deviceNews.tell()
			select {
			case err := <-done:
				if !errors.Is(err, errClash) || !clashes {
					t.Fatalf("before the watch has come to the allocation: %v", err)
				}
				t.Fatal("a clash was found before the watch has come to the allocation")
			default:
			}
			s.mu.Lock()
			s.devices.show(pending, given)
			s.mu.Unlock()
			s.deviceNews.tell()
			if err := <-done; errors.Is(err, errClash) != clashes || !clashes && err != nil {
				t.Fatalf("it came to %v", err)
			}
			live, err := s.client.ResourceV1().ResourceClaims(schedtest.Namespace).Get(t.Context(), "q", metav1.GetOptions{})
			if err != nil || (live.Status.Allocation == nil) != clashes {
				t.Errorf("the claim has %+v, %v", live.Status.Allocation, err)
			}
		})
	}
}
