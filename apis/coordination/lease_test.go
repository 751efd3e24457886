package coordination

import (
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func TestValidateLease(t *testing.T) {
	kind := Lease()
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: "n1", Namespace: "kube-node-lease", ResourceVersion: "7"},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: ptr.To("n1"), LeaseDurationSeconds: ptr.To[int32](40), LeaseTransitions: ptr.To[int32](0)},
	}
	checktest.Faults(t, kind.Validate(lease))
	bad := lease.DeepCopy()
	bad.Spec = coordinationv1.LeaseSpec{LeaseDurationSeconds: ptr.To[int32](0), LeaseTransitions: ptr.To[int32](-1), PreferredHolder: ptr.To("n2")}
	checktest.Faults(t, kind.ValidateUpdate(bad, lease),
		"spec.leaseDurationSeconds: Invalid value: 0: must be greater than 0",
		"spec.leaseTransitions: Invalid value: -1: must be greater than or equal to 0",
		"spec.preferredHolder: Forbidden: may only be specified when `strategy` is defined",
	)
	if kind.UnconditionalUpdate {
		t.Error("a lease may be overwritten unseen")
	}
}
