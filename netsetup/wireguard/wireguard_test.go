package wireguard

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

func key(n byte) Key {
	k := Key{1: n, 5: 64, 31: 64} // clamped: the kernel and wgtypes make it so
	return k
}

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func peer(n byte, at string, allowed ...string) Peer {
	p := Peer{Key: key(n).PublicKey(), Endpoint: netip.MustParseAddrPort(at)}
	for _, a := range allowed {
		p.Allowed = append(p.Allowed, prefix(a))
	}
	return p
}

func TestPublic(t *testing.T) {
	want := Public{Key: key(1).PublicKey(), Port: 8475}
	if got, err := ParsePublic(want.String()); err != nil || got != want {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "8475", key(1).String(), "0 " + key(1).String(), "65536 " + key(1).String(), "8475 abc", "8475 " + Key{}.String(), "8475 " + key(1).String() + " more", "-1 " + key(1).String()} {
		if got, err := ParsePublic(bad); err == nil {
			t.Errorf("%q: %v", bad, got)
		}
	}
}

// TestEnsureKey: a key is made once, is its owner's alone, and is made again when it
// is old or its file was removed; a file that cannot be read is not overwritten.
func TestEnsureKey(t *testing.T) {
	file, now := filepath.Join(t.TempDir(), "key.json"), time.Date(2026, 11, 24, 12, 0, 0, 0, time.UTC)
	ensure := func(age time.Duration, at time.Time) Private {
		t.Helper()
		p, err := EnsureKey(file, age, at)
		if err != nil || p.Key == (Key{}) {
			t.Fatal(p, err)
		}
		return p
	}
	first := ensure(0, now)
	if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	for _, same := range []Private{ensure(0, now.Add(1000*time.Hour)), ensure(time.Hour, now.Add(59*time.Minute)), ensure(time.Hour, now.Add(-time.Hour))} {
		if same.Key != first.Key || !same.Created.Equal(now) {
			t.Errorf("another key: of %s", same.Created)
		}
	}
	second := ensure(time.Hour, now.Add(time.Hour))
	if again := ensure(time.Hour, now.Add(time.Hour)); second.Key == first.Key || again.Key != second.Key {
		t.Error("an old key is not changed once")
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if third := ensure(time.Hour, now); third.Key == second.Key {
		t.Error("the removed key came back")
	}
	for _, bad := range []string{"", "{", `{"version":2}`, `{"version":1,"privateKey":"secret-words"}`, `{"version":1,"privateKey":"` + Key{}.String() + `"}`} {
		if err := os.WriteFile(file, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := EnsureKey(file, time.Hour, now)
		left, _ := os.ReadFile(file)
		if err == nil || string(left) != bad || strings.Contains(err.Error(), "secret-words") {
			t.Errorf("%q: %v, left %q", bad, err, left)
		}
	}
}

// TestSet drives one interface through the states of a cluster, each from the one
// before it, and looks at what the kernel would hold and which calls it got.
func TestSet(t *testing.T) {
	k := &Fake{Devices: map[string]*wgtypes.Device{"wg": {Name: "wg"}}}
	b := func(at string) Peer { return peer(2, at, "10.42.2.0/24", "fd42:2::/64") }
	c := peer(3, "[2001:db8::3]:8475", "10.42.3.0/24")
	for _, step := range []struct {
		name  string
		want  State
		key   byte // that the interface has then
		calls int
	}{
		{"alone", State{Private: key(1), Hold: true, Port: 8475}, 1, 1}, // it had none: no peer knows another
		{"a node comes", State{Private: key(1), Port: 8475, Peers: []Peer{b("192.0.2.2:8475")}}, 1, 1},
		{"nothing changes", State{Private: key(1), Port: 8475, Peers: []Peer{b("192.0.2.2:8475")}}, 1, 0},
		{"one more", State{Private: key(1), Port: 8475, Peers: []Peer{c, b("192.0.2.2:8475")}}, 1, 1},
		{"it moves", State{Private: key(1), Port: 8475, Peers: []Peer{c, b("192.0.2.9:8475")}}, 1, 1},
		{"another key, held back", State{Private: key(11), Hold: true, Port: 8475, Peers: []Peer{c, b("192.0.2.9:8475")}}, 1, 0},
		{"another key, known", State{Private: key(11), Port: 8475, Peers: []Peer{c, b("192.0.2.9:8475")}}, 11, 1},
		{"a peer's other key", State{Private: key(11), Port: 8475, Peers: []Peer{c, peer(12, "192.0.2.9:8475", "10.42.2.0/24", "fd42:2::/64")}}, 11, 1},
		{"ranges change hands", State{Private: key(11), Port: 8475, Peers: []Peer{peer(3, "[2001:db8::3]:8475", "10.42.2.0/24"), peer(12, "192.0.2.9:8475", "10.42.3.0/24", "fd42:2::/64")}}, 11, 1},
		{"a node goes", State{Private: key(11), Port: 8475, Peers: []Peer{peer(12, "192.0.2.9:8475", "10.42.3.0/24")}}, 11, 1},
		{"another port", State{Private: key(11), Port: 8476}, 11, 1},
	} {
		k.Calls = 0
		if err := Set(k, "wg", step.want); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		d, err := k.Device("wg")
		if err != nil {
			t.Fatal(err)
		}
		if k.Calls != step.calls || d.PrivateKey != key(step.key) || d.ListenPort != step.want.Port || len(d.Peers) != len(step.want.Peers) {
			t.Errorf("%s: %d calls, %+v", step.name, k.Calls, d)
		}
		for _, p := range step.want.Peers {
			i := slices.IndexFunc(d.Peers, func(h wgtypes.Peer) bool { return h.PublicKey == p.Key })
			if i < 0 || endpointOf(d.Peers[i]) != p.Endpoint || !slices.Equal(allowedOf(d.Peers[i]), sorted(p.Allowed)) {
				t.Errorf("%s: peer %v is not among %+v", step.name, p, d.Peers)
			}
		}
	}
}

// TestChangesOfOthers: what another program changed is restored, and nothing else.
func TestChangesOfOthers(t *testing.T) {
	every := 25 * time.Second
	want := State{Private: key(1), Port: 8475, Peers: []Peer{peer(2, "192.0.2.2:8475", "10.42.2.0/24"), peer(3, "192.0.2.3:8475", "10.42.3.0/24")}}
	fresh := func() *Fake {
		k := &Fake{Devices: map[string]*wgtypes.Device{"wg": {}}}
		if err := Set(k, "wg", want); err != nil {
			t.Fatal(err)
		}
		return k
	}
	two := key(2).PublicKey()
	for name, change := range map[string]wgtypes.Config{
		"a stranger":       {Peers: []wgtypes.PeerConfig{{PublicKey: key(9).PublicKey(), AllowedIPs: []net.IPNet{{IP: net.IPv4(10, 42, 2, 0).To4(), Mask: net.CIDRMask(25, 32)}}}}},
		"a stolen range":   {Peers: []wgtypes.PeerConfig{{PublicKey: key(9).PublicKey(), AllowedIPs: []net.IPNet{{IP: net.IPv4(10, 42, 2, 0).To4(), Mask: net.CIDRMask(24, 32)}}}}},
		"a peer less":      {Peers: []wgtypes.PeerConfig{{PublicKey: two, Remove: true}}},
		"all ranges":       {Peers: []wgtypes.PeerConfig{{PublicKey: two, AllowedIPs: []net.IPNet{{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}}}}},
		"a shared key":     {Peers: []wgtypes.PeerConfig{{PublicKey: two, PresharedKey: &Key{1}}}},
		"a keepalive":      {Peers: []wgtypes.PeerConfig{{PublicKey: two, PersistentKeepaliveInterval: &every}}},
		"another endpoint": {Peers: []wgtypes.PeerConfig{{PublicKey: two, Endpoint: &net.UDPAddr{IP: net.IPv4(198, 51, 100, 1), Port: 1}}}},
	} {
		k := fresh()
		if err := k.ConfigureDevice("wg", change); err != nil {
			t.Fatal(err)
		}
		have, _ := k.Device("wg")
		if c, differs := Changes(*have, want); !differs || c.PrivateKey != nil || slices.ContainsFunc(c.Peers, func(p wgtypes.PeerConfig) bool { return p.PublicKey == key(3).PublicKey() }) {
			t.Errorf("%s: %t %+v", name, differs, c)
		}
		if err := Set(k, "wg", want); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		have, _ = k.Device("wg")
		if c, differs := Changes(*have, want); differs {
			t.Errorf("%s: afterwards %+v", name, c)
		}
	}
}

func TestStatesThatMakeNoSense(t *testing.T) {
	for name, s := range map[string]State{
		"no key":              {Port: 1},
		"a peer without one":  {Private: key(1), Peers: []Peer{{Endpoint: netip.MustParseAddrPort("192.0.2.2:1"), Allowed: []netip.Prefix{prefix("10.42.2.0/24")}}}},
		"itself":              {Private: key(2), Peers: []Peer{peer(2, "192.0.2.2:1", "10.42.2.0/24")}},
		"one key, two peers":  {Private: key(1), Peers: []Peer{peer(2, "192.0.2.2:1", "10.42.2.0/24"), peer(2, "192.0.2.3:1", "10.42.3.0/24")}},
		"one range, two":      {Private: key(1), Peers: []Peer{peer(2, "192.0.2.2:1", "10.42.2.0/24"), peer(3, "192.0.2.3:1", "10.42.2.9/24")}},
		"no range":            {Private: key(1), Peers: []Peer{peer(2, "192.0.2.2:1")}},
		"no port":             {Private: key(1), Peers: []Peer{peer(2, "192.0.2.2:0", "10.42.2.0/24")}},
		"an invalid endpoint": {Private: key(1), Peers: []Peer{{Key: key(2).PublicKey(), Allowed: []netip.Prefix{prefix("10.42.2.0/24")}}}},
	} {
		k := &Fake{Devices: map[string]*wgtypes.Device{"wg": {}}}
		if err := Set(k, "wg", s); err == nil || k.Calls > 0 {
			t.Errorf("%s passed: %d calls", name, k.Calls)
		}
	}
	if err := Set(&Fake{}, "wg", State{Private: key(1)}); err == nil || !strings.Contains(err.Error(), "wg") {
		t.Errorf("no interface: %v", err)
	}
	if l, err := Links(&Fake{}, "wg"); err != nil || l != nil {
		t.Errorf("no interface: %v, %v", l, err)
	}
}
