package servers

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// newIdentity is a node with a good certificate.
func newIdentity(t *testing.T, ca *pki.CA, name string, role pki.Role) (transport.Identity, string) {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	var cert *x509.Certificate
	if role == pki.Server {
		cert, err = ca.IssueServer(key.Public(), name, []netip.Addr{netip.MustParseAddr("127.0.0.1")}, time.Now())
	} else {
		cert, err = ca.IssueAgent(key.Public(), name, time.Now())
	}
	if err != nil {
		t.Fatal(err)
	}
	pair := &tls.Certificate{Certificate: [][]byte{cert.Raw, ca.Cert.Raw}, PrivateKey: key, Leaf: cert}
	return transport.Identity{Certificate: func() *tls.Certificate { return pair }, Roots: ca.Roots}, pki.Fingerprint(key.Public())
}

// run runs a port until the test ends.
func run(t *testing.T, p *transport.Port) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := p.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
}

func serve(t *testing.T, ln net.Listener, h http.Handler) {
	t.Helper()
	srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ln) })
	t.Cleanup(func() { _ = srv.Close(); wg.Wait() })
}

// TestRemovedServer: the key of a removed server, whose certificate is still
// good, and who tells the agent that all is well: the agent hears the truth from
// another server, asks the removed one nothing more, ends what is open to it and
// refuses its calls; also after a new start.
func TestRemovedServer(t *testing.T) {
	ca, err := pki.NewCA("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	good, goodID := newIdentity(t, ca, "n1", pki.Server)
	bad, badID := newIdentity(t, ca, "n2", pki.Server)
	listen := func(id transport.Identity) *transport.Port {
		p, err := transport.Listen(netip.MustParseAddrPort("127.0.0.1:0"), id, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		run(t, p)
		return p
	}
	goodPort, badPort := listen(good), listen(bad)
	both := []join.ServerAddr{{ID: goodID, Name: "n1", Addr: goodPort.Addr()}, {ID: badID, Name: "n2", Addr: badPort.Addr()}}
	answers := func(l join.ServerList) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(l) })
	}
	serve(t, goodPort.HTTPOver(transport.Member), answers(join.ServerList{Servers: both[:1], Removed: []string{badID}}))
	serve(t, badPort.HTTPOver(transport.Member), answers(join.ServerList{Servers: both}))
	// The agent watches something at the removed server's API.
	watching := make(chan struct{})
	end := make(chan struct{})
	serve(t, badPort.HTTP(), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		close(watching)
		select {
		case <-r.Context().Done():
		case <-end:
		}
	}))
	defer close(end)

	var list *List
	agent, agentID := newIdentity(t, ca, "a1", pki.Agent)
	agent.Revoked = func(id string) bool { return list.Removed(id) }
	agentPort, err := transport.ListenNode(netip.MustParseAddrPort("127.0.0.1:0"), agent, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	known, err := Encode(both)
	if err != nil {
		t.Fatal(err)
	}
	var saved, cut []string
	var onDisk []byte
	cfg := Config{
		Identity: agent, ID: agentID, Self: agentPort.Addr(), Known: known,
		Save: func([]byte) error { return nil },
		SaveRemoved: func(b []byte) error {
			onDisk = b
			return json.Unmarshal(b, &saved)
		},
		Cut: func(id string) { cut = append(cut, id); agentPort.CloseConns(id) },
	}
	if list, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	list.attempt = time.Minute
	run(t, agentPort)
	serve(t, agentPort.HTTPOver(transport.Node), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "logs") }))
	call := func(who transport.Identity) error {
		tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return conn(who.Dial(ctx, agentPort.Addr(), agentID, transport.Node))
		}}
		res, err := (&http.Client{Transport: tr}).Get("http://agent/containerLogs/default/p/c")
		if err != nil {
			return err
		}
		return res.Body.Close()
	}
	for name, who := range map[string]transport.Identity{"n1": good, "n2": bad} {
		if err := call(who); err != nil {
			t.Fatalf("%s calls the agent before: %v", name, err)
		}
	}
	list.current = badID // it answered last
	api := list.Transport().(*renewed)
	defer api.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://kubernetes/watch", nil)
	if err != nil {
		t.Fatal(err)
	}
	watch, err := api.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Body.Close()
	<-watching

	// Which server it asks is chance: by the hundredth time it was n1 for all but
	// one run in 2^100.
	for range 100 {
		if _, err := list.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		if list.Removed(badID) {
			break
		}
	}
	if !list.Removed(badID) || list.Removed(goodID) || !slices.Equal(saved, []string{badID}) || !slices.Equal(cut, []string{badID}) {
		t.Fatalf("removed: n1 %v, n2 %v; written down %v, cut %v", list.Removed(goodID), list.Removed(badID), saved, cut)
	}
	if _, err := io.ReadAll(watch.Body); err == nil {
		t.Error("the watch at the removed server ended as if all were well")
	}
	if got := list.All(); len(got) != 1 || got[0].ID != goodID {
		t.Errorf("servers %v", got)
	}
	if err := call(bad); err == nil {
		t.Error("the removed server calls the agent")
	}
	if err := call(good); err != nil {
		t.Errorf("the other server calls the agent: %v", err)
	}
	if c, err := agent.DialAPI(t.Context(), badPort.Addr(), "", nil); err == nil {
		c.Close()
		t.Error("the agent connects to the removed server")
	} else if !strings.Contains(err.Error(), "was removed from the cluster") {
		t.Error(err)
	}

	cfg.KnownRemoved = onDisk
	if list, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	if got := list.All(); !list.Removed(badID) || len(got) != 1 {
		t.Errorf("after a new start: servers %v", got)
	}
	cfg.KnownRemoved = []byte("{")
	if _, err := New(cfg); err == nil {
		t.Error("a damaged list of removed servers was taken")
	}
}

// TestRemoveByOne: what one server says is bounded, and an error says that it is not on disk.
func TestRemoveByOne(t *testing.T) {
	id := func(letter string) string { return strings.Repeat(letter, 26) }
	known, err := Encode([]join.ServerAddr{{ID: id("a")}, {ID: id("b")}, {ID: id("c")}})
	if err != nil {
		t.Fatal(err)
	}
	full := errors.New("no space left")
	var onDisk string
	list, err := New(Config{ID: "x", Known: known, SaveRemoved: func(b []byte) error {
		if full == nil {
			onDisk = string(b)
		}
		return full
	}})
	if err != nil {
		t.Fatal(err)
	}
	many := make([]string, maxRemoved+1)
	for i := range many {
		many[i] = strings.Map(func(digit rune) rune { return digit - '0' + 'a' }, fmt.Sprintf("%026d", i))
	}
	for what, ids := range map[string][]string{"no id": {"b"}, "capitals": {id("B")}, "too many": many} {
		if err := list.Remove(id("a"), ids); err == nil || errors.Is(err, ErrOnlyCaller) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := list.Remove(id("a"), []string{id("b"), id("c")}); !errors.Is(err, ErrOnlyCaller) {
		t.Errorf("all but the caller: %v", err)
	}
	if len(list.All()) != 3 {
		t.Errorf("refused, and done: %v", list.All())
	}
	if err := list.Remove(id("a"), []string{id("b")}); !errors.Is(err, full) || !list.Removed(id("b")) {
		t.Errorf("a full disk: %v", err)
	}
	full = nil
	if err := list.Remove(id("a"), []string{id("b")}); err != nil || onDisk != `["`+id("b")+`"]` {
		t.Errorf("said again: %v, on disk %s", err, onDisk)
	}
	if err := list.Remove(id("c"), []string{id("b")}); err != nil {
		t.Errorf("what is known: %v", err)
	}
}
