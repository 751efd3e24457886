package podnetwork

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/overlay"
)

func node(name, cidr, ip string) *v1.Node {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.NodeSpec{PodCIDR: cidr}}
	if ip != "" {
		n.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeHostName, Address: name}, {Type: v1.NodeInternalIP, Address: ip}}
	}
	return n
}

func TestMakePlan(t *testing.T) {
	pfx := netip.MustParsePrefix
	cluster := pfx("10.42.0.0/16")
	tests := []struct {
		name  string
		nodes []*v1.Node
		want  plan
	}{
		{"no range yet", []*v1.Node{node("me", "", "192.0.2.1"), node("b", "10.42.2.0/24", "192.0.2.2")},
			plan{routes: []overlay.Route{{Dst: pfx("10.42.2.0/24"), Via: netip.MustParseAddr("192.0.2.2")}}}},
		{"alone", []*v1.Node{node("me", "10.42.1.0/24", "192.0.2.1")},
			plan{own: pfx("10.42.1.0/24"), rules: nft.Ruleset{
				Forward:    []netip.Prefix{cluster, pfx("10.42.1.0/24")},
				Masquerade: []nft.Masquerade{{From: pfx("10.42.1.0/24"), Except: []netip.Prefix{cluster, pfx("10.42.1.0/24")}}},
			}}},
		{"others: no address, no range, nonsense", []*v1.Node{
			node("me", "10.42.1.0/24", "192.0.2.1"), node("c", "10.42.3.0/24", "192.0.2.3"), node("b", "10.42.2.0/24", "192.0.2.2"),
			node("d", "10.42.4.0/24", ""), node("e", "", "192.0.2.5"), node("f", "nonsense", "192.0.2.6"),
		}, plan{own: pfx("10.42.1.0/24"),
			routes: []overlay.Route{{Dst: pfx("10.42.2.0/24"), Via: netip.MustParseAddr("192.0.2.2")}, {Dst: pfx("10.42.3.0/24"), Via: netip.MustParseAddr("192.0.2.3")}},
			rules: nft.Ruleset{
				Forward:    []netip.Prefix{cluster, pfx("10.42.1.0/24"), pfx("10.42.2.0/24"), pfx("10.42.3.0/24"), pfx("10.42.4.0/24")},
				Masquerade: []nft.Masquerade{{From: pfx("10.42.1.0/24"), Except: []netip.Prefix{cluster, pfx("10.42.1.0/24"), pfx("10.42.2.0/24"), pfx("10.42.3.0/24"), pfx("10.42.4.0/24")}}},
			}}},
	}
	eq := cmp.Options{cmp.AllowUnexported(plan{}), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if d := cmp.Diff(tt.want, makePlan("me", []netip.Prefix{cluster}, tt.nodes), eq); d != "" {
				t.Error(d)
			}
		})
	}
}
