package podnetwork

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/netsetup/nft"
)

func TestWithPorts(t *testing.T) {
	inside := nft.Inside{Ranges: []netip.Prefix{netip.MustParsePrefix("10.42.1.0/24"), netip.MustParsePrefix("fd42:0:0:1::/64")}, Interface: "clusterd0"}
	got := withPorts(nft.Ruleset{}, inside, map[string]podsPorts{
		"b":   {Addr: netip.MustParseAddr("10.42.1.3"), Ports: []podstate.HostPort{{Protocol: "udp", HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: 53, Port: 5353}}},
		"a":   {Addr: netip.MustParseAddr("10.42.1.2"), Other: netip.MustParseAddr("fd42:0:0:1::2"), Ports: []podstate.HostPort{{Protocol: "tcp", HostPort: 8080, Port: 80}}},
		"old": {Addr: netip.MustParseAddr("10.99.1.2"), Ports: []podstate.HostPort{{Protocol: "tcp", HostPort: 1, Port: 1}}},
	}).Text("t")
	want := `table inet t {
	chain guard {
		type filter hook prerouting priority raw; policy accept;
		iifname "clusterd0" ip daddr 127.0.0.0/8 drop
	}

	chain prerouting {
		type nat hook prerouting priority dstnat; policy accept;
		ip daddr 127.0.0.1/32 udp dport 53 dnat ip to 10.42.1.3:5353
		fib daddr type local tcp dport 8080 dnat ip to 10.42.1.2:80
		fib daddr type local tcp dport 8080 dnat ip6 to [fd42:0:0:1::2]:80
	}

	chain output {
		type nat hook output priority dstnat; policy accept;
		ip6 daddr ::1/128 return
		ip daddr 127.0.0.1/32 udp dport 53 dnat ip to 10.42.1.3:5353
		fib daddr type local tcp dport 8080 dnat ip to 10.42.1.2:80
		fib daddr type local tcp dport 8080 dnat ip6 to [fd42:0:0:1::2]:80
	}

	chain forward {
		type filter hook forward priority filter; policy accept;
	}

	chain postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		ip saddr 127.0.0.0/8 ip daddr 10.42.1.0/24 ct status dnat masquerade
		ip saddr 10.42.1.3/32 ip daddr 10.42.1.3/32 ct status dnat masquerade
		ip saddr 10.42.1.2/32 ip daddr 10.42.1.2/32 ct status dnat masquerade
		ip6 saddr fd42:0:0:1::2/128 ip6 daddr fd42:0:0:1::2/128 ct status dnat masquerade
	}
}
`
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("rules (-want +got):\n%s", d)
	}
}

// TestPortsFile: what was written is found again, and what is not understood
// is refused.
func TestPortsFile(t *testing.T) {
	dir := t.TempDir()
	n := &Network{cfg: Config{Dir: dir}, ports: map[string]podsPorts{
		"a": {Addr: netip.MustParseAddr("10.42.1.2"), Ports: []podstate.HostPort{{Protocol: "tcp", HostPort: 8080, Port: 80}}},
	}}
	if err := n.savePorts(); err != nil {
		t.Fatal(err)
	}
	const golden = `{"version":1,"pods":{"a":{"addr":"10.42.1.2","ports":[{"protocol":"tcp","hostPort":8080,"port":80}]}}}`
	file := filepath.Join(dir, hostPortsFile)
	if b, err := os.ReadFile(file); err != nil || string(b) != golden {
		t.Errorf("the file: %s (%v), want %s", b, err, golden)
	}
	got, err := loadPorts(dir)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(n.ports, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
		t.Error(d)
	}
	if got, err := loadPorts(t.TempDir()); err != nil || len(got) > 0 {
		t.Errorf("no file: %v, %v", got, err)
	}
	for text, want := range map[string]string{"{": "hostports.json", `{"version":2}`: "has version 2"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := loadPorts(dir); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
}
