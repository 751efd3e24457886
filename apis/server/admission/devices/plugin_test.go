package devices

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/utils/ptr"
)

type namespaces map[string]map[string]string // labels by name

func (n namespaces) Namespace(_ context.Context, name string) (*corev1.Namespace, error) {
	labels, ok := n[name]
	if !ok {
		return nil, apierrors.NewNotFound(corev1.Resource("namespaces"), name)
	}
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, nil
}

// TestWhatIsRefused: expressions and access for administrators, in each kind.
func TestWhatIsRefused(t *testing.T) {
	selectors := func(expression string) []resourcev1.DeviceSelector {
		return []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{Expression: expression}}}
	}
	const good, bad = `device.driver == "d" && device.attributes["d"].size > 1`, `device.drover == "d"`
	class := func(expression string) runtime.Object {
		return &resourcev1.DeviceClass{Spec: resourcev1.DeviceClassSpec{Selectors: selectors(expression)}}
	}
	exactly := func(expression string, admin bool) resourcev1.DeviceClaim {
		e := &resourcev1.ExactDeviceRequest{Selectors: selectors(expression)}
		if admin {
			e.AdminAccess = ptr.To(true)
		}
		return resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{Name: "r", Exactly: e}}}
	}
	claim := func(d resourcev1.DeviceClaim) runtime.Object {
		return &resourcev1.ResourceClaim{Spec: resourcev1.ResourceClaimSpec{Devices: d}}
	}
	template := func(d resourcev1.DeviceClaim) runtime.Object {
		return &resourcev1.ResourceClaimTemplate{Spec: resourcev1.ResourceClaimTemplateSpec{Spec: resourcev1.ResourceClaimSpec{Devices: d}}}
	}
	either := resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{Name: "r", FirstAvailable: []resourcev1.DeviceSubRequest{{Name: "a", Selectors: selectors(good)}, {Name: "b", Selectors: selectors(bad)}}}}}
	larger := func(q string) string { return `device.capacity["d"].memory.compareTo(` + q + `) >= 0` }
	dear := `[1,2,3,4,5,6,7,8,9,10].all(x, [1,2,3,4,5,6,7,8,9,10].all(y, [1,2,3,4,5,6,7,8,9,10].all(a, [1,2,3,4,5,6,7,8,9,10].all(b, [1,2,3,4,5,6,7,8,9,10].all(c, [1,2,3,4,5,6,7,8,9,10].all(d, device.driver.matches("a") || device.driver.matches("(a|b)*c")))))))`
	for name, c := range map[string]struct {
		obj       runtime.Object
		namespace string
		update    bool
		want      string
	}{
		"class":                    {obj: class(good)},
		"class, bad":               {obj: class(bad), want: `spec.selectors[0].cel.expression: Invalid value: "device.drover == \"d\"": compilation failed`},
		"class, changed":           {obj: class(bad), update: true, want: "spec.selectors[0].cel.expression"},
		"class, no bool":           {obj: class(`device.driver`), want: "must evaluate to bool"},
		"class, dear":              {obj: class(dear), want: "too complex"},
		"claim":                    {obj: claim(exactly(good, false)), namespace: "plain"},
		"claim, bad":               {obj: claim(exactly(bad, false)), namespace: "plain", want: "spec.devices.requests[0].exactly.selectors[0].cel.expression"},
		"claim, an alternative":    {obj: claim(either), namespace: "plain", want: "spec.devices.requests[0].firstAvailable[1].selectors[0].cel.expression"},
		"claim, stored before":     {obj: claim(exactly(bad, true)), namespace: "plain", update: true},
		"quantity":                 {obj: claim(exactly(larger(`quantity("1Gi")`), false)), namespace: "plain"},
		"quantity, out of bounds":  {obj: claim(exactly(larger(`quantity("1e-2000000000")`), false)), namespace: "plain", want: "quantity(): \"1e-2000000000\": the exponent has to be between -99 and 99"},
		"quantity, no digits":      {obj: template(exactly(larger(`quantity("e2000000000")`), false)), namespace: "plain", want: "the exponent has to be"},
		"quantity, escaped":        {obj: claim(exactly(larger(`quantity("1\x65-2000000000")`), false)), namespace: "plain", want: "the exponent has to be"},
		"quantity, by its path":    {obj: claim(exactly(larger(`.quantity("1e-2000000000")`), false)), namespace: "plain", want: "the exponent has to be"},
		"quantity, of parts":       {obj: claim(exactly(larger(`quantity("1e-2"+"000000000")`), false)), namespace: "plain", want: `quantity() takes only a text that is written out`},
		"quantity, of a list":      {obj: claim(exactly(`["1e-2000000000"].exists(q, `+larger("quantity(q)")+")", false)), namespace: "plain", want: `takes only a text`},
		"quantity, bound":          {obj: claim(exactly(`cel.bind(q, "1e-2000000000", `+larger("quantity(q)")+")", false)), namespace: "plain", want: `takes only a text`},
		"quantity, of no type":     {obj: claim(exactly(larger(`quantity(dyn("1e-2000000000"))`), false)), namespace: "plain", want: `takes only a text`},
		"quantity, of a device":    {obj: class(larger(`quantity(device.attributes["d"].size)`)), want: `takes only a text`},
		"quantity, in a map":       {obj: class(`{"a": isQuantity("1e-2000000000")}["a"]`), want: `isQuantity(): "1e-2000000000"`},
		"admin":                    {obj: claim(exactly(good, true)), namespace: "admins"},
		"admin, elsewhere":         {obj: claim(exactly(good, true)), namespace: "plain", want: "spec.devices.requests[0].exactly.adminAccess: Forbidden: admin access to devices requires the `resource.kubernetes.io/admin-access: true` label"},
		"template, admin":          {obj: template(exactly(good, true)), namespace: "plain", want: "spec.spec.devices.requests[0].exactly.adminAccess: Forbidden"},
		"template":                 {obj: template(exactly(good, false)), namespace: "plain"},
		"admin, of no namespace":   {obj: claim(exactly(good, true)), namespace: "gone", want: `namespaces "gone" not found`},
		"what is not for it":       {obj: &resourcev1.ResourceSlice{}},
		"admin, by another's word": {obj: claim(exactly(good, true)), namespace: "almost", want: "Forbidden"},
	} {
		t.Run(name, func(t *testing.T) {
			p := New(namespaces{"plain": nil, "admins": {resourcev1.DRAAdminNamespaceLabelKey: "true"}, "almost": {resourcev1.DRAAdminNamespaceLabelKey: "True"}})
			operation := admission.Create
			if c.update {
				operation = admission.Update
			}
			a := admission.NewAttributesRecord(c.obj, nil, resourcev1.SchemeGroupVersion.WithKind("K"), c.namespace, "n", resourcev1.SchemeGroupVersion.WithResource("r"), "", operation, nil, false, nil)
			err := p.(admission.ValidationInterface).Validate(t.Context(), a, nil)
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("says %v, want %q", err, c.want)
			}
		})
	}
}
