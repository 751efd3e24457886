package coordination

import (
	"encoding/json"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func TestFencing(t *testing.T) {
	now := time.Date(2030, 1, 2, 3, 4, 5, 678_901_234, time.FixedZone("x", 3600))
	renewed := metav1.NewMicroTime(now)
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: "n1", Namespace: "kube-node-lease", ResourceVersion: "7"},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: ptr.To("n1"), LeaseDurationSeconds: ptr.To[int32](40), RenewTime: &renewed},
	}
	state := func(promised, taken, returning bool) {
		t.Helper()
		checktest.Faults(t, Lease().Validate(lease))
		// What a reader of the API sees, with times in its precision.
		b, err := json.Marshal(lease)
		read := &coordinationv1.Lease{}
		if err == nil {
			err = json.Unmarshal(b, read)
		}
		if err != nil {
			t.Fatal(err)
		}
		for who, l := range map[string]*coordinationv1.Lease{"writer": lease, "reader": read} {
			if Promised(l) != promised || Taken(l) != taken || Returning(l) != returning {
				t.Errorf("%s: promised %v, taken %v, returning %v", who, Promised(l), Taken(l), Returning(l))
			}
		}
	}
	state(false, false, false)
	Promise(lease)
	state(true, false, false)
	Take(lease, "node-controller", now)
	state(true, true, false)
	if !lease.Spec.RenewTime.Equal(&renewed) || *lease.Spec.LeaseTransitions != 1 {
		t.Errorf("taken: %+v", lease.Spec)
	}
	Return(lease, now)
	state(true, false, true)
	Settle(lease)
	state(true, false, false)
	if *lease.Spec.LeaseTransitions != 2 {
		t.Errorf("settled: %+v", lease.Spec)
	}
	later := metav1.NewMicroTime(now.Add(time.Second)) // by a program that copies annotations it does not know
	lease.Spec.RenewTime = &later
	state(false, false, false)
}
