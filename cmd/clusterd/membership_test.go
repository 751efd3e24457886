package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/gossipkey"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/rights"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/raftstore"
)

// startingServer is a server that is down while others speak about it: what its
// data directory holds, and the authority that it trusts.
type startingServer struct {
	t     *testing.T
	ca    *pki.CA
	id    *nodedir.Identity
	dir   nodedir.KeyDir
	epoch raftstore.Epoch
}

func newStartingServer(t *testing.T) *startingServer {
	t.Helper()
	start, other := startTimeout, membershipTimeout
	startTimeout, membershipTimeout = time.Minute, time.Minute // all who are asked answer
	t.Cleanup(func() { startTimeout, membershipTimeout = start, other })
	now := time.Now()
	ca, err := pki.NewCA("c", now)
	if err != nil {
		t.Fatal(err)
	}
	s := &startingServer{t: t, ca: ca, dir: nodedir.KeyDir{Dir: nodedir.Dir(t.TempDir())}, epoch: raftstore.NewEpoch(0)}
	s.id = &nodedir.Identity{Trust: pki.NewTrust(0, ca), Ring: gossipkey.Ring{Keys: [][]byte{gossipkey.New()}}}
	if s.id.Key, err = pki.NewKey(); err != nil {
		t.Fatal(err)
	}
	if s.id.Cert, err = ca.IssueServer(s.id.Key.Public(), "n1", nil, now); err != nil {
		t.Fatal(err)
	}
	err = errors.Join(s.dir.WriteIdentity(s.id), os.MkdirAll(s.dir.Path("store"), 0o700), raftstore.SetEpoch(s.dir.Path("store"), s.epoch),
		os.WriteFile(s.dir.Path("store", "what-only-this-node-has"), []byte("x"), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// peer is another member, at its own address, that answers so.
type peer struct {
	id     string
	addr   netip.AddrPort
	status join.MembershipStatus
	signer *pki.CA // of the certificates it hands out
}

// peer starts one; signer signs what certificates it hands out.
func (s *startingServer) peer(status join.MembershipStatus, signer *pki.CA) *peer {
	t := s.t
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	cert, err := s.ca.IssueServer(key.Public(), "n2", nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	shown := nodedir.TLSCertificate(s.ca, cert, key)
	port, err := transport.Listen(netip.MustParseAddrPort("127.0.0.1:0"),
		transport.Identity{Certificate: func() *tls.Certificate { return shown }, Roots: s.ca.Roots}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	p := &peer{id: pki.Fingerprint(key.Public()), addr: port.Addr(), status: status, signer: signer}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == join.MembershipStatusPath {
			json.NewEncoder(w).Encode(p.status)
			return
		}
		agent, err := p.signer.IssueAgent(s.id.Key.Public(), "n1", time.Now())
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		json.NewEncoder(w).Encode(join.Certificate{NodeCert: pki.EncodeCert(agent), Servers: []join.ServerAddr{{ID: p.id, Name: "n2", Addr: p.addr}}})
	})}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { port.Run(ctx) })
	wg.Go(func() { srv.Serve(port.HTTPOver(transport.Join)) })
	t.Cleanup(func() { srv.Close(); cancel(); wg.Wait() })
	return p
}

// starts has the server begin with what its data directory says, as New does.
func (s *startingServer) starts(peers ...*peer) error {
	t := s.t
	t.Helper()
	m := &Main{cfg: Config{Data: string(s.dir.Dir)}, dir: s.dir, id: s.id, log: slog.New(slog.DiscardHandler)}
	m.cfg.Name = "n1"
	former, err := s.dir.FormerServers()
	if err != nil {
		t.Fatal(err)
	}
	m.rights = rights.New(s.id.NodeID(), &m.clock, former)
	m.trust.Store(s.id.Trust)
	m.cert.Store(s.id.TLSCertificate())
	m.tid = transport.Identity{Certificate: m.cert.Load, Roots: m.trust.Roots, Revoked: m.rights.Revoked, Now: m.clock.Now}
	m.clockWatch = m.newClockWatch()
	var seen []nodedir.SeenPeer
	for _, p := range peers {
		seen = append(seen, nodedir.SeenPeer{ID: p.id, Name: "n2", Addr: p.addr})
	}
	if err := s.dir.WritePeers(seen); err != nil {
		t.Fatal(err)
	}
	return m.checkMembership(t.Context())
}

// untouched says what of the data directory has changed.
func (s *startingServer) untouched() string {
	var changed []string
	if _, err := os.Stat(s.dir.Path("store", "what-only-this-node-has")); err != nil {
		changed = append(changed, "the store is another")
	}
	for _, name := range []string{"removed", "recovery.json", "servers.json"} {
		if _, err := os.Stat(s.dir.Path(name)); err == nil {
			changed = append(changed, name+" was written")
		}
	}
	if role, err := s.dir.Role(); err != nil || role != pki.Server {
		changed = append(changed, "it is no server any more")
	}
	return strings.Join(changed, ", ")
}

func (s *startingServer) removed(ids ...string) {
	s.t.Helper()
	if err := s.dir.WriteFormerServers(ids); err != nil {
		s.t.Fatal(err)
	}
}

// lies are the answers by which a member takes part no more.
func (s *startingServer) lies() map[string]join.MembershipStatus {
	return map[string]join.MembershipStatus{
		"a newer epoch":                {Epoch: raftstore.NewEpoch(s.epoch.Number), Member: true, Role: pki.Server, HasLeader: new(true)},
		"a newer epoch, and left out":  {Epoch: raftstore.NewEpoch(s.epoch.Number), Removed: &join.Removal{Why: join.Restored}, HasLeader: new(true)},
		"removed":                      {Epoch: s.epoch, Removed: &join.Removal{}, HasLeader: new(true)},
		"demoted":                      {Epoch: s.epoch, Member: true, Role: pki.Agent, HasLeader: new(true)},
		"demoted, and in a newer life": {Epoch: raftstore.NewEpoch(s.epoch.Number), Member: true, Role: pki.Agent},
	}
}

// TestStartRemovedPeer: what a removed server says to one that starts counts for
// nothing, once that has known of the removal; without it each word is obeyed.
func TestStartRemovedPeer(t *testing.T) {
	for name := range newStartingServer(t).lies() {
		t.Run(name, func(t *testing.T) {
			s := newStartingServer(t)
			p := s.peer(s.lies()[name], s.ca)
			s.removed("some-other-id", p.id)
			if err := s.starts(p); err != nil || s.untouched() != "" {
				t.Errorf("of a removed server: %v; %s", err, s.untouched())
			}
			s.removed("some-other-id")
			if err := s.starts(p); s.untouched() == "" {
				t.Errorf("of a server that is none of them it changes nothing either: %v", err)
			}
		})
	}
}

// TestStartMajority: while a member of this node's epoch follows a leader and has
// this node for a server, no other's word ends it, demotes it or has it start over.
func TestStartMajority(t *testing.T) {
	alive := func(s *startingServer) join.MembershipStatus {
		return join.MembershipStatus{Epoch: s.epoch, Member: true, Role: pki.Server, HasLeader: new(true)}
	}
	for name := range newStartingServer(t).lies() {
		t.Run(name, func(t *testing.T) {
			s := newStartingServer(t)
			liar, friend := s.peer(s.lies()[name], s.ca), s.peer(alive(s), s.ca)
			if err := s.starts(liar, friend); err != nil || s.untouched() != "" {
				t.Errorf("%v; %s", err, s.untouched())
			}
			for what, change := range map[string]func(*join.MembershipStatus){
				"follows no leader":                  func(a *join.MembershipStatus) { a.HasLeader = new(false) },
				"is of a version that does not say":  func(a *join.MembershipStatus) { a.HasLeader = nil },
				"knows nothing of this node":         func(a *join.MembershipStatus) { a.Member = false },
				"is of another life of the same age": func(a *join.MembershipStatus) { a.Epoch.ID++ },
			} {
				s := newStartingServer(t)
				liar, other := s.peer(s.lies()[name], s.ca), s.peer(alive(s), s.ca)
				change(&other.status)
				if err := s.starts(liar, other); s.untouched() == "" {
					t.Errorf("beside one that %s nothing changes either: %v", what, err)
				}
			}
		})
	}
}

// TestStartDemoted: a certificate of a foreign authority demotes no server; one of
// its own does, and its store is kept, however often that happens.
func TestStartDemoted(t *testing.T) {
	s := newStartingServer(t)
	foreign, err := pki.NewCA("c", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	p := s.peer(s.lies()["demoted"], foreign)
	if err := s.starts(p); err == nil || !strings.Contains(err.Error(), "does not trust") || s.untouched() != "" {
		t.Errorf("by a foreign authority: %v; %s", err, s.untouched())
	}
	p.signer = s.ca
	var again *reexecError
	if err := s.starts(p); !errors.As(err, &again) {
		t.Fatalf("by its own: %v", err)
	}
	if role, err := s.dir.Role(); err != nil || role != pki.Agent {
		t.Errorf("it is %s, %v", role, err)
	}
	for range 2 { // as by the agent's start, before and after a promotion that breaks off
		if err := s.dir.DropServerState(); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(s.dir.Path("store")); err == nil {
			t.Error("the store is still there")
		}
		if err := raftstore.SetEpoch(s.dir.Path("store"), s.epoch); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(s.dir.Path("store.demoted", "what-only-this-node-has")); err != nil {
		t.Errorf("the store was not kept: %v", err)
	}
}

// TestFormerServers: a server writes down which servers were removed, for its next
// start.
func TestFormerServers(t *testing.T) {
	var r rights.Rights
	if r.Remember("a1", join.Removal{Role: pki.Agent}) != nil {
		t.Error("an agent is written down")
	}
	if got := r.Remember("s2", join.Removal{Role: pki.Server}); !slices.Equal(got, []string{"s2"}) {
		t.Errorf("%v", got)
	}
	got := r.Remember("s1", join.Removal{}) // older than roles
	if !slices.Equal(got, []string{"s1", "s2"}) || r.Remember("s1", join.Removal{}) != nil {
		t.Errorf("%v", got)
	}
	dir := nodedir.Dir(t.TempDir())
	if former, err := dir.FormerServers(); err != nil || len(former) != 0 {
		t.Errorf("no list: %v, %v", former, err)
	}
	if err := dir.WriteFormerServers(got); err != nil {
		t.Fatal(err)
	}
	former, err := dir.FormerServers()
	if err != nil || len(former) != 2 || !former["s1"] || !former["s2"] {
		t.Errorf("read again: %v, %v", former, err)
	}
	next := rights.New("s3", nil, former)
	if !next.Revoked("s1") || next.Revoked("a1") {
		t.Error("while the store is closed the list does not count")
	}
	if err := dir.WriteRemovedServers([]byte("{")); err != nil {
		t.Fatal(err)
	}
	if _, err := dir.FormerServers(); err == nil || !strings.Contains(err.Error(), "removed-servers.json") {
		t.Errorf("a broken list: %v", err)
	}
}
