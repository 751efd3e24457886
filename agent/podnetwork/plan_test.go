package podnetwork

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/overlay"
	"github.com/clusterd/clusterd/netsetup/pathprobe"
)

func node(name, cidr, ip string) *v1.Node {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.NodeSpec{PodCIDR: cidr}}
	if first, _, two := strings.Cut(cidr, ","); two {
		n.Spec.PodCIDR, n.Spec.PodCIDRs = first, strings.Split(cidr, ",")
	}
	if ip != "" {
		n.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeHostName, Address: name}}
		for _, one := range strings.Split(ip, ",") {
			n.Status.Addresses = append(n.Status.Addresses, v1.NodeAddress{Type: v1.NodeInternalIP, Address: one})
		}
	}
	return n
}

func TestMakePlan(t *testing.T) {
	pfx := netip.MustParsePrefix
	cluster := pfx("10.42.0.0/16")
	other := func(cidrs, ips string) (n overlay.Node) {
		for _, c := range strings.Split(cidrs, ",") {
			n.Ranges = append(n.Ranges, pfx(c))
		}
		for _, ip := range strings.Split(ips, ",") {
			n.Addrs = append(n.Addrs, netip.MustParseAddr(ip))
		}
		return n
	}
	tests := []struct {
		name  string
		nodes []*v1.Node
		want  plan
	}{
		{"no range yet", []*v1.Node{node("me", "", "192.0.2.1"), node("b", "10.42.2.0/24", "192.0.2.2")},
			plan{others: []overlay.Node{other("10.42.2.0/24", "192.0.2.2")}}},
		{"alone", []*v1.Node{node("me", "10.42.1.0/24", "192.0.2.1")},
			plan{own: []netip.Prefix{pfx("10.42.1.0/24")}, rules: nft.Ruleset{
				Forward:    []netip.Prefix{cluster, pfx("10.42.1.0/24")},
				Masquerade: []nft.Masquerade{{From: pfx("10.42.1.0/24"), Except: []netip.Prefix{cluster, pfx("10.42.1.0/24")}}},
			}}},
		{"others: no address, no range, nonsense", []*v1.Node{
			node("me", "10.42.1.0/24", "192.0.2.1"), node("c", "10.42.3.0/24", "192.0.2.3"), node("b", "10.42.2.0/24", "192.0.2.2"),
			node("d", "10.42.4.0/24", ""), node("e", "", "192.0.2.5"), node("f", "nonsense", "192.0.2.6"),
		}, plan{own: []netip.Prefix{pfx("10.42.1.0/24")},
			others: []overlay.Node{other("10.42.2.0/24", "192.0.2.2"), other("10.42.3.0/24", "192.0.2.3")},
			rules: nft.Ruleset{
				Forward:    []netip.Prefix{cluster, pfx("10.42.1.0/24"), pfx("10.42.2.0/24"), pfx("10.42.3.0/24"), pfx("10.42.4.0/24")},
				Masquerade: []nft.Masquerade{{From: pfx("10.42.1.0/24"), Except: []netip.Prefix{cluster, pfx("10.42.1.0/24"), pfx("10.42.2.0/24"), pfx("10.42.3.0/24"), pfx("10.42.4.0/24")}}},
			}}},
		{"two families", []*v1.Node{
			node("me", "10.42.1.0/24,fd42:0:0:1::/64", "192.0.2.1,2001:db8::1"), node("b", "10.42.2.0/24,fd42:0:0:2::/64", "192.0.2.2,2001:db8::2"),
			node("c", "10.42.3.0/24", "192.0.2.3"),
		}, plan{own: []netip.Prefix{pfx("10.42.1.0/24"), pfx("fd42:0:0:1::/64")},
			others: []overlay.Node{other("10.42.2.0/24,fd42:0:0:2::/64", "192.0.2.2,2001:db8::2"), other("10.42.3.0/24", "192.0.2.3")},
			rules: nft.Ruleset{
				Forward: []netip.Prefix{cluster, pfx("10.42.1.0/24"), pfx("10.42.2.0/24"), pfx("10.42.3.0/24"), pfx("fd42:0:0:1::/64"), pfx("fd42:0:0:2::/64")},
				Masquerade: []nft.Masquerade{
					{From: pfx("10.42.1.0/24"), Except: []netip.Prefix{cluster, pfx("10.42.1.0/24"), pfx("10.42.2.0/24"), pfx("10.42.3.0/24")}},
					{From: pfx("fd42:0:0:1::/64"), Except: []netip.Prefix{pfx("fd42:0:0:1::/64"), pfx("fd42:0:0:2::/64")}},
				},
			}}},
	}
	eq := cmp.Options{cmp.AllowUnexported(plan{}), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := makePlan("me", []netip.Prefix{cluster}, tt.nodes, nil)
			if len(got.own) > 0 && !slices.Equal(got.within, got.rules.Forward) {
				t.Errorf("within %v", got.within)
			}
			got.within = nil // as Forward has them
			if d := cmp.Diff(tt.want, got, eq); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestBounded(t *testing.T) {
	pfx, addr := netip.MustParsePrefix, netip.MustParseAddr
	others := []overlay.Node{{Ranges: []netip.Prefix{pfx("10.42.2.0/24"), pfx("fd42:2::/64")}}, {Ranges: []netip.Prefix{pfx("10.42.3.0/24")}}, {Ranges: []netip.Prefix{pfx("fd42:4::/64")}}}
	way := func(at string, carries int) pathprobe.Result {
		return pathprobe.Result{Peer: pathprobe.Peer{Addr: addr(at)}, MTU: 1500, Carries: carries}
	}
	got := bounded(others, []pathprobe.Result{way("10.42.2.1", 0), way("fd42:2::1", 1400), way("10.42.3.1", 600), way("fd42:4::1", 600), way("10.42.9.1", 1400)})
	var mtus [][]int
	for _, o := range got {
		mtus = append(mtus, o.MTUs)
	}
	if d := cmp.Diff([][]int{{0, 1400}, {600}, {0}}, mtus); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if others[0].MTUs != nil {
		t.Error("what was given is changed")
	}
}
