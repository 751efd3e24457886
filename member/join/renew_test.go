package join

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
)

// by are the roots of one who trusts these authorities.
func by(cas ...*pki.CA) func(*Certificate) *pki.Trust {
	return func(*Certificate) *pki.Trust { return pki.NewTrust(0, cas[0], cas[1:]...) }
}

// TestRenewForeign: a certificate that an authority of someone's own signed is not
// taken, whoever sends it and whatever role it names; one of an authority that is
// trusted is, also by a machine whose clock is wrong.
func TestRenewForeign(t *testing.T) {
	now := time.Now()
	ours, err := pki.NewCA("c", now)
	if err != nil {
		t.Fatal(err)
	}
	next, err := ours.NewSuccessor(now)
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := pki.NewCA("c", now)
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name  string
		ca    *pki.CA
		at    time.Time
		wrong bool
	}{
		{"ours", ours, now, false},
		{"its successor", next, now, false},
		{"ours, by a clock that is an hour ahead", ours, now.Add(time.Hour), false},
		{"another of the same name", foreign, now, true},
	} {
		for _, role := range []pki.Role{pki.Agent, pki.Server} {
			cert, err := test.ca.IssueAgent(key.Public(), "n1", test.at)
			if role == pki.Server {
				cert, err = test.ca.IssueServer(key.Public(), "n1", nil, test.at)
			}
			if err != nil {
				t.Fatal(err)
			}
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				json.NewEncoder(w).Encode(Certificate{NodeCert: pki.EncodeCert(cert)})
			})}
			ended := make(chan struct{})
			go func() { defer close(ended); srv.Serve(ln) }()
			dial := func(ctx context.Context) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "tcp", ln.Addr().String())
			}
			got, _, err := Renew(t.Context(), dial, "n1", key, by(ours, next))
			if (err != nil) != test.wrong || err != nil && (got != nil || !strings.Contains(err.Error(), "does not trust")) {
				t.Errorf("%s, %s: %v", test.name, role, err)
			}
			srv.Close()
			<-ended
		}
	}
}
