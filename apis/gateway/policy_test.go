package gateway

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// TestPolicies: who has which Service, what is said of it, and to which Gateways it
// matters.
func TestPolicies(t *testing.T) {
	policy := func(name, target, validation string) string {
		return "\n---\nkind: BackendTLSPolicy\nmetadata: {name: " + name + "}\nspec: {targetRefs: [{group: '', kind: Service, name: " + target + "}], validation: {hostname: a.example, " + validation + "}}"
	}
	ca := "caCertificateRefs: [{group: '', kind: ConfigMap, name: ca}]"
	o := read(t, gateways+`kind: HTTPRoute
metadata: {name: r}
spec: {parentRefs: [{name: g, namespace: infra, sectionName: some}], rules: [{backendRefs: [{name: web, port: 80}, {name: web, port: 82}, {name: outside, port: 80}]}]}`+
		policy("port", "web, sectionName: h2c", ca)+policy("whole", "web", ca)+policy("late", "web", ca)+
		policy("none", "none", "caCertificateRefs: [{group: '', kind: ConfigMap, name: none}]")+
		policy("kind", "other", "caCertificateRefs: [{group: x, kind: Bundle, name: ca}]")+
		policy("half", "half", "caCertificateRefs: [{group: '', kind: ConfigMap, name: empty}, {group: '', kind: ConfigMap, name: ca}]")+
		policy("system", "system", "wellKnownCACertificates: System"))
	o.Policies[0].Status.Ancestors = []gatewayv1.PolicyAncestorStatus{{ControllerName: "istio.io/gateway-controller"}}
	v := Evaluate(o)
	got := map[string]string{}
	for _, p := range v.Policies {
		got[p.Name] = fmt.Sprint(p.Refused.Reason, "/", p.Unresolved.Reason, "/", len(p.Gateways))
	}
	if diff := cmp.Diff(map[string]string{
		"port": "//1", "whole": "//1", "late": "Conflicted//1", "none": "NoValidCACertificate/InvalidCACertificateRef/0", "kind": "NoValidCACertificate/InvalidKind/0",
		"half": "/InvalidCACertificateRef/0", "system": "Invalid//0",
	}, got); diff != "" {
		t.Error(diff)
	}
	backends := map[int]string{}
	for i, ref := range v.Routes[0].HTTP.Spec.Rules[0].BackendRefs {
		if b := v.Routes[0].Backend(ref.BackendRef); b.Policy != nil {
			backends[i] = b.Policy.Name
		}
	}
	if diff := cmp.Diff(map[int]string{0: "whole", 1: "port"}, backends); diff != "" {
		t.Error(diff)
	}
	status := v.Policies[0].PolicyStatus(metav1.Now())
	if len(status.Ancestors) != 2 || status.Ancestors[0].ControllerName == Controller || status.Ancestors[1].AncestorRef.Name != "g" ||
		said(status.Ancestors[1].Conditions) != "Accepted=Accepted ResolvedRefs=ResolvedRefs" {
		t.Errorf("%+v", status)
	}
}
