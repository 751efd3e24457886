package transport

import (
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
)

// TestDialForTime: a node whose clock is elsewhere reaches servers of its cluster to ask them for
// the time, by authority and key as always, and for nothing else.
func TestDialForTime(t *testing.T) {
	ca := newCA(t)
	server, serverID := identity(t, ca, "n1")
	removed := false
	p := serve(t, server)
	stranger, _ := identity(t, newCA(t), "n1")
	foreign := serve(t, stranger)
	for words, at := range map[string]time.Time{"is before": time.Unix(0, 0), "is after": time.Now().Add(10 * pki.MaxServerLifetime)} {
		us, _ := identity(t, ca, "n2")
		us.Now = func() time.Time { return at }
		us.Revoked = func(string) bool { return removed }
		if _, err := us.Dial(t.Context(), p.Addr(), serverID, Join); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("at %s: %v", at, err)
		}
		c, err := us.DialForTime(t.Context(), p.Addr(), serverID)
		if err != nil {
			t.Fatalf("for the time, at %s: %v", at, err)
		}
		c.Close()
		if _, err := us.DialForTime(t.Context(), p.Addr(), "another"); err == nil || !strings.Contains(err.Error(), "not another") {
			t.Errorf("with another key: %v", err)
		}
		if _, err := us.DialForTime(t.Context(), foreign.Addr(), ""); err == nil || !strings.Contains(err.Error(), "unknown authority") {
			t.Errorf("of another cluster: %v", err)
		}
		removed = true
		if _, err := us.DialForTime(t.Context(), p.Addr(), serverID); err == nil || !strings.Contains(err.Error(), "was removed") {
			t.Errorf("a removed one: %v", err)
		}
		removed = false
	}
}

// TestClockJudgesCertificates: the port's as well.
func TestClockJudgesCertificates(t *testing.T) {
	ca := newCA(t)
	server, serverID := identity(t, ca, "n1")
	server.Now = func() time.Time { return time.Now().Add(2 * pki.MaxServerLifetime) }
	p := serve(t, server)
	us, _ := identity(t, ca, "n2")
	c, err := us.Dial(t.Context(), p.Addr(), serverID, Member)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, err := c.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
		t.Errorf("a certificate that has ended by the port's clock: %v", err)
	}
}
