package networking

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func newCIDR(cidrs ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "more", ResourceVersion: "7"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs}}
}

func TestValidateServiceCIDR(t *testing.T) {
	for _, tt := range []struct {
		cidrs []string
		want  []string
	}{
		{nil, []string{"spec.cidrs: Required value"}},
		{[]string{"10.0.0.0/16"}, nil},
		{[]string{"10.0.0.0/16", "2001:db8::/108"}, nil},
		{[]string{"2001:db8::/108", "10.0.0.0/16"}, nil},
		{[]string{"10.0.0.0/16", "10.1.0.0/16"}, []string{"spec.cidrs: Invalid value"}},
		{[]string{"10.0.0.0/16", "2001:db8::/108", "10.1.0.0/16"}, []string{"spec.cidrs: Too many: 3: must have at most 2 items"}},
		{[]string{"10.0.0.0"}, []string{"spec.cidrs[0]: Invalid value"}},
		{[]string{"10.0.0.1/16"}, []string{"spec.cidrs[0]: Invalid value"}},
		{[]string{"2001:DB8::/108"}, []string{"spec.cidrs[0]: Invalid value: \"2001:DB8::/108\": must be in canonical form"}},
		{[]string{"10.0.0.0/16", ""}, []string{"spec.cidrs[1]: Invalid value"}},
	} {
		checktest.Faults(t, ServiceCIDR().Validate(newCIDR(tt.cidrs...)), tt.want...)
	}
}

func TestServiceCIDRsAreImmutable(t *testing.T) {
	fixed := []string{"spec.cidrs: Invalid value"}
	for _, tt := range []struct {
		before, now, want []string
	}{
		{[]string{"10.0.0.0/16"}, []string{"10.0.0.0/16"}, nil},
		{[]string{"10.0.0.0/16"}, []string{"10.0.0.0/16", "2001:db8::/108"}, nil},
		{[]string{"10.0.0.0/16"}, []string{"10.0.0.0/16", "10.1.0.0/16"}, fixed},
		{[]string{"10.0.0.0/16"}, []string{"2001:db8::/108", "10.0.0.0/16"}, fixed},
		{[]string{"10.0.0.0/16"}, []string{"10.0.0.0/15"}, fixed},
		{[]string{"10.0.0.0/16", "2001:db8::/108"}, []string{"10.0.0.0/16"}, fixed},
		{[]string{"10.0.0.0/16"}, nil, fixed},
	} {
		checktest.Faults(t, ServiceCIDR().ValidateUpdate(newCIDR(tt.now...), newCIDR(tt.before...)), tt.want...)
	}
}

func TestServiceRanges(t *testing.T) {
	c := newCIDR("10.0.0.0/16", "2001:db8::/108")
	if got := ServiceRanges(c); got != nil {
		t.Errorf("one that is not ready gives %v", got)
	}
	c.Status.Conditions = []metav1.Condition{{Type: networkingv1.ServiceCIDRConditionReady, Status: metav1.ConditionTrue}}
	if got := ServiceRanges(c); !slices.Equal(got, []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("2001:db8::/108")}) {
		t.Errorf("got %v", got)
	}
	c.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	if got := ServiceRanges(c); got != nil {
		t.Errorf("one that goes gives %v", got)
	}
}

func TestValidateIPAddress(t *testing.T) {
	whole := networkingv1.ParentReference{Resource: "services", Namespace: "default", Name: "web"}
	with := func(change func(*networkingv1.ParentReference)) *networkingv1.ParentReference {
		ref := whole
		change(&ref)
		return &ref
	}
	for _, tt := range []struct {
		name string
		ref  *networkingv1.ParentReference
		want []string
	}{
		{"10.0.0.1", &whole, nil},
		{"2001:db8::1", &whole, nil},
		{"10.0.0.01", &whole, []string{"metadata.name: Invalid value"}},
		{"10.0.0.0/8", &whole, []string{"metadata.name: Invalid value"}},
		{"web", &whole, []string{"metadata.name: Invalid value"}},
		{"fe80::1%eth0", &whole, []string{"metadata.name: Invalid value"}},
		{"::ffff:10.0.0.1", &whole, []string{"metadata.name: Invalid value: \"::ffff:10.0.0.1\": must be an IP address in its canonical form, like 10.0.0.1"}},
		{"2001:db8:0::1", &whole, []string{"metadata.name: Invalid value: \"2001:db8:0::1\": must be an IP address in its canonical form, like 2001:db8::1"}},
		{"10.0.0.1", nil, []string{"spec.parentRef: Required value"}},
		{"10.0.0.1", with(func(r *networkingv1.ParentReference) { r.Resource = "" }), []string{"spec.parentRef.resource: Required value"}},
		{"10.0.0.1", with(func(r *networkingv1.ParentReference) { r.Name = "" }), []string{"spec.parentRef.name: Required value"}},
		{"10.0.0.1", with(func(r *networkingv1.ParentReference) { r.Name = "a/b" }), []string{"spec.parentRef.name: Invalid value"}},
		{"10.0.0.1", with(func(r *networkingv1.ParentReference) { r.Namespace = "a%b" }), []string{"spec.parentRef.namespace: Invalid value"}},
		{"10.0.0.1", with(func(r *networkingv1.ParentReference) { r.Group = "-" }), []string{"spec.parentRef.group: Invalid value"}},
		{"10.0.0.1", with(func(r *networkingv1.ParentReference) { r.Namespace, r.Group = "", "gateway.networking.k8s.io" }), nil},
	} {
		a := &networkingv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Name: tt.name, ResourceVersion: "7"}, Spec: networkingv1.IPAddressSpec{ParentRef: tt.ref}}
		checktest.Faults(t, IPAddress().Validate(a), tt.want...)
	}
	old := &networkingv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Name: "10.0.0.1", ResourceVersion: "7"}, Spec: networkingv1.IPAddressSpec{ParentRef: &whole}}
	other := old.DeepCopy()
	other.Labels = map[string]string{"a": "b"}
	checktest.Faults(t, IPAddress().ValidateUpdate(other, old))
	other.Spec.ParentRef.Name = "other"
	checktest.Faults(t, IPAddress().ValidateUpdate(other, old), "spec.parentRef: Invalid value")
}
