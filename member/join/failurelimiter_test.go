package join

import (
	"crypto"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// TestStrikes: wrong requests are looked at only so often, of one address and
// of all together, and the memory of addresses is bounded.
func TestStrikes(t *testing.T) {
	var s failureLimiter
	now := time.Now()
	wrong := func(from string) bool {
		if !s.allow(strangerAt(from), now) {
			return false
		}
		s.add(strangerAt(from), now)
		return true
	}
	count := func(from func(i int) string, tries int) (n int) {
		for i := range tries {
			if wrong(from(i)) {
				n++
			}
		}
		return n
	}
	if n := count(func(i int) string { return fmt.Sprintf("192.0.2.1:%d", i+1) }, 100); n != failuresOfOne {
		t.Errorf("%d wrong requests of one address were looked at", n)
	}
	if n := count(func(i int) string { return fmt.Sprintf("10.0.%d.%d:1", i/250, i%250) }, 3*maxSources); n != failuresOfAll-failuresOfOne {
		t.Errorf("%d wrong requests of all others were looked at", n)
	}
	if len(s.one) > maxSources {
		t.Errorf("%d addresses are remembered", len(s.one))
	}
	if !s.allow(asker{member: "a1"}, now) {
		t.Error("a member is bounded by the strangers' wrong requests")
	}
	now = now.Add(time.Minute)
	if !wrong("192.0.2.1:1") {
		t.Error("an address is refused permanently")
	}
	if n := count(func(i int) string { return fmt.Sprintf("[2001:db8:0:1:%x::%x]:1", i, i+1) }, 100); n != failuresOfOne {
		t.Errorf("%d wrong requests of one IPv6 network were looked at", n)
	}
	if !wrong("[2001:db8:0:2::1]:1") || !wrong("[fe80::1%eth0]:1") || !wrong("[::ffff:192.0.2.9]:1") {
		t.Error("another network is refused, too")
	}
	for range 100 {
		s.add(asker{member: "a1"}, now)
	}
	if s.allow(asker{member: "a1"}, now) || !s.allow(asker{member: "a2"}, now) || !s.allow(strangerAt("192.0.2.10:1"), now) {
		t.Error("a member's wrong requests bound it alone")
	}
}

// TestMembersRenewWhileStrangersAsk: wrong requests of strangers keep no member from
// its next certificate, also when its last one has ended or was signed by an authority
// of before; who has no record is a stranger whatever it shows.
func TestMembersRenewWhileStrangersAsk(t *testing.T) {
	w := newWorld(t)
	res, wish, err := w.join(t, w.tokenFor(t, TokenOptions{Role: pki.Agent, TTL: time.Hour}), "a1")
	if err != nil {
		t.Fatal(err)
	}
	exhaust := func() {
		now := time.Now().Add(time.Hour) // so that nothing is refilled meanwhile
		for range failuresOfAll + 1 {
			w.server.failures.add(strangerAt("127.0.0.1:1"), now)
		}
	}
	past, err := w.ca.IssueAgent(wish.Key.Public(), "a1", time.Now().Add(-3*pki.AgentLifetime))
	if err != nil {
		t.Fatal(err)
	}
	with := func(cert []byte, key crypto.Signer) Dialer {
		return w.as(Options{Key: key}, &Response{NodeCert: cert}, transport.Join)
	}
	for name, dial := range map[string]Dialer{"its certificate is good": with(res.NodeCert, wish.Key), "its certificate has ended": with(pki.EncodeCert(past), wish.Key)} {
		exhaust()
		if _, _, err := Renew(t.Context(), dial, "a1", wish.Key, by(w.ca)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A good certificate of a key without a record.
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	cert, err := w.ca.IssueAgent(key.Public(), "a1", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	exhaust()
	if _, _, err := Renew(t.Context(), with(pki.EncodeCert(cert), key), "a1", wish.Key, by(w.ca)); err == nil || !strings.Contains(err.Error(), "too many wrong requests") {
		t.Errorf("a stranger with a certificate: %v", err)
	}
}
