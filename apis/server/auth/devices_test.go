package auth

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

func TestNodesSeeDevicesOfTheirOwn(t *testing.T) {
	made, shared, template := "made", "shared", "template"
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default"}}
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "a", ResourceClaimTemplateName: &template}, {Name: "b", ResourceClaimName: &shared}}
	pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "a", ResourceClaimName: &made}}
	pod.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "extended"}
	z := NewNodeAuthorizer(fakePods{pods: []*corev1.Pod{pod}})
	claim := func(verb, sub, namespace, name string) authorizer.AttributesRecord {
		return resource(verb, "resource.k8s.io", "resourceclaims", sub, namespace, name)
	}
	slice := func(verb, name, node string) authorizer.AttributesRecord {
		a := resource(verb, "resource.k8s.io", "resourceslices", "", "", name)
		if node != "" {
			a.FieldSelectorRequirements = fields.OneTermEqualSelector("spec.nodeName", node).Requirements()
		}
		return a
	}
	for _, test := range []struct {
		name string
		asks authorizer.AttributesRecord
		want bool
	}{
		{"claim made for a pod", claim("get", "", "default", "made"), true},
		{"claim that a pod names", claim("get", "", "default", "shared"), true},
		{"claim for extended resources", claim("get", "", "default", "extended"), true},
		{"the name of a pod's claim is no object's", claim("get", "", "default", "a"), false},
		{"another claim", claim("get", "", "default", "other"), false},
		{"a claim of that name elsewhere", claim("get", "", "vault", "shared"), false},
		{"all claims", claim("list", "", "default", ""), false},
		{"watching a claim", claim("watch", "", "default", "shared"), false},
		{"allocating", claim("update", "status", "default", "shared"), false},
		{"changing", claim("update", "", "default", "shared"), false},
		{"templates", resource("get", "resource.k8s.io", "resourceclaimtemplates", "", "default", "template"), false},
		{"creating a slice", slice("create", "", ""), true},
		{"its own", slice("update", "mine", ""), true},
		{"deleting its own", slice("delete", "mine", ""), true},
		{"another's", slice("get", "theirs", ""), false},
		{"deleting another's", slice("delete", "theirs", ""), false},
		{"one of all nodes", slice("patch", "anybodys", ""), false},
		{"one that is not there", slice("get", "none", ""), false},
		{"all of its own", slice("list", "", "n1"), true},
		{"deleting all of its own", slice("deletecollection", "", "n1"), true},
		{"all of another", slice("watch", "", "n2"), false},
		{"deleting all", slice("deletecollection", "", ""), false},
	} {
		test.asks.User = who("system:node:n1", user.NodesGroup)
		decision, _, err := z.Authorize(t.Context(), test.asks)
		if err != nil || (decision == authorizer.DecisionAllow) != test.want {
			t.Errorf("%s: %v %v, want allowed: %t", test.name, decision, err, test.want)
		}
	}
}
