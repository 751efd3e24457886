package main

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/member/tunnel"
)

// TestReachKeepsConnections: a leader that asks another server for many nodes makes
// no connection for each, and a broken one does not stay.
func TestReachKeepsConnections(t *testing.T) {
	ca, err := pki.NewCA("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	identity := func(name string) (transport.Identity, string) {
		key, err := pki.NewKey()
		if err != nil {
			t.Fatal(err)
		}
		cert, err := ca.IssueServer(key.Public(), name, []netip.Addr{netip.MustParseAddr("127.0.0.1")}, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		pair := &tls.Certificate{Certificate: [][]byte{cert.Raw, ca.Cert.Raw}, PrivateKey: key, Leaf: cert}
		return transport.Identity{Certificate: func() *tls.Certificate { return pair }, Roots: ca.Roots}, pki.Fingerprint(key.Public())
	}
	leader, leaderID := identity("n1")
	other, otherID := identity("n2")
	port, err := transport.ListenNode(netip.MustParseAddrPort("127.0.0.1:0"), other, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- port.Run(ctx) }()
	var conns atomic.Int32
	srv := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != reachPath+"a1" {
				w.WriteHeader(http.StatusBadGateway)
				return
			}
			w.WriteHeader(http.StatusNoContent)
		}),
		ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateNew {
				conns.Add(1)
			}
		},
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(transport.Calls(port.HTTPOver(transport.Node))) }()
	defer func() { cancel(); srv.Close(); <-served; <-ran }()

	p := &peers{id: leader, agents: tunnel.NewHub(slog.New(slog.DiscardHandler)), record: func(name string) (join.Record, error) {
		return join.Record{ID: otherID, Name: name, Role: pki.Agent, Addr: port.Addr()}, nil
	}}
	for range 5 {
		if err := p.askReach(ctx, "n2", "a1"); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.askReach(ctx, "n2", "a2"); err == nil {
		t.Error("a node that does not answer is said to")
	}
	if n := conns.Load(); n != 1 {
		t.Errorf("six questions took %d connections", n)
	}
	port.CloseConns(leaderID)
	if err := p.askReach(ctx, "n2", "a1"); err != nil {
		t.Errorf("after the connection broke: %v", err)
	}
	if n := conns.Load(); n != 2 {
		t.Errorf("%d connections after one broke", n)
	}
}
