package antispoof

import (
	"flag"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/clusterd/clusterd/netsetup/nft"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func mac(t *testing.T, s string) net.HardwareAddr {
	t.Helper()
	m, err := net.ParseMAC(s)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestTableGolden(t *testing.T) {
	got := Compile([]uint32{0x636c7565}, []Port{
		{"cd0123456789ab", mac(t, "0a:cd:0a:2a:01:02"), []netip.Addr{addr("10.42.1.2"), addr("fd42:0:0:1::2")}},
		{"cdabcdefabcdef", mac(t, "0a:cd:0a:2a:01:03"), []netip.Addr{addr("10.42.1.3")}},
	}).Text()
	const file = "testdata/table.nft"
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
		t.Fatalf("table (-want +got), rewrite with -update:\n%s", d)
	}
}

func TestPortsThatMakeNoSenseAreRefused(t *testing.T) {
	good := mac(t, "0a:cd:0a:2a:01:02")
	for name, p := range map[string]Port{
		"no name":         {"", good, nil},
		"a long name":     {"cd0123456789abcd", good, nil},
		"no MAC":          {"cd0", nil, nil},
		"of InfiniBand":   {"cd0", mac(t, "00:00:00:00:fe:80:00:00:00:00:00:00:02:00:5e:10:00:00:00:01"), nil},
		"no address":      {"cd0", good, []netip.Addr{{}}},
		"any address":     {"cd0", good, []netip.Addr{addr("0.0.0.0")}},
		"IPv4 as if IPv6": {"cd0", good, []netip.Addr{addr("::ffff:10.0.0.1")}},
	} {
		g := New(Config{Kernel: &nft.FakeTables{}})
		if err := g.Set([]Port{p}); err == nil {
			t.Errorf("%s: Set takes it", name)
		}
		if err := g.Set(nil); err != nil {
			t.Fatal(err)
		}
		if err := g.Add(p); err == nil {
			t.Errorf("%s: Add takes it", name)
		}
	}
}

// TestChangesAreOfElements: a port that comes or goes alters its own elements
// and no others, a table that was deleted comes back and is reported.
func TestChangesAreOfElements(t *testing.T) {
	k := &nft.FakeTables{}
	var reported []string
	g := New(Config{Kernel: k, Groups: []uint32{7}, Repaired: func(table, what string) { reported = append(reported, table+": "+what) }})
	one := Port{"one", mac(t, "0a:cd:0a:2a:01:02"), []netip.Addr{addr("10.42.1.2")}}
	two := Port{"two", mac(t, "0a:cd:0a:2a:01:03"), []netip.Addr{addr("10.42.1.3")}}
	if err := g.Add(one); err == nil {
		t.Error("Add before Set would drop what a former process let through")
	}
	if err := g.Set([]Port{one}); err != nil {
		t.Fatal(err)
	}
	for _, step := range []func() error{
		func() error { return g.Add(two) }, func() error { return g.Remove("two") },
	} {
		before := k.Altered
		if err := step(); err != nil {
			t.Fatal(err)
		}
		if n := k.Altered - before; n != 2 { // its address, and that of the link
			t.Errorf("%d elements altered", n)
		}
	}
	before := k.Commits
	for _, step := range []func() error{
		func() error { return g.Remove("two") }, func() error { return g.Add(one) }, g.Check, g.Check,
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	if k.Commits != before || reported != nil {
		t.Errorf("%d transactions without a change; reported %q", k.Commits-before, reported)
	}
	if err := k.Delete(nft.Table{Name: TableName, Family: nft.Bridge}); err != nil {
		t.Fatal(err)
	}
	if err := g.Check(); err != nil {
		t.Fatal(err)
	}
	if len(k.Names()) != 1 || len(reported) != 1 || !strings.Contains(reported[0], "gone") {
		t.Errorf("tables %q, reported %q", k.Names(), reported)
	}
	if err := g.CleanUp(); err != nil || len(k.Names()) != 0 {
		t.Errorf("left: %q, %v", k.Names(), err)
	}
}
