package lb

import (
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/clusterd/clusterd/netsetup/nft"
)

var update = flag.Bool("update", false, "rewrite the golden file")

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func front(proto nft.Protocol, s string) Frontend {
	a := ap(s)
	return Frontend{Addr: a.Addr(), Proto: proto, Port: a.Port()}
}

func ends(s ...string) (out []Endpoint) {
	for _, a := range s {
		out = append(out, Endpoint{Addr: ap(a), Own: ap(a).Addr().Is6() || ap(a).Addr().As4()[2] == 1})
	}
	return out
}

var base = Base{
	Inside: []netip.Prefix{netip.MustParsePrefix("10.42.0.0/16"), netip.MustParsePrefix("10.42.1.0/24"), netip.MustParsePrefix("fd42::/48")},
	Ranges: []netip.Prefix{netip.MustParsePrefix("10.43.0.0/16")},
}

func sample() map[Frontend]Backend {
	return map[Frontend]Backend{
		front(tcp, "10.43.0.10:80"):  {Endpoints: ends("10.42.1.2:8080", "10.42.2.2:8080")},
		front(udp, "10.43.0.10:53"):  {Endpoints: ends("10.42.2.2:53")},
		front(tcp, "10.43.0.11:80"):  {},
		front(tcp, "10.43.0.12:80"):  {Silent: true},
		front(tcp, "10.43.0.13:80"):  {Endpoints: ends("10.42.1.3:80", "10.42.2.3:80"), Affinity: 3 * time.Hour},
		front(sctp, "[fd43::1]:9"):   {Endpoints: ends("[fd42::2]:9")},
		front(tcp, "0.0.0.0:30080"):  {Endpoints: ends("10.42.1.2:8080", "10.42.2.2:8080")},
		front(tcp, "192.0.2.100:80"): {Endpoints: ends("10.42.1.2:8080", "10.42.2.2:8080"), Local: true, Near: ends("10.42.1.2:8080"), Virtual: true, Sources: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("198.51.100.7/32")}},
		front(tcp, "0.0.0.0:30081"):  {Endpoints: ends("10.42.2.2:8080"), Local: true},
	}
}

func TestCompileGolden(t *testing.T) {
	got := Compile(base, sample()).Text()
	const file = "testdata/services.nft"
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

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func set(b Backend) *Backend { return &b }

// TestUpdatesAreCompile: after any history of changes the kernel holds what
// Compile makes of the frontends, and a check finds nothing to correct.
func TestUpdatesAreCompile(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		k := &nft.FakeTables{}
		b := New(k, quiet())
		if err := b.SetBase(base); err != nil {
			t.Fatal(err)
		}
		random := func(v6 bool) *Backend {
			if r.IntN(4) == 0 {
				return nil
			}
			some := func() (out []Endpoint) {
				for i := range 6 {
					if r.IntN(2) == 0 {
						a := netip.AddrFrom4([4]byte{10, 42, byte(1 + i%2), byte(i)})
						if v6 {
							a = netip.MustParseAddr(fmt.Sprintf("fd42::%d", i+1))
						}
						out = append(out, Endpoint{netip.AddrPortFrom(a, 80), i%2 == 0})
					}
				}
				r.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
				return out
			}
			out := Backend{Endpoints: some(), Silent: r.IntN(3) == 0, Local: r.IntN(2) == 0, Near: some(), Virtual: r.IntN(3) == 0}
			if r.IntN(3) == 0 {
				out.Affinity = time.Duration(1+r.IntN(2)) * time.Minute
			}
			if r.IntN(3) == 0 {
				out.Sources = []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 51, byte(r.IntN(3)), 0}), 16+r.IntN(9))}
			}
			return &out
		}
		addrs := []string{"10.43.0.1", "10.43.0.2", "192.0.2.9", "0.0.0.0", "fd43::1", "::"}
		for step := range 60 {
			changed := map[Frontend]*Backend{}
			for range 1 + r.IntN(3) {
				a := netip.MustParseAddr(addrs[r.IntN(len(addrs))])
				changed[Frontend{a, tcp, uint16(80 + r.IntN(2))}] = random(a.Is6())
			}
			if err := b.Update(changed); err != nil {
				t.Fatalf("seed %d step %d: %v", seed, step, err)
			}
			want := Compile(b.base, b.frontends)
			have, err := k.Read(want, true)
			if err != nil || !have.Whole {
				t.Fatal(have.Whole, err)
			}
			c := nft.Diff(have, want)
			c.Drop = nil // unused classes stay for a while
			for set := range c.Remove {
				if strings.HasPrefix(set, "class_") && len(c.Add[set]) == 0 {
					delete(c.Remove, set)
				}
			}
			if !c.Empty() {
				t.Fatalf("seed %d step %d: %+v differs", seed, step, c)
			}
		}
		if k.Commits == 0 {
			t.Fatal("no change was made in place")
		}
	}
}

// TestOneEndpoint: what comes or goes alters a few elements, however many there
// are.
func TestOneEndpoint(t *testing.T) {
	k := &nft.FakeTables{}
	b := New(k, quiet())
	f := front(tcp, "10.43.0.1:80")
	var many []Endpoint
	for i := range 1000 {
		many = append(many, Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 42, byte(2 + i/250), byte(i % 250)}), 80)})
	}
	if err := b.Update(map[Frontend]*Backend{f: {Endpoints: many}}); err != nil {
		t.Fatal(err)
	}
	for name, now := range map[string][]Endpoint{
		"one in the middle goes": append(slices.Clone(many[:500]), many[501:]...),
		"it comes again":         many,
		"nothing, another order": append(slices.Clone(many[300:]), many[:300]...),
	} {
		before := k.Altered
		if err := b.Update(map[Frontend]*Backend{f: {Endpoints: now}}); err != nil {
			t.Fatal(err)
		}
		if n := k.Altered - before; n > 8 {
			t.Errorf("%s: %d elements were altered, want at most 8", name, n)
		}
	}
}

// TestWhatOthersDo: a table that was deleted comes back, and a Balancer that
// starts over rules that are right changes none.
func TestWhatOthersDo(t *testing.T) {
	k := &nft.FakeTables{}
	b := New(k, quiet())
	var reported []string
	b.Repaired = func(_, what string) { reported = append(reported, what) }
	all := map[Frontend]*Backend{}
	for f, back := range sample() {
		all[f] = set(back)
	}
	if err := b.SetBase(base); err != nil {
		t.Fatal(err)
	}
	if err := b.Update(all); err != nil {
		t.Fatal(err)
	}
	if reported != nil {
		t.Errorf("reported without a change: %q", reported)
	}
	if err := k.Delete(nft.Table{Name: TableName}); err != nil {
		t.Fatal(err)
	}
	if err := b.Check(false); err != nil || len(k.Names()) != 1 {
		t.Fatal("the table did not come back", err)
	}
	want := Compile(b.base, b.frontends)
	var c nft.Change
	for key, data := range want.Sets[0].Elements {
		c.Take(want.Sets[0].Name, key, data)
		break
	}
	if err := k.Commit(want, c); err != nil {
		t.Fatal(err)
	}
	if err := b.Check(true); err != nil {
		t.Fatal(err)
	}
	have, err := k.Read(want, true)
	if err != nil {
		t.Fatal(err)
	}
	if c := nft.Diff(have, want); !c.Empty() {
		t.Fatalf("an element that was taken is not back: %+v", c)
	}
	if len(reported) != 2 || !strings.Contains(reported[0], "gone") || !strings.Contains(reported[1], "1 of its elements") {
		t.Errorf("reported: %q", reported)
	}
	before, gen := k.Commits, func() uint32 { g, _ := k.Generation(); return g }()
	next := New(k, quiet())
	next.base = base
	if err := next.Update(all); err != nil {
		t.Fatal(err)
	}
	if now, _ := k.Generation(); k.Commits != before || now != gen {
		t.Error("a new Balancer over the right rules changed some")
	}
}

// The bug: each start, and each Service that went, warned of a stranger in the
// rules who was ourselves.
func TestOwnChangesAreNotOthers(t *testing.T) {
	var log strings.Builder
	k := &nft.FakeTables{}
	b := New(k, slog.New(slog.NewTextHandler(&log, nil)))
	f := front(tcp, "10.43.0.1:80")
	one := map[Frontend]*Backend{f: set(Backend{Endpoints: ends("10.42.1.1:80", "10.42.1.2:80")})}
	for _, err := range []error{b.Update(one), b.SetBase(base), b.Update(map[Frontend]*Backend{f: nil}), b.Check(true)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(b.idle) > 0 || log.Len() > 0 {
		t.Errorf("idle %v, logged: %s", b.idle, &log)
	}
	if err := b.Update(one); err != nil {
		t.Fatal(err)
	}
	want := Compile(b.base, b.frontends)
	var c nft.Change
	for _, s := range want.Sets {
		for key, data := range s.Elements {
			c.Take(s.Name, key, data)
		}
	}
	if err := k.Commit(want, c); err != nil {
		t.Fatal(err)
	}
	if err := b.Check(true); err != nil || !strings.Contains(log.String(), "another program") {
		t.Errorf("%v: the removal by another program was not logged: %s", err, &log)
	}
}

func TestBadFrontends(t *testing.T) {
	b := New(&nft.FakeTables{}, quiet())
	for name, f := range map[string]Frontend{"no port": {Addr: ap("10.0.0.1:1").Addr(), Proto: tcp}, "no address": {Proto: tcp, Port: 1}, "protocol": front(1, "10.0.0.1:1")} {
		if err := b.Update(map[Frontend]*Backend{f: {}}); err == nil {
			t.Error(name, "passed")
		}
	}
	if err := b.Update(map[Frontend]*Backend{front(tcp, "10.0.0.1:1"): {Endpoints: ends("[fd42::1]:1")}}); err == nil {
		t.Error("an endpoint of another family passed")
	}
}

// conntrackFlow is one made to an address that answers come from another of.
func conntrackFlow(proto nft.Protocol, to, from string) *netlink.ConntrackFlow {
	f := &netlink.ConntrackFlow{}
	f.Forward.Protocol, f.Forward.DstIP, f.Forward.DstPort = uint8(proto), ap(to).Addr().AsSlice(), ap(to).Port()
	f.Reverse.SrcIP, f.Reverse.SrcPort = ap(from).Addr().AsSlice(), ap(from).Port()
	return f
}

// TestFlowsOfTheNode: flows to the same port of another machine, which pass this
// one, are not those to a port of the node.
func TestFlowsOfTheNode(t *testing.T) {
	f := front(udp, "0.0.0.0:53")
	s := flowSet{map[Flow]bool{{Frontend: f}: true, {f, ap("10.42.1.2:5353")}: true}, map[netip.Addr]bool{ap("198.51.100.1:1").Addr(): true}}
	for _, tt := range []struct {
		to, from string
		want     bool
	}{
		{"198.51.100.1:53", "198.51.100.1:53", true},
		{"127.0.0.7:53", "127.0.0.7:53", true},
		{"198.51.100.9:53", "198.51.100.9:53", false},
		{"198.51.100.1:53", "10.42.1.2:5353", true},
		{"198.51.100.1:53", "10.42.1.3:5353", false},
		{"198.51.100.1:54", "198.51.100.1:54", false},
	} {
		if got := s.MatchConntrackFlow(conntrackFlow(udp, tt.to, tt.from)); got != tt.want {
			t.Errorf("%s answered from %s: forgotten: %v, want %v", tt.to, tt.from, got, tt.want)
		}
	}
}

// TestOtherFlows: which tracked connections go where no endpoint is.
func TestOtherFlows(t *testing.T) {
	all := map[Frontend]map[netip.AddrPort]bool{}
	for _, proto := range []nft.Protocol{tcp, udp} {
		all[front(proto, "10.43.0.1:80")] = map[netip.AddrPort]bool{ap("10.42.1.2:80"): true}
		all[front(proto, "0.0.0.0:30080")] = map[netip.AddrPort]bool{ap("10.42.1.2:80"): true}
		all[front(proto, "[fd43::1]:80")] = map[netip.AddrPort]bool{}
	}
	o := otherFlows{all, base.Ranges, map[netip.Addr]bool{ap("198.51.100.1:1").Addr(): true}}
	for _, tt := range []struct {
		to, from string
		tcp, udp bool
	}{
		{"10.43.0.1:80", "10.42.1.2:80", false, false},
		{"10.43.0.1:80", "10.42.1.9:80", true, true},
		{"10.43.0.1:80", "10.43.0.1:80", false, true},    // sent nowhere, and there is an endpoint
		{"[fd43::1]:80", "[fd43::1]:80", false, false},   // the same, and there is none
		{"[fd43::1]:80", "[fd42::9]:80", true, true},     // the last one went
		{"10.43.0.7:80", "10.42.1.2:80", false, true},    // no such frontend
		{"10.43.0.10:53", "10.43.0.10:53", false, false}, // an address of the node's own
		{"198.51.100.1:30080", "10.42.1.9:80", false, true},
		{"198.51.100.1:30080", "10.42.1.2:80", false, false},
		{"198.51.100.1:30080", "198.51.100.1:30080", false, true},
		{"198.51.100.9:30080", "198.51.100.9:30080", false, false}, // another machine's port
		{"198.51.100.1:8080", "10.42.1.9:80", false, false},        // a port that leads to a pod
		{"198.51.100.9:443", "198.51.100.9:443", false, false},
	} {
		if got := o.MatchConntrackFlow(conntrackFlow(tcp, tt.to, tt.from)); got != tt.tcp {
			t.Errorf("tcp %s from %s: forgotten: %v, want %v", tt.to, tt.from, got, tt.tcp)
		}
		if got := o.MatchConntrackFlow(conntrackFlow(udp, tt.to, tt.from)); got != tt.udp {
			t.Errorf("udp %s from %s: forgotten: %v, want %v", tt.to, tt.from, got, tt.udp)
		}
	}
}

// changing is a kernel whose rules can change all the time while they are read.
type changing struct {
	*nft.FakeTables
	all, replaced int
}

func (c *changing) Read(def nft.Table, elements bool) (nft.State, error) {
	if c.all > 0 {
		return nft.State{}, nft.ErrChanging
	}
	return c.FakeTables.Read(def, elements)
}

func (c *changing) Replace(t nft.Table) error {
	c.replaced++
	return c.FakeTables.Replace(t)
}

// TestNotReplacedWhileRulesChange: a table that could not be read, as other programs changed
// rules all the time, is not thrown away with what it knows of clients.
func TestNotReplacedWhileRulesChange(t *testing.T) {
	k := &changing{FakeTables: &nft.FakeTables{}}
	b := New(k, quiet())
	all := map[Frontend]*Backend{}
	for f, back := range sample() {
		all[f] = set(back)
	}
	if err := errors.Join(b.SetBase(base), b.Update(all)); err != nil {
		t.Fatal(err)
	}
	k.all, k.replaced = 1, 0
	for range 2 { // another program's rule
		other := nft.Table{Name: "others"}
		if err := k.FakeTables.Replace(other); err != nil {
			t.Fatal(err)
		}
		for _, full := range []bool{false, true} {
			if err := b.Check(full); !errors.Is(err, nft.ErrChanging) || k.replaced != 0 {
				t.Errorf("full %t: %v, replaced %d times", full, err, k.replaced)
			}
		}
	}
	k.all = 0
	if err := b.Check(true); err != nil || k.replaced != 0 {
		t.Errorf("at rest again: %v, replaced %d times", err, k.replaced)
	}
}
