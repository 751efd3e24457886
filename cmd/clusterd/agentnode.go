package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	goruntime "runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/apis/server/rbac"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/clock"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/servers"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/member/tunnel"
)

// agentNode is a node that runs pods and nothing else: it opens no store, no
// API and no authority, and reaches the cluster through whatever server
// answers.
type agentNode struct {
	cfg   Config
	dir   nodedir.KeyDir
	id    *nodedir.Identity
	idMu  sync.Mutex // guards id.cert and id.trust, and pki/ on disk
	trust pki.LiveTrust
	cert  atomic.Pointer[tls.Certificate]
	renew chan struct{} // is signalled (capacity 1) when the certificate is to be looked at
	// clock is this machine's with what the servers say of it.
	clock      clock.Clock
	clockWatch *clock.Watch
	port       *transport.Port
	log        *slog.Logger
	tid        transport.Identity
	servers    *servers.List
	// reexecCh takes why this process is to be started again.
	reexecCh chan error
	// promoted is signalled (capacity 1) when the servers said that this node is one of them.
	promoted chan struct{}
}

// runAgentNode runs the node until ctx ends.
func runAgentNode(ctx context.Context, cfg Config, log *slog.Logger) error {
	hideNotifySocket()
	n := &agentNode{cfg: cfg, dir: nodedir.KeyDir{Dir: nodedir.Dir(cfg.Data)}, log: log, promoted: make(chan struct{}, 1), reexecCh: make(chan error, 1), renew: make(chan struct{}, 1)}
	lock, err := n.dir.Lock()
	if err != nil {
		return err
	}
	defer lock.Close()
	if n.dir, err = cfg.keyDir(); err != nil {
		return err
	}
	if n.id, err = n.dir.ReadIdentity(); err != nil {
		return err
	}
	if err := n.dir.Reconcile(n.id, log); err != nil {
		return err
	}
	if name, _ := pki.NodeName(n.id.Cert); name != cfg.Name {
		return fmt.Errorf("--name %q: this machine joined as %q; a node cannot be renamed", cfg.Name, name)
	}
	if r := n.dir.Removed(); r != nil {
		return errRemoved(cfg, *r)
	}
	if err := n.dir.DropServerState(); err != nil { // of a server that was demoted
		return fmt.Errorf("remove what is a server's: %w", err)
	}
	n.useIdentity()
	n.tid = transport.Identity{Certificate: n.cert.Load, Roots: n.trust.Roots, Revoked: func(id string) bool { return n.servers.Removed(id) }, Sessions: transport.NewSessions(), Now: n.clock.Now}
	known, err := n.dir.ReadServers()
	if err != nil {
		return err
	}
	removed, err := n.dir.ReadRemovedServers()
	if err != nil {
		return err
	}
	extra, err := cfg.peerAddrs()
	if err != nil {
		return err
	}
	n.servers, err = servers.New(servers.Config{
		Identity: n.tid, ID: n.id.NodeID(), Self: cfg.addr(), Known: known, Save: n.dir.WriteServers, Extra: extra,
		KnownRemoved: removed, SaveRemoved: n.dir.WriteRemovedServers,
		Cut: func(id string) {
			log.Warn("a server was removed from the cluster: this node refuses it from now on", "id", id)
			n.port.CloseConns(id)
		},
		Role: func(role pki.Role) {
			if role != pki.Server {
				return
			}
			select {
			case n.promoted <- struct{}{}:
			default:
			}
		},
		Trust:       n.applyTrustBundle,
		TrustNumber: n.trustNumber,
		Warn:        func(msg string, err error) { log.Warn(msg, "err", err) },
	})
	if err != nil {
		return err
	}
	n.clockWatch = n.newClockWatch()
	images, err := openImages(cfg, log)
	if err != nil {
		return err
	}
	defer func() { _ = images.Close() }() // never fails
	n.port, err = transport.ListenNode(cfg.addr(), n.tid, room(log, "transport"))
	if err != nil {
		return err
	}
	defer n.port.Close()
	g := group{log: log}
	g.add("port", n.port.Run)
	g.add("clock", n.clockWatch.Run)
	g.add("certificate", n.keepCert)
	g.add("role", n.keepRole)
	g.add("servers", func(ctx context.Context) error { return n.servers.Run(ctx, n.askMembership) })
	way := n.servers.Transport()
	network := n.client(way)
	network.Impersonate = rest.ImpersonationConfig{UserName: rbac.NodeNetwork}
	tracer, flush, err := newTracer(ctx, cfg, log, agentService)
	if err != nil {
		return err
	}
	defer flush()
	traced := tracedClient(cfg, n.client(way), tracer)
	keeper := newAgentKeeper(log, func(ctx context.Context) (startedAgent, error) {
		return newNodeAgent(ctx, cfg, log, images, nodeClients{agent: traced, heartbeat: n.client(n.servers.Transport()), events: n.client(way), network: network, key: n.id.Key, tracer: tracer, membership: agentMembership{n}}, n.cert.Load)
	}, reportNotReady(log, cfg.Name, n.client(way)))
	keeper.tries = setupTries
	program, err := newNodeRelease(cfg, log)
	if err != nil {
		return err
	}
	program.clusterKeys, program.agentRuns, program.reexecCh = n.releaseKeys, keeper.runs, n.reexecCh
	program.storeReady = func(context.Context) bool { return true }
	g.add("upgrade", program.run)
	g.add("next program", func(ctx context.Context) error {
		select {
		case err := <-n.reexecCh:
			return err
		case <-ctx.Done():
			return nil
		}
	})
	calls := n.calls(keeper, program)
	g.add("node calls", serveHTTP(log, transport.Calls(n.port.HTTPOver(transport.Node)), calls))
	g.add("tunnels", func(ctx context.Context) error {
		return tunnel.Keep(ctx, tunnel.Config{
			Servers: n.servers.All,
			Dial: func(ctx context.Context, s join.ServerAddr) (net.Conn, error) {
				return n.tid.Dial(ctx, s.Addr, s.ID, transport.Tunnel)
			},
			Serve: func(ctx context.Context, ln net.Listener) error {
				return serveHTTP(log, transport.Calls(ln), calls)(ctx)
			},
			Logger: room(log, "tunnel"),
		})
	})
	g.add("agent", keeper.Run)
	g.add("memory", keepMemory)
	g.add("ready", func(ctx context.Context) error {
		return notifySystemd(ctx, log, "an agent, listens at "+cfg.addr().String())
	})
	log.Info("clusterd runs as an agent", "version", version(), "go", goruntime.Version(), "procs", goruntime.GOMAXPROCS(0), "gogc", gogc(), "addr", cfg.addr(), "data", cfg.Data, "id", n.id.NodeID(), "servers", len(n.servers.All()))
	return g.run(ctx)
}

// calls answers what servers ask of this node: of its agent, whether it runs as
// one, and that it ask for changes of the members, itself among them.
func (n *agentNode) calls(agent http.Handler, program *nodeRelease) http.Handler {
	mux := http.NewServeMux()
	program.register(mux)
	mux.Handle("/", agent)
	mux.HandleFunc("GET "+v1.Members, serversAsk(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
	mux.HandleFunc("PUT "+removedPath, serversOwn(n.putRemoved))
	mux.HandleFunc("POST "+v1.Members, serversAsk(func(w http.ResponseWriter, _ *http.Request) {
		n.servers.RequestRefresh()
		w.WriteHeader(http.StatusNoContent)
	}))
	return mux
}

// releaseKeys are the keys that the cluster trusts, as a server says.
func (n *agentNode) releaseKeys(ctx context.Context) ([]string, error) {
	return join.FetchReleaseKeys(ctx, func(ctx context.Context) (net.Conn, error) { return n.servers.Dial(ctx, transport.Member) })
}

// client is the configuration of a client of the API of any server, by that way.
// The Lease has a way, which is a connection, of its own; all else shares one: each
// costs a server tens of KiB and a ping every two seconds, for every agent.
func (n *agentNode) client(way http.RoundTripper) *rest.Config {
	return &rest.Config{
		Host:      "https://kubernetes",
		Transport: way,
		QPS:       -1,
		UserAgent: rest.DefaultKubernetesUserAgent(),
		ContentConfig: rest.ContentConfig{
			ContentType:        "application/vnd.kubernetes.protobuf",
			AcceptContentTypes: "application/vnd.kubernetes.protobuf,application/json",
		},
	}
}

// newClockWatch is an agent's.
func (n *agentNode) newClockWatch() *clock.Watch {
	return &clock.Watch{
		Clock: &n.clock, Log: room(n.log, "clock"), Read: readClock(func() transport.Identity { return n.tid }, n.id.NodeID()), Floor: func() (time.Time, string) { return clockFloor(n.trust.Load()) },
		Others: n.servers.All, Servers: func() int { return len(n.servers.All()) }, Period: clock.AgentPeriod,
		Last: func() time.Time { return time.Time{} },
		Changed: func() {
			n.lookAtCert()
			n.servers.RequestRefresh()
		},
	}
}

// lookAtCert has keepCert look at the certificate now.
func (n *agentNode) lookAtCert() {
	select {
	case n.renew <- struct{}{}:
	default:
	}
}

// keepCert renews the node's certificate in time, and after it has ended, too.
func (n *agentNode) keepCert(ctx context.Context) error {
	for {
		cert := n.cert.Load().Leaf
		wait := min(time.Minute, pki.RenewalCheckInterval(cert))
		if pki.NeedsRenewal(cert, n.clock.Now()) || !n.trust.Load().For(pki.ForNodes).Signer().Signed(cert) {
			cert, err := n.renewCert(ctx)
			switch {
			case err == nil:
				n.log.Info("the node's certificate was renewed", "expires", cert.NotAfter)
				wait = min(time.Minute, pki.RenewalCheckInterval(cert))
				if pki.NeedsRenewal(cert, n.clock.Now()) { // by this machine's clock, which is wrong
					n.clockWatch.RequestLook()
					wait = time.Minute
				}
				if !n.trust.Load().For(pki.ForNodes).Signer().Signed(cert) { // by a server that is behind
					wait = time.Second
				}
			case ctx.Err() == nil:
				wait = 5 * time.Second
				n.log.Warn("the node's certificate could not be renewed", "expires", n.cert.Load().Leaf.NotAfter, "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-n.renew:
		case <-time.After(wait):
		}
	}
}

// renewCert gets the next certificate from a server, and receives from it which
// authorities to trust.
func (n *agentNode) renewCert(ctx context.Context) (*x509.Certificate, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	known := false
	cert, answer, err := join.Renew(ctx, func(ctx context.Context) (net.Conn, error) {
		c, err := n.servers.Dial(ctx, transport.Join)
		if err == nil {
			id, _ := transport.PeerOf(c)
			known = n.knows(id)
		}
		return c, err
	}, n.cfg.Name, n.id.Key, func(answer *join.Certificate) *pki.Trust {
		if known && answer.Trust != nil && answer.Trust.Number > n.trust.Load().Number {
			if next, err := answer.Trust.Trust(); err == nil {
				return next // it is learned below
			}
		}
		return n.trust.Load()
	})
	if err == nil && pki.NodeRole(cert) != pki.Agent {
		err = errors.New("it is a server's: this node was promoted, and becomes one first")
	}
	if err != nil {
		return nil, err
	}
	if answer.Trust != nil && known {
		n.applyTrustBundle(*answer.Trust)
	}
	n.idMu.Lock()
	defer n.idMu.Unlock()
	if err := n.dir.WriteNodeCert(cert); err != nil {
		return nil, err
	}
	n.id.Cert = cert
	n.useIdentity()
	n.servers.RequestRefresh() // it may be what others wait for
	return cert, nil
}

// knows reports whether the key with that id is one of the servers' that this
// node knows.
func (n *agentNode) knows(id string) bool {
	return slices.ContainsFunc(n.servers.All(), func(s join.ServerAddr) bool { return s.ID == id })
}

// useIdentity shows the certificate of n.id and trusts its authorities. idMu is held, once there are others.
func (n *agentNode) useIdentity() {
	n.trust.Store(n.id.Trust)
	n.cert.Store(n.id.TLSCertificate())
}

// applyTrustBundle takes up the authorities that the servers trust, unless it is an old state. The bundle comes
// from a server whose key this node knows: it takes more than the authority's
// key to tell agents of another authority.
func (n *agentNode) applyTrustBundle(b join.TrustBundle) {
	n.idMu.Lock()
	defer n.idMu.Unlock()
	had := n.id.Trust
	if b.Number <= had.Number {
		return
	}
	next, err := b.Trust()
	if err == nil {
		id := *n.id
		id.Trust = next
		err = n.dir.ReplaceIdentity(&id)
	}
	if err != nil {
		n.log.Warn("the servers' CA bundle was not applied", "number", b.Number, "err", err)
		return
	}
	n.id.Trust = next
	n.useIdentity()
	n.log.Info("this node follows the CA rotation", "number", b.Number, "authorities", len(next.Whole()))
	n.lookAtCert()
	n.servers.RequestRefresh()
	if had.DropsAny(next) {
		n.port.CloseUntrusted(n.knows)
	}
}

// trustNumber is the number of the servers' last state of the authority that this
// node has applied: its certificate is the one's that signs.
func (n *agentNode) trustNumber() uint64 {
	trust := n.trust.Load()
	if !trust.For(pki.ForNodes).Signer().Signed(n.cert.Load().Leaf) {
		return 0
	}
	return trust.Number
}

// askRemoved asks the servers whether this node was removed; nil: none says so.
func (n *agentNode) askRemoved(ctx context.Context) *join.Removal {
	for _, s := range n.servers.All() {
		attempt, cancel := context.WithTimeout(ctx, membershipTimeout)
		answer, err := join.AskMembershipStatus(attempt, func(ctx context.Context) (net.Conn, error) {
			return n.tid.Dial(ctx, s.Addr, s.ID, transport.Join)
		}, n.id.NodeID())
		cancel()
		if err == nil && answer.Removed != nil {
			return answer.Removed
		}
	}
	return nil
}

// askMembership asks the servers why none of them answers this node: it may have
// been removed.
func (n *agentNode) askMembership(ctx context.Context) error {
	n.clockWatch.RequestLook() // by a clock that is wrong all servers' certificates seem to have ended
	if r := n.askRemoved(ctx); r != nil {
		return errors.Join(errRemoved(n.cfg, *r), n.dir.MarkRemoved(*r))
	}
	if n.trust.Load().Changing() {
		// The cluster may have gone on with one of them while this node was away, so
		// that its certificate opens nothing but this.
		if _, err := n.renewCert(ctx); err != nil {
			n.log.Debug("the node's certificate could not be renewed", "err", err)
		}
	}
	return nil
}
