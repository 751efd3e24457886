package admissionregistration

import (
	"testing"

	v1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func TestWebhookFaults(t *testing.T) {
	k := ValidatingWebhookConfiguration()
	base := func() *v1.ValidatingWebhookConfiguration {
		c := &v1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Webhooks: []v1.ValidatingWebhook{{
			Name: "a.example.com", ClientConfig: v1.WebhookClientConfig{URL: ptr.To("https://h")},
			Rules: []v1.RuleWithOperations{{Operations: []v1.OperationType{v1.Create}, Rule: v1.Rule{
				APIGroups: []string{"*"}, APIVersions: []string{"*"}, Resources: []string{"*/*"},
			}}},
			SideEffects: ptr.To(v1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"},
		}}}
		k.Default(c)
		return c
	}
	for name, test := range map[string]struct {
		change func(*v1.ValidatingWebhook)
		want   []string
	}{
		"whole":      {func(*v1.ValidatingWebhook) {}, nil},
		"short name": {func(w *v1.ValidatingWebhook) { w.Name = "a" }, []string{`webhooks[0].name: Invalid value: "a": should be a domain with at least three segments`}},
		"nowhere":    {func(w *v1.ValidatingWebhook) { w.ClientConfig.URL = nil }, []string{"webhooks[0].clientConfig: Required value: exactly one of url or service is required"}},
		"two places": {func(w *v1.ValidatingWebhook) {
			w.ClientConfig.Service = &v1.ServiceReference{Name: "s", Namespace: "n"}
		}, []string{"webhooks[0].clientConfig: Required value"}},
		"plain HTTP":   {func(w *v1.ValidatingWebhook) { w.ClientConfig.URL = ptr.To("http://h") }, []string{`webhooks[0].clientConfig.url: Invalid value: "http": 'https' is the only allowed URL scheme`}},
		"password":     {func(w *v1.ValidatingWebhook) { w.ClientConfig.URL = ptr.To("https://u:secret@h") }, []string{`webhooks[0].clientConfig.url: Invalid value: "": user information`}},
		"effects":      {func(w *v1.ValidatingWebhook) { w.SideEffects = ptr.To(v1.SideEffectClassSome) }, []string{`webhooks[0].sideEffects: Unsupported value: "Some"`}},
		"patience":     {func(w *v1.ValidatingWebhook) { w.TimeoutSeconds = ptr.To[int32](31) }, []string{"webhooks[0].timeoutSeconds: Invalid value: 31: the timeout value must be between 1 and 30 seconds"}},
		"versions":     {func(w *v1.ValidatingWebhook) { w.AdmissionReviewVersions = []string{"v2"} }, []string{"webhooks[0].admissionReviewVersions: Invalid value"}},
		"no operation": {func(w *v1.ValidatingWebhook) { w.Rules[0].Operations = nil }, []string{"webhooks[0].rules[0].operations: Required value"}},
		"all and one":  {func(w *v1.ValidatingWebhook) { w.Rules[0].Resources = []string{"*/*", "pods"} }, []string{"webhooks[0].rules[0].resources[0]: Invalid value"}},
		"one and all":  {func(w *v1.ValidatingWebhook) { w.Rules[0].Resources = []string{"pods/*", "pods/status"} }, []string{`webhooks[0].rules[0].resources[1]: Invalid value: "pods/status": if 'pods/*' is present`}},
		"no condition": {func(w *v1.ValidatingWebhook) { w.MatchConditions = []v1.MatchCondition{{Name: "x"}} }, []string{"webhooks[0].matchConditions[0].expression: Required value"}},
		"empty path": {func(w *v1.ValidatingWebhook) {
			w.ClientConfig = v1.WebhookClientConfig{Service: &v1.ServiceReference{Name: "s", Namespace: "n", Path: ptr.To("")}}
		}, nil},
		"wrong service": {func(w *v1.ValidatingWebhook) {
			w.ClientConfig = v1.WebhookClientConfig{Service: &v1.ServiceReference{Name: "s", Path: ptr.To("x")}}
		}, []string{"webhooks[0].clientConfig.service.namespace: Required value", `webhooks[0].clientConfig.service.path: Invalid value: "x": must start with a '/'`}},
	} {
		t.Run(name, func(t *testing.T) {
			c := base()
			test.change(&c.Webhooks[0])
			checktest.Faults(t, k.Validate(c), test.want...)
		})
	}
	twice := base()
	twice.Webhooks = append(twice.Webhooks, twice.Webhooks[0])
	checktest.Faults(t, k.Validate(twice), `webhooks[1].name: Duplicate value: "a.example.com"`)
}

func TestPolicyFaults(t *testing.T) {
	checktest.Faults(t, ValidatingAdmissionPolicy().Validate(&v1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: "p"}}),
		"spec.matchConstraints: Required value", "spec.validations: Required value: validations or auditAnnotations must be non-empty")
	checktest.Faults(t, ValidatingAdmissionPolicyBinding().Validate(&v1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "b"},
		Spec: v1.ValidatingAdmissionPolicyBindingSpec{
			ValidationActions: []v1.ValidationAction{v1.Deny, v1.Warn, "Shout"},
			ParamRef:          &v1.ParamRef{Name: "x", Selector: &metav1.LabelSelector{}},
		},
	}),
		"spec.policyName: Required value",
		"spec.paramRef.name: Forbidden: name and selector are mutually exclusive",
		"spec.paramRef.parameterNotFoundAction: Required value",
		`spec.validationActions[2]: Unsupported value: "Shout"`,
		"spec.validationActions: Invalid value")
	mutating := &v1.MutatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: v1.MutatingAdmissionPolicySpec{
		MatchConstraints: &v1.MatchResources{},
		Mutations:        []v1.Mutation{{PatchType: v1.PatchTypeJSONPatch, ApplyConfiguration: &v1.ApplyConfiguration{Expression: "x"}}},
	}}
	MutatingAdmissionPolicy().Default(mutating)
	checktest.Faults(t, MutatingAdmissionPolicy().Validate(mutating),
		"spec.matchConstraints.resourceRules: Required value",
		"spec.reinvocationPolicy: Required value",
		"spec.mutations[0].applyConfiguration: Forbidden",
		"spec.mutations[0].jsonPatch: Required value")
}
