package ipam

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func open(t *testing.T, file, prefix string, reserved ...string) *Pool {
	t.Helper()
	cfg := Config{File: file, Prefix: netip.MustParsePrefix(prefix)}
	for _, r := range reserved {
		cfg.Reserved = append(cfg.Reserved, netip.MustParseAddr(r))
	}
	p, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func allocate(t *testing.T, p *Pool, id string) string {
	t.Helper()
	a, err := p.Allocate(id)
	if err != nil {
		t.Fatal(err)
	}
	return a.String()
}

func newFile(t *testing.T) string { return filepath.Join(t.TempDir(), "ipam.json") }

func TestOrderAndEdges(t *testing.T) {
	p := open(t, newFile(t), "10.42.1.0/29", "10.42.1.1")
	var got []string
	for _, id := range []string{"a", "b", "a", "c", "d", "e"} {
		got = append(got, allocate(t, p, id))
	}
	want := []string{"10.42.1.2/29", "10.42.1.3/29", "10.42.1.2/29", "10.42.1.4/29", "10.42.1.5/29", "10.42.1.6/29"}
	if d := cmp.Diff(want, got); d != "" {
		t.Fatal(d)
	}
	_, err := p.Allocate("f")
	var full *ExhaustedError
	if !errors.As(err, &full) {
		t.Fatalf("got %v, want ExhaustedError", err)
	}
	const text = "no address free in 10.42.1.0/29: 5 usable, 5 in use, 0 released a moment ago"
	if err.Error() != text {
		t.Fatalf("got %q\nwant %q", err, text)
	}
	if a, ok := p.Lookup("c"); !ok || a.String() != "10.42.1.4/29" {
		t.Fatalf("Lookup: %v %v", a, ok)
	}
	if _, ok := p.Lookup("f"); ok {
		t.Fatal("an id without address was found")
	}
}

func TestUsable(t *testing.T) {
	for _, tt := range []struct {
		prefix   string
		reserved []string
		want     int
	}{
		{"10.0.0.0/24", nil, 254},
		{"10.0.0.0/24", []string{"10.0.0.1", "10.0.0.0", "10.9.9.9"}, 253},
		{"10.0.0.0/31", nil, 2},
		{"10.0.0.7/32", nil, 1},
		{"fd00::/120", []string{"fd00::1"}, 254},
	} {
		p := open(t, newFile(t), tt.prefix, tt.reserved...)
		if got := p.usable(); got != tt.want {
			t.Errorf("%s: usable %d, want %d", tt.prefix, got, tt.want)
		}
		// The invariant: as many as usable can be given out, all different, and no more.
		if tt.want > 300 {
			continue
		}
		seen := map[string]bool{}
		for i := range tt.want {
			seen[allocate(t, p, fmt.Sprint(i))] = true
		}
		if len(seen) != tt.want {
			t.Errorf("%s: %d different addresses, want %d", tt.prefix, len(seen), tt.want)
		}
		if _, err := p.Allocate("one more"); err == nil {
			t.Errorf("%s: one more was given out", tt.prefix)
		}
	}
}

func TestQuarantine(t *testing.T) {
	file := newFile(t)
	synctest.Test(t, func(t *testing.T) {
		p := open(t, file, "10.0.0.0/30", "10.0.0.1") // one address
		first := allocate(t, p, "a")
		if err := p.Release("a"); err != nil {
			t.Fatal(err)
		}
		_, err := p.Allocate("b")
		var full *ExhaustedError
		if !errors.As(err, &full) || full.Quarantined != 1 || full.InUse != 0 {
			t.Fatalf("got %v", err)
		}
		// A restart does not shorten the rest.
		p = open(t, file, "10.0.0.0/30", "10.0.0.1")
		if _, err := p.Allocate("b"); !errors.As(err, &full) {
			t.Fatalf("after a restart: %v", err)
		}
		time.Sleep(DefaultQuarantine) // fake time
		if got := allocate(t, p, "b"); got != first {
			t.Fatalf("got %s, want %s again", got, first)
		}
	})
}

func TestReleaseAndRestart(t *testing.T) {
	file := newFile(t)
	p := open(t, file, "10.0.0.0/24")
	for _, id := range []string{"a", "b", "c"} {
		allocate(t, p, id)
	}
	if err := p.Release("unknown"); err != nil {
		t.Fatal(err)
	}
	p = open(t, file, "10.0.0.0/24")
	if got := allocate(t, p, "b"); got != "10.0.0.2/24" {
		t.Fatalf("b moved to %s", got)
	}
	released, err := p.Reconcile([]string{"b", "stranger"})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"a", "c"}, released); d != "" {
		t.Fatal(d)
	}
	if released, err := p.Reconcile([]string{"b"}); err != nil || released != nil {
		t.Fatalf("second time: %v, %v", released, err)
	}
	// A changed range drops what lies outside.
	p = open(t, file, "10.0.1.0/24")
	if got := allocate(t, p, "b"); got != "10.0.1.1/24" {
		t.Fatalf("b has %s in the new range", got)
	}
}

func TestFailedWriteChangesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	p := open(t, filepath.Join(dir, "ipam.json"), "10.0.0.0/24")
	a := allocate(t, p, "a")
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Allocate("b"); err == nil {
		t.Fatal("an address was given out that is not on disk")
	}
	if err := p.Release("a"); err == nil {
		t.Fatal("a release passed that is not on disk")
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if got := allocate(t, p, "a"); got != a {
		t.Fatalf("a moved from %s to %s", a, got)
	}
	if got := allocate(t, p, "b"); got != "10.0.0.2/24" {
		t.Fatalf("b has %s", got)
	}
	left, err := filepath.Glob(filepath.Join(dir, "*.tmp*"))
	if err != nil || len(left) > 0 {
		t.Fatalf("temporary files left: %v %v", left, err)
	}
}

func TestOpenRefuses(t *testing.T) {
	for _, tt := range []struct{ prefix, content, want string }{
		{"10.0.0.1/24", "", "not a range"},
		{"10.0.0.0/24", "{", "unexpected end of JSON"},
		{"10.0.0.0/24", `{"version":2}`, "format version 2, this program knows 1"},
		{"10.0.0.0/24", `{"version":1,"allocated":{"a":"nonsense"}}`, "nonsense"},
	} {
		file := newFile(t)
		if tt.content != "" {
			if err := os.WriteFile(file, []byte(tt.content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		_, err := Open(Config{File: file, Prefix: netip.MustParsePrefix(tt.prefix)})
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s %q: got %v, want …%s…", tt.prefix, tt.content, err, tt.want)
		}
	}
	if _, err := Open(Config{File: newFile(t), Prefix: netip.MustParsePrefix("10.0.0.7/32"), Reserved: []netip.Addr{netip.MustParseAddr("10.0.0.7")}}); err == nil {
		t.Error("a range without a usable address was accepted")
	}
}

func FuzzDecodeState(f *testing.F) {
	f.Add([]byte(`{"version":1,"allocated":{"a":"10.0.0.2"},"resting":{"10.0.0.3":"2026-01-02T03:04:05Z"},"last":"10.0.0.3"}`))
	f.Add([]byte(`{"version":1}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, b []byte) {
		file := newFile(t)
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		p, err := Open(Config{File: file, Prefix: netip.MustParsePrefix("10.0.0.0/28")})
		if err != nil {
			return
		}
		// Whatever was read, no address has two holders.
		seen := map[netip.Addr]string{}
		for id, a := range p.byID {
			if other, ok := seen[a]; ok {
				t.Fatalf("%s has two holders: %q and %q", a, id, other)
			}
			seen[a] = id
		}
		if a, err := p.Allocate("another"); err == nil {
			if other, ok := seen[a.Addr()]; ok && other != "another" {
				t.Fatalf("%s was given out twice", a)
			}
		}
	})
}

func TestReserve(t *testing.T) {
	file := newFile(t)
	p := open(t, file, "10.42.1.0/24", "10.42.1.1")
	first, ok := p.Reserve()
	if !ok || first.String() != "10.42.1.2/24" {
		t.Fatalf("reserved %s %t", first, ok)
	}
	if got := allocate(t, p, "a"); got != "10.42.1.3/24" {
		t.Errorf("a has %s, though 10.42.1.2 is reserved", got)
	}
	if err := p.Claim("a", first); err == nil {
		t.Error("a has two addresses")
	}
	if err := p.Claim("b", first); err != nil {
		t.Error(err)
	}
	if err := p.Claim("c", first); err == nil {
		t.Error("b's address was claimed again")
	}
	if got, ok := open(t, file, "10.42.1.0/24", "10.42.1.1").Lookup("b"); !ok || got != first {
		t.Errorf("after a restart b has %s %t", got, ok)
	}
	second, _ := p.Reserve()
	p.Forget(second)
	if err := p.Claim("c", second); err == nil {
		t.Error("a forgotten address was claimed")
	}
	n := 0
	for ; ; n++ {
		if _, ok := p.Reserve(); !ok {
			break
		}
	}
	if n != 253/16 {
		t.Errorf("%d of 253 addresses could be reserved, want %d", n, 253/16)
	}
}
