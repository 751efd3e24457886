package alloc

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// TestExternal: cluster addresses are none that a Service may take as external ones,
// unless it had them when an earlier version let them in.
func TestExternal(t *testing.T) {
	with := func(ips ...string) *corev1.Service {
		return &corev1.Service{Spec: corev1.ServiceSpec{ExternalIPs: ips}}
	}
	for _, f := range []*Families{families(t, "10.96.0.0/16", "fd00:96::/112"), families(t, "fd00:96::/112", "10.96.0.0/16")} {
		f.by[corev1.IPv4Protocol].others.Ranges = func(context.Context) ([]netip.Prefix, error) {
			return []netip.Prefix{netip.MustParsePrefix("10.97.0.0/24")}, nil
		}
		for _, bad := range []string{"10.96.0.10", "10.96.0.0", "10.97.0.7", "fd00:96::a"} {
			err := f.external(t.Context(), with("192.0.2.1", bad), with("192.0.2.1"))
			if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.externalIPs[1]: Invalid value: \""+bad) {
				t.Errorf("%s: %v", bad, err)
			}
			if err := f.external(t.Context(), with(bad), with(bad)); err != nil {
				t.Errorf("%s, which it had: %v", bad, err)
			}
		}
		if err := f.external(t.Context(), with("192.0.2.1", "10.98.0.1", "fd00:97::1"), nil); err != nil {
			t.Error(err)
		}
		// However many there are, the ranges are read once a family, and not at all for
		// those that the Service had.
		read := 0
		for _, family := range f.order {
			f.by[family].others.Ranges = func(context.Context) ([]netip.Prefix, error) { read++; return nil, nil }
		}
		many := with()
		for i := range 5000 {
			many.Spec.ExternalIPs = append(many.Spec.ExternalIPs, "192.0.2.1", fmt.Sprintf("192.0.%d.%d", i>>8, i&0xff))
		}
		if err := f.external(t.Context(), many, many); err != nil || read != 0 {
			t.Errorf("the same addresses: the ranges were read %d times; %v", read, err)
		}
		if err := f.external(t.Context(), many, nil); err != nil || read != len(f.order) {
			t.Errorf("many addresses: the ranges were read %d times; %v", read, err)
		}
	}
}

// TestSettle: what a Service asks for and had, in clusters of one family and of
// two, written as "POLICY FAMILIES ADDRESSES"; "-" is what is not set.
func TestSettle(t *testing.T) {
	one, two := families(t, "10.96.0.0/16"), families(t, "10.96.0.0/16", "fd00:96::/112")
	six := families(t, "fd00:96::/112", "10.96.0.0/16")
	const dual = "PreferDualStack 4,6 10.96.0.9,fd00:96::9"
	for _, tt := range []struct {
		name     string
		f        *Families
		old, new string
		want     string // or the fault
	}{
		{"nothing asked, one family", one, "", "- - -", "SingleStack 4 -"},
		{"nothing asked, two families", two, "", "- - -", "SingleStack 4 -"},
		{"nothing asked, the other one first", six, "", "- - -", "SingleStack 6 -"},
		{"preferred, one family", one, "", "PreferDualStack - -", "PreferDualStack 4 -"},
		{"preferred", two, "", "PreferDualStack - -", "PreferDualStack 4,6 -"},
		{"preferred, IPv6 first", two, "", "PreferDualStack 6 -", "PreferDualStack 6,4 -"},
		{"required", two, "", "RequireDualStack - -", "RequireDualStack 4,6 -"},
		{"required, one family", one, "", "RequireDualStack - -", "spec.ipFamilyPolicy: this cluster is not configured for dual-stack services"},
		{"the other family", two, "", "- 6 -", "SingleStack 6 -"},
		{"a family that is not there", one, "", "- 6 -", "spec.ipFamilies[0]: not configured on this cluster"},
		{"two families without a policy", two, "", "- 4,6 -", "spec.ipFamilyPolicy: must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified"},
		{"an address says its family", two, "", "- - fd00:96::7", "SingleStack 6 fd00:96::7"},
		{"two addresses say theirs", two, "", "PreferDualStack - fd00:96::7,10.96.0.7", "PreferDualStack 6,4 fd00:96::7,10.96.0.7"},
		{"two addresses of one family", two, "", "PreferDualStack - 10.96.0.8,10.96.0.7", "spec.clusterIPs: may specify no more than one IP for each IP family"},
		{"an address of another family than it says", two, "", "- 4 fd00:96::7", "spec.clusterIPs[0]: expected an IPv4 value as indicated by `ipFamilies[0]`"},
		{"a family twice", two, "", "PreferDualStack 4,4 -", "spec.ipFamilies[1]: Duplicate value"},
		{"an address of a family that is not there", one, "", "- - fd00:96::7", "spec.clusterIPs[0]: IPv6 is not configured on this cluster"},
		{"two addresses without a policy", two, "", "- - 10.96.0.7,fd00:96::7", "spec.ipFamilyPolicy: must be 'RequireDualStack' or 'PreferDualStack' when multiple cluster IPs are specified"},
		{"headless with a selector", two, "", "- - None", "SingleStack 4 None"},
		{"headless without", two, "", "- - None none", "RequireDualStack 4,6 None"},
		{"headless without, one family", one, "", "- - None none", "SingleStack 4 None"},
		{"headless without, SingleStack", two, "", "SingleStack 6 None none", "SingleStack 6 None"},

		{"nothing changed", two, dual, dual, dual},
		{"nothing changed since the cluster had one", two, "PreferDualStack 4 10.96.0.9", "PreferDualStack 4 10.96.0.9", "PreferDualStack 4 10.96.0.9"},
		{"up", two, "SingleStack 4 10.96.0.9", "PreferDualStack 4 10.96.0.9", "PreferDualStack 4,6 10.96.0.9"},
		{"up, one family", one, "SingleStack 4 10.96.0.9", "PreferDualStack 4 10.96.0.9", "PreferDualStack 4 10.96.0.9"},
		{"down", two, dual, "SingleStack 4,6 10.96.0.9,fd00:96::9", "SingleStack 4 10.96.0.9"},
		{"down, by the families too", two, dual, "SingleStack 4 10.96.0.9,fd00:96::9", "SingleStack 4 10.96.0.9"},
		{"down without saying so", two, dual, "PreferDualStack 4 10.96.0.9", "spec.ipFamilyPolicy: must be 'SingleStack' to release the secondary cluster IP"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			spec := specOf(tt.new)
			var old *corev1.ServiceSpec
			if tt.old != "" {
				old = specOf(tt.old)
			}
			errs := tt.f.settle(spec, old)
			if len(errs) > 0 {
				got := errs[0].Field + ": " + errs[0].Detail
				if errs[0].Detail == "" {
					got = errs[0].Error()
				}
				if !strings.HasPrefix(got, tt.want) {
					t.Errorf("fault %q, want %q", errs, tt.want)
				}
				return
			}
			got := words(spec)
			if d := cmp.Diff(strings.TrimSuffix(tt.want, " none"), got); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
		})
	}
}

func families(t *testing.T, cidrs ...string) *Families {
	t.Helper()
	var all []*Addresses
	for _, c := range cidrs {
		s, ok := newSpan(netip.MustParsePrefix(c))
		if !ok {
			t.Fatal(c)
		}
		all = append(all, &Addresses{span: s})
	}
	return NewFamilies(all...)
}

func specOf(text string) *corev1.ServiceSpec {
	w := strings.Fields(text)
	spec := &corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, Selector: map[string]string{"a": "b"}}
	if w[0] != "-" {
		policy := corev1.IPFamilyPolicy(w[0])
		spec.IPFamilyPolicy = &policy
	}
	if w[1] != "-" {
		for _, n := range strings.Split(w[1], ",") {
			spec.IPFamilies = append(spec.IPFamilies, corev1.IPFamily("IPv"+n))
		}
	}
	if w[2] != "-" {
		spec.ClusterIPs = strings.Split(w[2], ",")
		spec.ClusterIP = spec.ClusterIPs[0]
	}
	if len(w) > 3 {
		spec.Selector = nil
	}
	return spec
}

func words(spec *corev1.ServiceSpec) string {
	var families []string
	for _, f := range spec.IPFamilies {
		families = append(families, strings.TrimPrefix(string(f), "IPv"))
	}
	ips := strings.Join(spec.ClusterIPs, ",")
	if ips == "" {
		ips = "-"
	}
	return string(*spec.IPFamilyPolicy) + " " + strings.Join(families, ",") + " " + ips
}
