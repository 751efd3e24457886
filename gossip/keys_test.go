package gossip

import (
	"bytes"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
)

func testKey(b byte) []byte { return bytes.Repeat([]byte{b}, 32) }

func testKeys(ids ...byte) (keys [][]byte) {
	for _, b := range ids {
		keys = append(keys, testKey(b))
	}
	return keys
}

// TestMultiKeysChange changes the key of members that gossip, step by step. A node
// that kept the old one is alone then: no member reads its messages, and it reads none.
func TestMultiKeysChange(t *testing.T) {
	a := start(t, "id-a", "n1", netip.AddrPort{})
	b := start(t, "id-b", "n2", netip.AddrPort{}, a.addr)
	a.wait(t, "id-b", Alive)
	b.wait(t, "id-a", Alive)
	said := &sink{}
	spy := newSpy(t, testKey(7), said)
	if _, err := spy.Join([]string{"id-a/" + a.addr.String()}); err != nil {
		t.Fatalf("it has the key and cannot join: %v", err)
	}
	a.wait(t, "id-spy", Alive)
	b.wait(t, "id-spy", Alive)
	// On a busy machine members may be taken for dead for a moment, and pings be late.
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		n := spy.NumMembers()
		_, err := spy.Ping("id-a", net.UDPAddrFromAddrPort(a.addr))
		if n == 3 && err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("with the key it sees %d members, and is answered with %v", n, err)
		}
	}

	// One of the two is a step ahead of the other for a while, whichever.
	for i, step := range [][][]byte{testKeys(7, 8), testKeys(8, 7), testKeys(8)} {
		first, second := a, b
		if i%2 == 1 {
			first, second = b, a
		}
		for _, n := range []*node{first, second} {
			if err := n.SetKeys(step); err != nil {
				t.Fatal(err)
			}
			answered(t, a, b)
			answered(t, b, a)
		}
	}

	a.wait(t, "id-spy", Dead)
	b.wait(t, "id-spy", Dead)
	said.wait(t, "no installed keys could decrypt the message") // what was said to it
	if _, err := spy.Join([]string{"id-a/" + a.addr.String()}); err == nil {
		t.Error("with the old key it can join")
	}
	if _, err := spy.Ping("id-b", net.UDPAddrFromAddrPort(b.addr)); err == nil {
		t.Error("with the old key it is answered")
	}
	c := startWith(t, 200*time.Millisecond, testKeys(8), "id-c", "n3", netip.AddrPort{}, a.addr)
	a.wait(t, "id-c", Alive)
	b.wait(t, "id-c", Alive)
	c.wait(t, "id-b", Alive)
	for _, n := range spy.Members() {
		if n.Name == "id-c" {
			t.Error("with the old key it learns of a new member")
		}
	}
	for _, n := range []*node{a, b, c} {
		if mem, ok := n.Get("id-spy"); ok && mem.State == Alive {
			t.Errorf("%s accepts its messages", n.cfg.Meta.Name)
		}
	}

	// A member that was away and comes with the old key is alone until it has the new.
	b.stop()
	a.wait(t, "id-b", Dead)
	late := startWith(t, 200*time.Millisecond, testKeys(7), "id-b", "n2", b.addr, a.addr)
	if _, err := newSpy(t, testKey(7), io.Discard).Join([]string{"id-a/" + a.addr.String()}); err == nil {
		t.Error("the old key is good again")
	}
	if mem, ok := late.Get("id-a"); ok {
		t.Errorf("with the old key it has met %+v", mem)
	}
	if err := late.SetKeys(testKeys(8)); err != nil {
		t.Fatal(err)
	}
	a.wait(t, "id-b", Alive)
	c.wait(t, "id-b", Alive)
	late.wait(t, "id-c", Alive)
}

// answered waits until to answers from.
func answered(t *testing.T, from, to *node) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); ; {
		from.mu.Lock()
		list := from.list
		from.mu.Unlock()
		_, err := list.Ping(to.cfg.Meta.ID, net.UDPAddrFromAddrPort(to.addr))
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not hear %s: %v", to.cfg.Meta.Name, from.cfg.Meta.Name, err)
		}
	}
}

// newSpy is a bare memberlist that holds a key.
func newSpy(t *testing.T, key []byte, log io.Writer) *memberlist.Memberlist {
	t.Helper()
	meta, err := Meta{ID: "id-spy", Name: "n9"}.encode(memberlist.MetaMaxSize)
	if err != nil {
		t.Fatal(err)
	}
	c := memberlist.DefaultLocalConfig()
	c.Name, c.SecretKey, c.LogOutput = "id-spy", key, log
	c.BindAddr, c.AdvertiseAddr, c.BindPort, c.AdvertisePort = "127.0.0.1", "127.0.0.1", 0, 0
	c.ProbeTimeout = 2 * time.Second // of its pings below, too
	c.TCPTimeout = 30 * time.Second
	c.Delegate = spyMeta(meta)
	list, err := memberlist.Create(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { list.Shutdown() })
	return list
}

type spyMeta []byte

func (m spyMeta) NodeMeta(int) []byte             { return m }
func (spyMeta) NotifyMsg([]byte)                  {}
func (spyMeta) GetBroadcasts(int, int) [][]byte   { return nil }
func (spyMeta) LocalState(bool) []byte            { return nil }
func (spyMeta) MergeRemoteState(b []byte, _ bool) {}

// sink keeps what is written to it.
type sink struct {
	mu   sync.Mutex
	said strings.Builder
}

func (s *sink) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.said.Write(p)
}

func (s *sink) wait(t *testing.T, want string) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		s.mu.Lock()
		said := s.said.String()
		s.mu.Unlock()
		if strings.Contains(said, want) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("it never said %q", want)
		}
	}
}
