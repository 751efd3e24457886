package servicecidr

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/networking"
	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var ranges = Ranges{Services: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}, Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/14")}}

func cidr(name string, cidrs ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 3}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs}}
}

func going(c *networkingv1.ServiceCIDR) *networkingv1.ServiceCIDR {
	c.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	return c
}

func usable(c *networkingv1.ServiceCIDR) *networkingv1.ServiceCIDR {
	c.Status.Conditions = []metav1.Condition{ranges.Condition(c, "")}
	return c
}

func TestCondition(t *testing.T) {
	for _, tt := range []struct {
		cidr *networkingv1.ServiceCIDR
		want string
	}{
		{newDefault(ranges.Services), "True Usable"},
		{cidr("more", "192.0.2.0/24"), "True Usable"},
		{cidr("both", "2001:db8::/108", "192.0.2.0/24"), "True Usable"},
		{cidr("six", "2001:db8::/108"), "False FamilyNotConfigured"},
		{cidr("pods", "10.245.0.0/24"), "False OverlapsPods"},
		{cidr("wide", "10.0.0.0/8"), "False OverlapsPods"},
		{going(cidr("more", "192.0.2.0/24")), "False Terminating"},
	} {
		got := ranges.Condition(tt.cidr, "shop/web")
		if string(got.Status)+" "+got.Reason != tt.want || got.Type != networkingv1.ServiceCIDRConditionReady || got.ObservedGeneration != tt.cidr.Generation {
			t.Errorf("%s: %+v, want %s", tt.cidr.Name, got, tt.want)
		}
		tt.cidr.Status.Conditions = []metav1.Condition{got}
		if gives := len(networking.ServiceRanges(tt.cidr)) > 0; gives != (got.Status == metav1.ConditionTrue) {
			t.Errorf("%s: gives addresses: %t, but its condition is %+v", tt.cidr.Name, gives, got)
		}
	}
}

func TestUser(t *testing.T) {
	services := []corev1.Service{
		{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "headless"}, Spec: corev1.ServiceSpec{ClusterIPs: []string{"None"}}},
		{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: corev1.ServiceSpec{ClusterIPs: []string{"192.0.2.9"}}},
	}
	more := going(cidr("more", "192.0.2.0/24"))
	for _, tt := range []struct {
		name   string
		going  *networkingv1.ServiceCIDR
		others []*networkingv1.ServiceCIDR
		want   string
	}{
		{"in use", more, nil, "shop/web"},
		{"others hold something else", more, []*networkingv1.ServiceCIDR{more, usable(newDefault(ranges.Services))}, "shop/web"},
		{"another holds it", more, []*networkingv1.ServiceCIDR{more, usable(cidr("half", "192.0.2.0/25"))}, ""},
		{"another would hold it", more, []*networkingv1.ServiceCIDR{more, cidr("half", "192.0.2.0/25")}, "shop/web"},
		{"another that goes too", more, []*networkingv1.ServiceCIDR{more, going(usable(cidr("half", "192.0.2.0/25")))}, "shop/web"},
		{"not in use", going(cidr("free", "198.51.100.0/24")), nil, ""},
	} {
		if got := User(tt.going, tt.others, services); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestSecondRange(t *testing.T) {
	both := Ranges{Services: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:96::/112")}, Pods: ranges.Pods}
	had := newDefault(ranges.Services)
	if w := ranges.widen(had); w != nil {
		t.Errorf("a cluster of one family: %v", w.Spec.CIDRs)
	}
	wide := both.widen(had)
	if wide == nil || !slices.Equal(wide.Spec.CIDRs, []string{"10.96.0.0/16", "fd00:96::/112"}) || len(had.Spec.CIDRs) != 1 {
		t.Fatalf("%+v", wide)
	}
	for _, other := range []*networkingv1.ServiceCIDR{wide, cidr("more", "10.96.0.0/16"), cidr(networking.DefaultServiceCIDR, "10.97.0.0/16")} {
		if w := both.widen(other); w != nil {
			t.Errorf("%s %v was changed to %v", other.Name, other.Spec.CIDRs, w.Spec.CIDRs)
		}
	}
	if c := both.Condition(cidr("six", "fd00:97::/112"), ""); c.Status != metav1.ConditionTrue {
		t.Errorf("a range of the second family: %+v", c)
	}
}
