package servers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/join"
)

func list(t *testing.T, id string, n int) *List {
	t.Helper()
	var all []join.ServerAddr
	for i := range n {
		all = append(all, join.ServerAddr{ID: fmt.Sprintf("s%d", i), Name: fmt.Sprintf("n%d", i), Addr: netip.MustParseAddrPort(fmt.Sprintf("192.0.2.%d:6443", i+1))})
	}
	b, err := Encode(all)
	if err != nil {
		t.Fatal(err)
	}
	l, err := New(Config{ID: id, Known: b, Extra: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:6443"), netip.MustParseAddrPort("192.0.2.99:6443")}})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// try dials; up says which servers answer. It returns whom it asked, in turn.
func try(l *List, up func(s join.ServerAddr) bool) (asked []string, err error) {
	c, err := l.dial(context.Background(), func(_ context.Context, s join.ServerAddr) (net.Conn, error) {
		asked = append(asked, key(s))
		if !up(s) {
			return nil, errors.New("it does not answer")
		}
		a, b := net.Pipe()
		b.Close()
		return a, nil
	})
	if c != nil {
		c.Close()
	}
	return asked, err
}

func all(join.ServerAddr) bool { return true }

func TestOneAfterTheOther(t *testing.T) {
	l := list(t, "node", 3)
	now := time.Now()
	l.now = func() time.Time { return now }
	first, err := try(l, all)
	if err != nil || len(first) != 1 {
		t.Fatalf("%v %v", first, err)
	}
	if again, _ := try(l, all); !slices.Equal(again, first) {
		t.Errorf("it does not stay with %v: %v", first, again)
	}
	// It fails: the next one takes over and is stayed with, and the failed one is
	// left alone for a while.
	asked, err := try(l, func(s join.ServerAddr) bool { return key(s) != first[0] })
	if err != nil || len(asked) != 2 || asked[0] != first[0] {
		t.Fatalf("%v %v", asked, err)
	}
	if next, _ := try(l, all); !slices.Equal(next, asked[1:]) {
		t.Errorf("it went back to %v at once", next)
	}
	// None answers: all were asked, the one that a person named, too, and the
	// error names each.
	asked, err = try(l, func(join.ServerAddr) bool { return false })
	if len(asked) != 4 || !errors.Is(err, ErrNone) || asked[2] != first[0] && asked[3] != first[0] {
		t.Errorf("%v %v", asked, err)
	}
	now = now.Add(avoidFor)
	if asked, err = try(l, all); err != nil || len(asked) != 1 {
		t.Errorf("%v %v", asked, err)
	}
}

// TestNoHerd: the nodes of a server spread over all others when it fails.
func TestNoHerd(t *testing.T) {
	before, after := map[string]int{}, map[string]int{}
	for i := range 1000 {
		l := list(t, fmt.Sprintf("node-%d", i), 5)
		first, err := try(l, all)
		if err != nil {
			t.Fatal(err)
		}
		before[first[0]]++
		if first[0] != "s0" {
			continue
		}
		asked, err := try(l, func(s join.ServerAddr) bool { return key(s) != "s0" })
		if err != nil {
			t.Fatal(err)
		}
		after[asked[len(asked)-1]]++
	}
	for i := range 5 {
		s := fmt.Sprintf("s%d", i)
		if n := before[s]; n < 120 || n > 280 {
			t.Errorf("%s has %d of 1000 nodes", s, n)
		}
		if n := after[s]; i > 0 && (n < before["s0"]/8 || n > before["s0"]/2) {
			t.Errorf("%s takes %d of the %d nodes of s0", s, n, before["s0"])
		}
	}
}

func TestListOnDiskIsDamaged(t *testing.T) {
	if _, err := New(Config{Known: []byte("{")}); err == nil {
		t.Error("a damaged list was taken")
	}
}
