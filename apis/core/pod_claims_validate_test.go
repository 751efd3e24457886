package core

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func TestResourceClaimsOfPods(t *testing.T) {
	at := field.NewPath("c")
	good := []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: ptr.To("one.gpu")}, {Name: "own", ResourceClaimTemplateName: ptr.To("gpu")}}
	checktest.Faults(t, validateResourceClaims(good, at))
	checktest.Faults(t, validateResourceClaims([]corev1.PodResourceClaim{
		good[0], good[0], {Name: "Gpu", ResourceClaimName: ptr.To("")}, {Name: "both", ResourceClaimName: ptr.To("a"), ResourceClaimTemplateName: ptr.To("a")}, {Name: "none"}, {ResourceClaimTemplateName: ptr.To("A")},
	}, at),
		`c[1].name: Duplicate value: "gpu"`, `c[2].name: Invalid value: "Gpu"`, "c[2].resourceClaimName: Required value", `c[3]: Invalid value: "both": at most one of`,
		`c[4]: Invalid value: "none": must specify one of`, "c[5].name: Required value", `c[5].resourceClaimTemplateName: Invalid value: "A"`)
	checktest.Faults(t, validateClaimStatuses([]corev1.PodResourceClaimStatus{{Name: "own", ResourceClaimName: ptr.To("p-own-1")}, {Name: "gpu"}}, good, at))
	checktest.Faults(t, validateClaimStatuses([]corev1.PodResourceClaimStatus{{Name: "own", ResourceClaimName: ptr.To("P")}, {Name: "own"}, {Name: "other"}}, good, at),
		`c[0].resourceClaimName: Invalid value: "P"`, `c[1].name: Duplicate value: "own"`, `c[2].name: Invalid value: "other"`)
}
