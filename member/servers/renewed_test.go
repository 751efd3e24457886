package servers

import (
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// TestNewCertificateNewConnection: what is asked after the node has got another
// certificate goes over a connection of that, and what was asked before comes to
// its end: servers judge each request by its connection's certificate, and that
// ends.
func TestNewCertificateNewConnection(t *testing.T) {
	ca, err := pki.NewCA("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	pair := func(server bool) *tls.Certificate {
		cert, err := ca.IssueAgent(key.Public(), "a1", time.Now())
		if server {
			cert, err = ca.IssueServer(key.Public(), "n1", []netip.Addr{netip.MustParseAddr("127.0.0.1")}, time.Now())
		}
		if err != nil {
			t.Fatal(err)
		}
		return &tls.Certificate{Certificate: [][]byte{cert.Raw, ca.Cert.Raw}, PrivateKey: key, Leaf: cert}
	}
	shown := pair(true)
	port, err := transport.Listen(netip.MustParseAddrPort("127.0.0.1:0"), transport.Identity{Certificate: func() *tls.Certificate { return shown }, Roots: ca.Roots}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	more := make(chan string)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, r.TLS.PeerCertificates[0].SerialNumber)
		if r.URL.Path != "/watch" {
			return
		}
		w.(http.Flusher).Flush()
		for text := range more {
			fmt.Fprintln(w, text)
			w.(http.Flusher).Flush()
		}
	})}
	done := make(chan error, 2)
	go func() { done <- port.Run(t.Context()) }()
	go func() { done <- srv.Serve(port.HTTP()) }()
	t.Cleanup(func() { srv.Close(); port.Close(); <-done; <-done })

	var cert atomic.Pointer[tls.Certificate]
	cert.Store(pair(false))
	known, err := Encode([]join.ServerAddr{{ID: pki.Fingerprint(key.Public()), Name: "n1", Addr: port.Addr()}})
	if err != nil {
		t.Fatal(err)
	}
	l, err := New(Config{ID: "a1", Known: known, Identity: transport.Identity{Certificate: cert.Load, Roots: ca.Roots}})
	if err != nil {
		t.Fatal(err)
	}
	l.attempt = time.Minute
	client := &http.Client{Transport: l.Transport()}
	defer client.CloseIdleConnections()
	ask := func(path string) *http.Response {
		t.Helper()
		res, err := client.Get("https://kubernetes" + path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { res.Body.Close() })
		return res
	}
	line := func(r io.Reader) (text string) {
		t.Helper()
		if _, err := fmt.Fscanln(r, &text); err != nil {
			t.Fatal(err)
		}
		return text
	}
	first := cert.Load().Leaf.SerialNumber.String()
	watch := ask("/watch")
	if got := line(watch.Body); got != first {
		t.Fatalf("the watch came by %s, not %s", got, first)
	}
	if got := line(ask("/").Body); got != first {
		t.Errorf("a request came by %s, not %s", got, first)
	}
	cert.Store(pair(false))
	if got := line(ask("/").Body); got != cert.Load().Leaf.SerialNumber.String() {
		t.Errorf("after a renewal a request came by %s, the old one is %s", got, first)
	}
	more <- "event"
	if got := line(watch.Body); got != "event" {
		t.Errorf("the watch from before got %q", got)
	}
	close(more)
}
