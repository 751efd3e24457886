package join

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/clusterd/clusterd/leaktest"
	"github.com/clusterd/clusterd/member/join/jointest"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/raftstore"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// world is a cluster of one node that admits others.
type world struct {
	store  *jointest.Store
	ca     *pki.CA
	trust  pki.LiveTrust // of the server
	addr   string
	server *Server
	behind atomic.Bool // whether the server may hand out gossip's keys
}

func (w *world) gossipKeys(context.Context) (GossipKeys, error) {
	if w.behind.Load() {
		return GossipKeys{}, errors.New("behind")
	}
	return GossipKeys{Number: 3, Keys: [][]byte{make([]byte, 32), bytes.Repeat([]byte{1}, 32)}}, nil
}

func newWorld(t *testing.T) *world {
	t.Helper()
	ca, err := pki.NewCA("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	key, _ := pki.NewKey()
	cert, err := ca.IssueServer(key.Public(), "n1", []netip.Addr{netip.MustParseAddr("127.0.0.1")}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	w := &world{store: jointest.New(), ca: ca}
	w.trust.Store(pki.NewTrust(0, ca))
	err = PutCluster(t.Context(), w.store, Cluster{
		Name: "c", ClusterCIDR: Ranges{netip.MustParsePrefix("10.244.0.0/16")}, ServiceCIDR: Ranges{netip.MustParsePrefix("10.96.0.0/16")},
	}, Record{ID: pki.Fingerprint(key.Public()), Name: "n1", Confirmed: true})
	if err != nil {
		t.Fatal(err)
	}
	pair := &tls.Certificate{Certificate: [][]byte{cert.Raw, ca.Cert.Raw}, PrivateKey: key}
	port, err := transport.Listen(netip.MustParseAddrPort("127.0.0.1:0"),
		transport.Identity{Certificate: func() *tls.Certificate { return pair }, Roots: ca.Roots}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	w.addr = port.Addr().String()
	server := &Server{
		Store: w.store, Trust: w.trust.Load, GossipKeys: w.gossipKeys, Log: slog.New(slog.DiscardHandler),
		Servers: func() []ServerAddr {
			return []ServerAddr{{ID: pki.Fingerprint(key.Public()), Name: "n1", Addr: port.Addr()}}
		},
		Removed: func() []string { return []string{"gone"} },
	}
	w.server = server
	srv := &http.Server{Handler: server, ConnContext: transport.WithPeer}
	questions := &http.Server{Handler: server.Questions(), ConnContext: transport.WithPeer}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { port.Run(ctx) })
	wg.Go(func() { srv.Serve(port.HTTPOver(transport.Join)) })
	wg.Go(func() { questions.Serve(port.HTTPOver(transport.Member)) })
	t.Cleanup(func() { srv.Close(); questions.Close(); cancel(); wg.Wait() })
	return w
}

func (w *world) token(t *testing.T, ttl time.Duration) pki.Token {
	t.Helper()
	return w.tokenFor(t, TokenOptions{Role: pki.Server, TTL: ttl})
}

func (w *world) tokenFor(t *testing.T, wish TokenOptions) pki.Token {
	t.Helper()
	tok, _, err := CreateToken(t.Context(), w.store, w.ca.Cert, wish, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func (w *world) join(t *testing.T, tok pki.Token, name string) (*Response, Options, error) {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	wish := Options{Server: w.addr, Token: tok, Name: name, Addr: netip.MustParseAddrPort("127.0.0.1:7000"), Key: key}
	res, err := Join(t.Context(), wish)
	return res, wish, err
}

func TestJoin(t *testing.T) {
	w := newWorld(t)
	res, wish, err := w.join(t, w.token(t, time.Hour), "n2")
	if err != nil {
		t.Fatal(err)
	}
	if res.Cluster.ClusterCIDR.String() != "10.244.0.0/16" || len(res.Servers) != 1 || res.Role != pki.Server {
		t.Errorf("answer: %+v", res)
	}
	records, err := Records(t.Context(), w.store, false)
	if err != nil || len(records) != 2 {
		t.Fatalf("records %+v, %v", records, err)
	}
	i := slices.IndexFunc(records, func(r Record) bool { return r.Name == "n2" })
	if i < 0 || records[i].ID != pki.Fingerprint(wish.Key.Public()) || records[i].Confirmed {
		t.Errorf("record of n2: %+v", records)
	}
}

func TestJoinRefused(t *testing.T) {
	w, other := newWorld(t), newWorld(t)
	good := w.token(t, time.Hour)
	wrong := good
	wrong.Secret = strings.Repeat("a", len(good.Secret))
	unknown := good
	unknown.ID = "zzzzzz"
	for _, tc := range []struct {
		name  string
		token pki.Token
		node  string
		code  string
		says  string
	}{
		{"wrong secret", wrong, "n2", CodeToken, "is wrong"},
		{"unknown token", unknown, "n2", CodeToken, "does not know"},
		{"expired token", w.token(t, -time.Hour), "n2", CodeToken, "expired 1h"},
		{"token of another cluster", other.token(t, time.Hour), "n2", CodeToken, "another cluster"},
		{"name taken", good, "n1", CodeName, "is taken"},
		{"bad name", good, "No_Good", CodeName, `"No_Good"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, _, err := w.join(t, tc.token, tc.node)
			var no *Refusal
			if !errors.As(err, &no) || no.Code != tc.code || !strings.Contains(no.Message, tc.says) {
				t.Fatalf("got %v, want a refusal (%s) that says %q", err, tc.code, tc.says)
			}
			if strings.Contains(no.Message, "\n") {
				t.Errorf("not one sentence: %q", no.Message)
			}
			if records, _ := Records(t.Context(), w.store, false); len(records) != 1 {
				t.Errorf("a refused machine left a record: %+v", records)
			}
		})
	}
}

func TestJoinWithoutLeaderMayPass(t *testing.T) {
	w := newWorld(t)
	tok := w.token(t, time.Hour)
	w.store.FailWith(raftstore.ErrNoLeader)
	_, _, err := w.join(t, tok, "n2")
	var no *Refusal
	if err == nil || errors.As(err, &no) {
		t.Fatalf("got %v, want an error that may pass", err)
	}
}

func TestJoinBrokenOffCanBeRepeated(t *testing.T) {
	w := newWorld(t)
	tok := w.token(t, time.Hour)
	if _, _, err := w.join(t, tok, "n2"); err != nil {
		t.Fatal(err)
	}
	// It never arrived; the machine tries again with a new key.
	_, again, err := w.join(t, tok, "n2")
	if err != nil {
		t.Fatal(err)
	}
	records, _ := Records(t.Context(), w.store, false)
	if len(records) != 2 {
		t.Fatalf("records: %+v", records)
	}
	id := pki.Fingerprint(again.Key.Public())
	if err := confirm(t.Context(), w.store, id); err != nil {
		t.Fatal(err)
	}
	var no *Refusal
	if _, _, err := w.join(t, tok, "n2"); !errors.As(err, &no) || !strings.Contains(no.Message, "members rm n2") {
		t.Fatalf("a confirmed name was given away: %v", err)
	}
	if _, err := RemoveMember(t.Context(), w.store, "n2", time.Now()); err != nil {
		t.Fatal(err)
	}
	if gone, err := IsRemoved(t.Context(), w.store, id); !gone || err != nil {
		t.Errorf("the removed key still counts: %v", err)
	}
	_, fresh, err := w.join(t, tok, "n2")
	if err != nil {
		t.Fatalf("a freed name cannot be used: %v", err)
	}
	if gone, err := IsRemoved(t.Context(), w.store, pki.Fingerprint(fresh.Key.Public())); gone || err != nil {
		t.Errorf("the name's new key does not count: %v", err)
	}
	if _, err := RemoveMember(t.Context(), w.store, "n9", time.Now()); !errors.Is(err, ErrNotMember) {
		t.Errorf("removing a stranger: %v", err)
	}
}

func TestTokens(t *testing.T) {
	w := newWorld(t)
	tok := w.token(t, time.Hour)
	infos, err := Tokens(t.Context(), w.store)
	if err != nil || len(infos) != 1 || infos[0].ID != tok.ID {
		t.Fatalf("tokens: %+v, %v", infos, err)
	}
	all, err := w.store.List(t.Context(), "", raftstore.ListOptions{})
	if err != nil || len(all.KVs) == 0 {
		t.Fatal(err)
	}
	for _, kv := range all.KVs {
		if strings.Contains(string(kv.Value), tok.Secret) {
			t.Errorf("the secret is stored at %s", kv.Key)
		}
	}
	if found, err := DeleteToken(t.Context(), w.store, tok.ID); !found || err != nil {
		t.Fatal(found, err)
	}
	if found, _ := DeleteToken(t.Context(), w.store, tok.ID); found {
		t.Error("deleted twice")
	}
	if _, _, err := w.join(t, tok, "n2"); err == nil {
		t.Error("a deleted token still admits")
	}
}

func TestJoinNotAClusterd(t *testing.T) {
	w := newWorld(t)
	plain := &http.Server{}
	port, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{selfSigned(t)}, NextProtos: []string{"http/1.1"}})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { plain.Serve(port); close(done) }()
	defer func() { plain.Close(); <-done }()
	w.addr = port.Addr().String()
	_, _, err = w.join(t, w.token(t, time.Hour), "n2")
	if err == nil || !strings.Contains(err.Error(), "clusterd node") && !strings.Contains(err.Error(), "another cluster") {
		t.Errorf("a web server was asked to admit: %v", err)
	}
}

func selfSigned(t *testing.T) tls.Certificate {
	t.Helper()
	ca, err := pki.NewCA("web", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	key, _ := pki.NewKey()
	cert, err := ca.IssueServer(key.Public(), "web", nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key}
}

// as is a dialer for a protocol with a joined machine's identity.
func (w *world) as(wish Options, res *Response, protocol string) Dialer {
	cert, err := pki.ParseCert(res.NodeCert)
	if err != nil {
		panic(err)
	}
	pair := &tls.Certificate{Certificate: [][]byte{cert.Raw, w.ca.Cert.Raw}, PrivateKey: wish.Key}
	id := transport.Identity{Certificate: func() *tls.Certificate { return pair }, Roots: w.ca.Roots}
	return func(ctx context.Context) (net.Conn, error) {
		return id.Dial(ctx, netip.MustParseAddrPort(w.addr), "", protocol)
	}
}

// TestNoKeyReachesAnAgent: what an agent is given, and what it can ask for,
// holds no private key; a server gets the cluster's keys only as a member.
func TestNoKeyReachesAnAgent(t *testing.T) {
	w := newWorld(t)
	caKey, err := w.ca.EncodeCAKey()
	if err != nil {
		t.Fatal(err)
	}
	res, wish, err := w.join(t, w.tokenFor(t, TokenOptions{Role: pki.Agent, Uses: 1, TTL: time.Hour}), "a1")
	if err != nil {
		t.Fatal(err)
	}
	answer, err := json.Marshal(res)
	if err != nil {
		t.Fatal(err)
	}
	if res.Role != pki.Agent || bytes.Contains(answer, []byte("PRIVATE")) || bytes.Contains(answer, caKey) {
		t.Errorf("an agent is given %s", answer)
	}
	var no *Refusal
	if keys, err := FetchKeys(t.Context(), w.as(wish, res, transport.Member)); !errors.As(err, &no) || no.Code != CodeMember {
		t.Errorf("an agent asks for the keys: %v %v", keys, err)
	}
	if rec, err := Member(t.Context(), w.store, pki.Fingerprint(wish.Key.Public())); err != nil || rec.Confirmed || rec.Role != pki.Agent {
		t.Errorf("record: %+v %v", rec, err)
	}
	moved := netip.MustParseAddrPort("127.0.0.9:7009")
	if list, err := FetchServers(t.Context(), w.as(wish, res, transport.Member), moved, 0); err != nil || len(list.Servers) != 1 || list.Servers[0].Name != "n1" || list.Role != pki.Agent || !slices.Equal(list.Removed, []string{"gone"}) {
		t.Errorf("servers: %+v %v", list, err)
	}
	if rec, err := Member(t.Context(), w.store, pki.Fingerprint(wish.Key.Public())); err != nil || !rec.Confirmed || rec.Addr != moved {
		t.Errorf("record once it has arrived: %+v %v", rec, err)
	}

	res, wish, err = w.join(t, w.token(t, time.Hour), "n2")
	if err != nil {
		t.Fatal(err)
	}
	if answer, _ := json.Marshal(res); bytes.Contains(answer, []byte("PRIVATE")) {
		t.Errorf("a joiner is given %s", answer)
	}
	keys, err := FetchKeys(t.Context(), w.as(wish, res, transport.Member))
	if err != nil || !bytes.Equal(keys.CAKey, caKey) || keys.Gossip == nil || keys.Gossip.Number != 3 || len(keys.Gossip.Keys) != 2 || !bytes.Equal(keys.GossipKey, keys.Gossip.Keys[0]) {
		t.Errorf("a server asks for the keys: %v", err)
	}
	w.behind.Store(true)
	if keys, err := FetchKeys(t.Context(), w.as(wish, res, transport.Member)); err == nil || errors.As(err, &no) {
		t.Errorf("a server that is behind hands out %+v, %v", keys, err)
	}
	w.behind.Store(false)
	if _, err := RemoveMember(t.Context(), w.store, "n2", time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := FetchKeys(t.Context(), w.as(wish, res, transport.Member)); !errors.As(err, &no) || no.Code != CodeMember {
		t.Errorf("a key without a record gets the keys: %v", err)
	}
}

// TestTellAgents: agents learn of removed servers for as long as those have
// certificates, and not of removed agents.
func TestTellAgents(t *testing.T) {
	w := newWorld(t)
	now := time.Now()
	for name, role := range map[string]pki.Role{"a1": pki.Agent, "n2": pki.Server} {
		_, wish, err := w.join(t, w.tokenFor(t, TokenOptions{Role: role, TTL: time.Hour}), name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := RemoveMember(t.Context(), w.store, name, now); err != nil {
			t.Fatal(err)
		}
		var r Removal
		kv, _, err := w.store.Get(t.Context(), removed+pki.Fingerprint(wish.Key.Public()), raftstore.ReadOptions{})
		if err != nil || kv == nil {
			t.Fatalf("%s has no removal (%v)", name, err)
		}
		if err := json.Unmarshal(kv.Value, &r); err != nil {
			t.Fatal(err)
		}
		server := role == pki.Server
		if r.TellAgents(now) != server || r.TellAgents(now.Add(pki.MaxServerLifetime)) != server || r.TellAgents(now.Add(pki.MaxServerLifetime+25*time.Hour)) {
			t.Errorf("%s: %+v", name, r)
		}
	}
	if old := (Removal{Name: "n3", Removed: now}); !old.TellAgents(now) {
		t.Error("a removal that is older than roles is not sent to agents")
	}
}

// TestRenewal: an agent is given another certificate for its key, long after
// the last has ended, as long as its record exists; no other machine is.
func TestRenewal(t *testing.T) {
	w := newWorld(t)
	_, wish, err := w.join(t, w.tokenFor(t, TokenOptions{Role: pki.Agent, TTL: time.Hour}), "a1")
	if err != nil {
		t.Fatal(err)
	}
	stranger := transport.Identity{Certificate: func() *tls.Certificate { return &tls.Certificate{} }, Roots: w.ca.Roots}
	dial := func(ctx context.Context) (net.Conn, error) {
		return stranger.Dial(ctx, netip.MustParseAddrPort(w.addr), "", transport.Join)
	}
	cert, _, err := Renew(t.Context(), dial, "n1", wish.Key, by(w.ca))
	if err != nil {
		t.Fatal(err)
	}
	if name, _ := pki.NodeName(cert); name != "a1" || pki.NodeRole(cert) != pki.Agent {
		t.Errorf("it was made %s %s", name, pki.NodeRole(cert))
	}
	var no *Refusal
	other, _ := pki.NewKey()
	if _, _, err := Renew(t.Context(), dial, "a1", other, by(w.ca)); !errors.As(err, &no) || no.Code != CodeMember {
		t.Errorf("a key without a record: %v", err)
	}
	if _, err := RemoveMember(t.Context(), w.store, "a1", time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Renew(t.Context(), dial, "a1", wish.Key, by(w.ca)); !errors.As(err, &no) || no.Code != CodeMember {
		t.Errorf("a removed key: %v", err)
	}
}

// TestSetRole: a member's next certificate is of the role that its record has,
// and so is what it may ask.
func TestSetRole(t *testing.T) {
	w := newWorld(t)
	res, wish, err := w.join(t, w.tokenFor(t, TokenOptions{Role: pki.Agent, TTL: time.Hour}), "a1")
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	if _, err := SetRole(ctx, w.store, "ghost", pki.Server); !errors.Is(err, ErrNotMember) {
		t.Errorf("unknown name: %v", err)
	}
	if _, err := SetRole(ctx, w.store, "a1", pki.Server); !errors.Is(err, ErrNotArrived) {
		t.Errorf("one that has not arrived: %v", err)
	}
	member := w.as(wish, res, transport.Member)
	addr := netip.MustParseAddrPort("127.0.0.9:7009")
	if _, err := FetchServers(ctx, member, addr, 0); err != nil {
		t.Fatal(err)
	}
	for _, role := range []pki.Role{pki.Server, pki.Agent, pki.Server} {
		rec, err := SetRole(ctx, w.store, "a1", role)
		if err != nil || rec.IsServer() != (role == pki.Server) {
			t.Fatalf("%s: %+v %v", role, rec, err)
		}
		if _, err := SetRole(ctx, w.store, "a1", role); !errors.Is(err, ErrRole) {
			t.Errorf("%s again: %v", role, err)
		}
		if list, err := FetchServers(ctx, member, addr, 0); err != nil || list.Role != role {
			t.Errorf("it receives %+v %v, want %s", list, err, role)
		}
		cert, answer, err := Renew(ctx, w.as(wish, res, transport.Join), "a1", wish.Key, by(w.ca))
		if err != nil || pki.NodeRole(cert) != role || answer.Epoch != res.Epoch || len(answer.Servers) != 1 {
			t.Errorf("%s: certificate %v, %+v, %v", role, cert, answer, err)
		}
		var no *Refusal
		if _, err := FetchKeys(ctx, member); role == pki.Server && err != nil || role == pki.Agent && (!errors.As(err, &no) || no.Code != CodeMember) {
			t.Errorf("%s asks for the keys: %v", role, err)
		}
		if role == pki.Server && !slices.ContainsFunc(cert.IPAddresses, func(ip net.IP) bool { return ip.Equal(net.IP(addr.Addr().AsSlice())) }) {
			t.Errorf("the certificate names %v", cert.IPAddresses)
		}
	}
	if status, err := AskMembershipStatus(ctx, w.as(wish, res, transport.Join), pki.Fingerprint(wish.Key.Public())); err != nil || !status.Member || status.Role != pki.Server {
		t.Errorf("membership status %+v %v", status, err)
	}
}

func TestTokenUses(t *testing.T) {
	w := newWorld(t)
	tok := w.tokenFor(t, TokenOptions{Role: pki.Agent, Uses: 2, TTL: time.Hour})
	_, first, err := w.join(t, tok, "a1")
	if err != nil {
		t.Fatal(err)
	}
	// It never arrived: the machine tries again, with the same key and another.
	if _, err := Join(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	_, again, err := w.join(t, tok, "a1")
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.join(t, tok, "a2"); err != nil {
		t.Fatal(err)
	}
	var no *Refusal
	if _, _, err := w.join(t, tok, "a3"); !errors.As(err, &no) || no.Code != CodeToken || !strings.Contains(no.Message, "used 2 times") {
		t.Errorf("a third machine: %v", err)
	}
	// A member that has arrived is not replaced, and becomes nothing else by another token.
	id := pki.Fingerprint(again.Key.Public())
	if err := arrived(t.Context(), w.store, id, again.Addr); err != nil {
		t.Fatal(err)
	}
	again.Token = w.token(t, time.Hour)
	if _, err := Join(t.Context(), again); !errors.As(err, &no) || no.Code != CodeName {
		t.Errorf("an agent makes itself a server: %v", err)
	}
	again.Token, again.Name = tok, "a9"
	if _, err := Join(t.Context(), again); !errors.As(err, &no) {
		t.Errorf("an agent takes another name: %v", err)
	}
	infos, err := Tokens(t.Context(), w.store)
	if err != nil || !slices.ContainsFunc(infos, func(i TokenInfo) bool { return i.ID == tok.ID && i.Used == 2 && i.Uses == 2 && i.Role == pki.Agent }) {
		t.Errorf("tokens: %+v %v", infos, err)
	}
	// Many at once: as many as it is good for.
	tok = w.tokenFor(t, TokenOptions{Role: pki.Agent, Uses: 3, TTL: time.Hour})
	var wg sync.WaitGroup
	var admitted atomic.Int32
	for i := range 6 {
		wg.Go(func() {
			if _, _, err := w.join(t, tok, fmt.Sprintf("b%d", i)); err == nil {
				admitted.Add(1)
			}
		})
	}
	wg.Wait()
	if admitted.Load() != 3 {
		t.Errorf("%d of 6 were admitted by a token for 3", admitted.Load())
	}
}
