package policy

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/clusterd/clusterd/netsetup/nft"
)

var update = flag.Bool("update", false, "write testdata instead of comparing with it")

var (
	tcp, _ = nft.ParseProtocol("tcp")
	udp, _ = nft.ParseProtocol("udp")
)

func addr(s string) netip.Addr     { return netip.MustParseAddr(s) }
func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

// TestCompile is the whole table for a group of each kind.
func TestCompile(t *testing.T) {
	got := Compile([]Group{
		{Name: "deny", Direction: Ingress, Addrs: []netip.Addr{addr("10.244.1.2")}},
		{Name: "web", Direction: Ingress, Addrs: []netip.Addr{addr("10.244.1.3"), addr("fd00::3")}, Rules: []Rule{
			{Peers: []netip.Addr{addr("10.244.2.9"), addr("fd00:2::9")}, Ports: []Port{{tcp, 8080, 8090}, {tcp, 8085, 8100}, {udp, 53, 53}}},
			{Blocks: []netip.Prefix{prefix("192.0.2.0/24")}, Except: map[int][]netip.Prefix{0: {prefix("192.0.2.64/26")}}, AnyPort: true},
			{AnyPeer: true, Targets: []Target{{addr("10.244.1.3"), tcp, 9090}}},
			{AnyPort: true},                // no peer
			{AnyPeer: true},                // no port
			{AnyPeer: true, AnyPort: true}, // all peers
		}},
		{Name: "out", Direction: Egress, Addrs: []netip.Addr{addr("10.244.1.3")}, Rules: []Rule{{Peers: []netip.Addr{addr("10.244.2.9")}, AnyPort: true}}},
	}).Text()
	const file = "testdata/policy.nft"
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Error(d)
	}
}

func TestRanges(t *testing.T) {
	for _, tt := range []struct {
		blocks []string
		except []string // of the first
		want   string
	}{
		{[]string{"10.0.0.0/8"}, nil, "10.0.0.0-10.255.255.255"},
		{[]string{"10.0.0.0/24"}, []string{"10.0.0.0/25"}, "10.0.0.128-10.0.0.255"},
		{[]string{"10.0.0.0/24"}, []string{"10.0.0.128/25"}, "10.0.0.0-10.0.0.127"},
		{[]string{"10.0.0.0/24"}, []string{"10.0.0.64/26", "10.0.0.80/28"}, "10.0.0.0-10.0.0.63 10.0.0.128-10.0.0.255"},
		{[]string{"10.0.0.0/25", "10.0.0.128/25"}, nil, "10.0.0.0-10.0.0.255"},
		// What one block leaves out, another one may hold.
		{[]string{"10.0.0.0/24", "10.0.0.32/30"}, []string{"10.0.0.0/25"}, "10.0.0.32-10.0.0.35 10.0.0.128-10.0.0.255"},
		{[]string{"0.0.0.0/0"}, []string{"255.255.255.255/32", "0.0.0.0/32"}, "0.0.0.1-255.255.255.254"},
		{[]string{"0.0.0.0/0", "0.0.0.0/0"}, nil, "0.0.0.0-255.255.255.255"},
	} {
		r := Rule{Except: map[int][]netip.Prefix{}}
		for _, b := range tt.blocks {
			r.Blocks = append(r.Blocks, prefix(b))
		}
		for _, e := range tt.except {
			r.Except[0] = append(r.Except[0], prefix(e))
		}
		var got []string
		for _, s := range r.ranges(families[0]) {
			got = append(got, fmt.Sprintf("%s-%s", s.first, s.last))
		}
		if d := cmp.Diff(tt.want, strings.Join(got, " ")); d != "" {
			t.Errorf("%v without %v:\n%s", tt.blocks, tt.except, d)
		}
	}
}

// TestOneAddressIsAFewElements: what comes to a group leaves the rest as it is.
func TestOneAddressIsAFewElements(t *testing.T) {
	groups := func(peers ...netip.Addr) []Group {
		return []Group{{Name: "web", Addrs: []netip.Addr{addr("10.244.1.3")}, Rules: []Rule{{Peers: peers, AnyPort: true}}}}
	}
	c := nft.Diff(nft.StateOf(Compile(groups(addr("10.0.0.1")))), Compile(groups(addr("10.0.0.1"), addr("10.0.0.2"))))
	if c.Elements() != 1 || len(c.Chains) != 0 {
		t.Errorf("%+v", c)
	}
}

func BenchmarkCompile10000Blocks(b *testing.B) {
	r := Rule{AnyPort: true}
	for i := range 10000 {
		r.Blocks = append(r.Blocks, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 7), byte(i << 1), 0}), 24))
	}
	for b.Loop() {
		Compile([]Group{{Name: "x", Addrs: []netip.Addr{addr("10.244.1.3")}, Rules: []Rule{r}}})
	}
}
