package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
	"k8s.io/component-base/tracing"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/auth"
	"github.com/clusterd/clusterd/apis/server/budget"
	"github.com/clusterd/clusterd/apis/server/tokens"
	"github.com/clusterd/clusterd/cmd/clusterd/atrest"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/cmd/clusterd/storepast"
	"github.com/clusterd/clusterd/gossip"
	"github.com/clusterd/clusterd/member/authority"
	"github.com/clusterd/clusterd/member/clock"
	"github.com/clusterd/clusterd/member/gossipkey"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/recovery"
	"github.com/clusterd/clusterd/member/rights"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/member/tunnel"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	changes "github.com/clusterd/clusterd/raftstore/wait"
	"github.com/clusterd/clusterd/sched"
	"github.com/clusterd/clusterd/ui"
)

// Main is one node: every room is built, started and stopped here.
type Main struct {
	cfg Config
	dir nodedir.KeyDir
	id  *nodedir.Identity
	// idMu guards id.cert and id.trust, and pki/ on disk; trust and cert are
	// what is used.
	idMu         sync.Mutex
	trust        pki.LiveTrust
	trustChanged changes.Change
	cert         atomic.Pointer[tls.Certificate]
	shown        atomic.Pointer[shownCertificates]
	rotation     *authority.Server
	gossipKeys   *gossipkey.Node
	log          *slog.Logger
	lock         *os.File

	// clock is this machine's with what the other servers say of it; renewNow is notified
	// when it was set.
	clock      clock.Clock
	clockWatch *clock.Watch
	renewNow   changes.Change

	rights  *rights.Rights
	tid     transport.Identity
	port    *transport.Port
	peers   *peers
	members *gossip.Members
	store   *raftstore.Store
	api     *server.Server
	images  *image.Store
	metrics *nodeMetrics
	// agentTracer makes the agent's spans, serverTracer the API server's; flush sends
	// what is left of them.
	agentTracer, serverTracer tracing.TracerProvider
	flush                     []func()
	// budget bounds the store's writers; nil: they are not bounded.
	budget *budget.Budget
	// heldBack has why a writer begins to be held back.
	heldBack chan string

	clusterAPI *clusterAPI
	// seal encrypts secrets at rest with the cluster's own keys; atRest decides where it
	// does, and where the providers of an EncryptionConfiguration do; resealNow is signalled (capacity 1)
	// when their keys changed; resealed is how far the leader has come.
	seal      *kubestore.Seal
	atRest    *atrest.Sealing
	resealNow chan struct{}
	resealed  atomic.Pointer[resealState]
	// refused is signalled (capacity 1) when a member did not take a stream of this one.
	refused chan struct{}
	// reexecCh holds why this process is to be started again.
	reexecCh chan error

	// parts is how far the parts of this server are.
	parts serverParts

	// scheduler is how pods are placed while this node leads.
	scheduler sched.SchedulerConfig

	// bootstrap holds the settings of a cluster that begins here and now; nil
	// on every later start and every other node.
	bootstrap *join.Cluster
}

// New opens what the node keeps on disk and builds its rooms. It listens on
// the port but answers nothing yet. On error everything is closed again.
func New(ctx context.Context, cfg Config, log *slog.Logger) (_ *Main, err error) {
	m := &Main{cfg: cfg, dir: nodedir.KeyDir{Dir: nodedir.Dir(cfg.Data)}, log: log, parts: serverParts{began: time.Now()}, refused: make(chan struct{}, 1), resealNow: make(chan struct{}, 1), reexecCh: make(chan error, 1), metrics: newMetrics()}
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	registerLoopMetrics()
	if m.scheduler, err = cfg.scheduler(); err != nil {
		return nil, err
	}
	for _, words := range m.scheduler.Ignored {
		log.Warn("the scheduler's configuration says what has no effect", "what", words)
	}
	if !m.dir.Member() {
		return nil, fmt.Errorf("%s holds no node: run `clusterd init` to begin a cluster, or `clusterd join ADDRESS --token TOKEN`", cfg.Data)
	}
	if m.lock, err = m.dir.Lock(); err != nil {
		return nil, err
	}
	if m.dir, err = cfg.keyDir(); err != nil {
		return nil, err
	}
	if m.id, err = m.dir.ReadIdentity(); err != nil {
		return nil, err
	}
	m.id.Trust = m.id.Trust.Shorter(debugCertLife())
	if err = m.dir.Reconcile(m.id, log); err != nil {
		return nil, err
	}
	former, err := m.dir.FormerServers()
	if err != nil {
		return nil, err
	}
	m.rights = rights.New(m.id.NodeID(), &m.clock, former)
	if name, _ := pki.NodeName(m.id.Cert); name != cfg.Name {
		return nil, fmt.Errorf("--name %q: this machine joined as %q; a node cannot be renamed", cfg.Name, name)
	}
	if r := m.dir.Removed(); r != nil {
		return nil, m.errRemoved(*r)
	}
	if err = m.recoverStore(); err != nil {
		return nil, err
	}
	if m.bootstrap, err = m.dir.ReadBootstrap(); err != nil {
		return nil, err
	}
	m.trust.Store(m.id.Trust)
	if err = m.showIdentity(time.Now()); err != nil {
		return nil, err
	}
	m.clockWatch = m.newClockWatch()
	var flush func()
	if m.serverTracer, flush, err = newTracer(ctx, cfg, log, serverService); err != nil {
		return nil, err
	}
	m.flush = append(m.flush, flush)
	if m.agentTracer, flush, err = newTracer(ctx, cfg, log, agentService); err != nil {
		return nil, err
	}
	m.flush = append(m.flush, flush)
	m.tid = transport.Identity{Certificate: m.cert.Load, Shown: m.showCert, Roots: m.trust.Roots, Revoked: m.rights.Revoked, Sessions: transport.NewSessions(), Now: m.clock.Now}
	if err = m.checkMembership(ctx); err != nil {
		return nil, err
	}
	if err = m.renewCert(m.clock.Now()); err != nil {
		return nil, err
	}
	if m.port, err = transport.Listen(cfg.addr(), m.tid, room(log, "transport")); err != nil {
		return nil, err
	}
	m.members, err = gossip.New(gossip.Config{
		Meta:   gossip.Meta{ID: m.id.NodeID(), Name: cfg.Name, Version: version()},
		Addr:   cfg.addr(),
		Keys:   m.id.Ring.Keys,
		Seeds:  m.seeds,
		Admits: m.rights.Admitted,
		Expect: m.rights.Servers,
		Logger: room(log, "gossip"),
		Stream: gossip.Stream{
			Listener: m.port.Protocol(transport.Gossip),
			Dial: func(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
				return m.tid.Dial(ctx, addr, "", transport.Gossip)
			},
		},
	})
	if err != nil {
		return nil, err
	}
	m.peers = &peers{id: m.tid, members: m.members, agents: tunnel.NewHub(room(log, "tunnel")), record: m.rights.Named}
	limits, err := cfg.storeLimits()
	if err != nil {
		return nil, err
	}
	m.budget = m.newBudget(limits)
	store := raftstore.Config{
		ID:       m.id.NodeID(),
		Dir:      m.dir.Path("store"),
		Listener: m.port.Protocol(transport.Raft),
		Dial: func(ctx context.Context, id string) (net.Conn, error) {
			addr := m.serverAddr(id)
			if !addr.IsValid() {
				return nil, fmt.Errorf("member %s was not met yet", id)
			}
			return m.tid.Dial(ctx, addr, id, transport.Raft)
		},
		PeerID: func(c net.Conn) string {
			id, _ := transport.PeerOf(c)
			return id
		},
		Known:  m.rights.IsServer,
		Wall:   m.clock.Now,
		Logger: room(log, "raftstore"),
		Events: m.storeEvents(),
	}
	limits.apply(&store)
	if m.store, err = raftstore.Open(store); err != nil {
		return nil, err
	}
	m.metrics.setStore(m.store)
	m.rights.UseStore(m.store)
	m.rotation, m.gossipKeys = m.newRotation(), m.newGossipKeys()
	if err = m.buildAPI(); err != nil {
		return nil, err
	}
	if m.images, err = openImages(cfg, log); err != nil {
		return nil, err
	}
	if err = m.writeKubeconfig(); err != nil {
		return nil, err
	}
	return m, nil
}

// storeEvents are the metrics', and what this node must react to.
func (m *Main) storeEvents() raftstore.EventListener {
	events := m.metrics.storeEvents()
	events.Written = m.budget.Written
	events.Refused = func(string) {
		select {
		case m.refused <- struct{}{}:
		default:
		}
	}
	return events
}

func (m *Main) buildAPI() error {
	m.clusterAPI = m.newClusterAPI()
	var tracer tracing.TracerProvider // none at all costs less than one that makes nothing
	if m.cfg.TracingConfig != "" {
		tracer = m.serverTracer
	}
	toleration := int64(m.cfg.EvictionDelay.Seconds())
	err := errors.Join(m.openSeal(), m.renewFront(m.clock.Now()))
	if err != nil {
		return err
	}
	past := storepast.New(m.store)
	past.Name = func(ctx context.Context, id string) string { return join.NameOf(ctx, m.store, id) }
	m.api, err = server.New(server.Config{
		Storage: kubestore.NewDecorator(kubestore.Config{
			Store: m.store, Cache: true, Origin: server.Caller, Transformer: m.sealer, Reserve: m.budget.Reserve,
		}),
		Access:            m.cfg.AccessConfig.access(m.dir.Path("audit.log")),
		Admission:         m.cfg.AccessConfig.admission(),
		Streams:           m.cfg.MaxStreamsPerUser,
		Past:              past,
		Keys:              storepast.NewKeys(m.store),
		Metrics:           m.metrics.registry(),
		Authenticator:     refuseRemoved(m.rights, auth.ClientCertAt(m.trust.Roots, m.clock.Now)),
		Now:               m.clock.Now,
		NodeTransport:     m.peers.transportTo,
		ExternalAddress:   m.cfg.addr().String(),
		Front:             m.front(),
		ServiceCIDR:       m.cfg.ServiceCIDR,
		NodePorts:         m.cfg.nodePorts(),
		TolerationSeconds: &toleration,
		RawHandlers:       map[string]http.Handler{"/clusterd/v1/": m.clusterAPI.handler()},
		Tracer:            tracer,
		Components:        m.components(),
		HealthChecks:      m.sealChecks(),
		ReadyChecks:       append([]healthz.HealthChecker{healthz.NamedCheck("raftstore", m.storeReady), m.clockCheck()}, m.parts.readyChecks()...),
	})
	if err != nil {
		return fmt.Errorf("build the API server: %w", err)
	}
	return nil
}

// newClusterAPI is called before the API server is built whose client it uses.
func (m *Main) newClusterAPI() *clusterAPI {
	return &clusterAPI{
		name:     m.cfg.Name,
		store:    m.store,
		schedule: m.cfg.SnapshotConfig,
		budget:   m.budget,
		peers:    m.peers,
		members:  m.members,
		trust:    &m.trust,
		clock:    &m.clock,
		rotation: m.rotation,
		secrets:  m.snapshotSecrets,
		sealing:  m.encryptionState,
		self:     m.cfg.addr(),
		log:      room(m.log, "api"),
		restart:  m.restart,
		seen:     m.dir.ReadPeers,

		tokenKeys:      func(ctx context.Context) ([]tokens.State, error) { return m.api.TokenKeys(ctx) },
		rotateTokenKey: m.rotateTokenKey,
		deleteNode: func(ctx context.Context, name string) error {
			client, err := kubernetes.NewForConfig(m.api.LoopbackConfig())
			if err != nil {
				return err
			}
			return ignoreNotFound(client.CoreV1().Nodes().Delete(ctx, name, metav1.DeleteOptions{}))
		},
	}
}

// restart writes a recovery down and lets Run end with a *reexecError.
func (m *Main) restart(r recovery.Order) error {
	if err := m.dir.WriteRecovery(r); err != nil {
		return err
	}
	select {
	case m.reexecCh <- &reexecError{"this node begins epoch " + r.Epoch.String() + " of the store", m.cfg.Data}:
	default: // it is about to
	}
	return nil
}

// storeTime is the store's clock. It is asked only once the store is open.
func (m *Main) storeTime() time.Time { return m.store.Time() }

// storeReady is the readiness of the store as this node's users feel it:
// there is a leader, and this node has caught up with it.
func (m *Main) storeReady(r *http.Request) error {
	ctx, cancel := context.WithTimeout(r.Context(), 2*time.Second)
	defer cancel()
	_, _, err := m.store.Get(ctx, "/clusterd/cluster", raftstore.ReadOptions{})
	return err
}

// Run runs the node until ctx ends or a part of it does. onReady, which may be
// nil, is called once this node answers API requests; its error ends the node.
func (m *Main) Run(ctx context.Context, onReady func(context.Context, *Main) error) error {
	hideNotifySocket()
	if err := m.begin(); err != nil {
		return err
	}
	g := group{log: m.log}
	g.add("port", m.port.Run)
	g.add("gossip", m.members.Run)
	g.add("raftstore", m.keepStore)
	g.add("rights", m.keepRights)
	g.add("membership", m.watchMembership)
	g.add("role", m.keepRole)
	g.add("recovery", func(ctx context.Context) error {
		select {
		case err := <-m.reexecCh:
			return err
		case <-ctx.Done():
			return nil
		}
	})
	admission := m.joinServer()
	g.add("joining", serveShort(m.log, m.port.HTTPOver(transport.Join), admission))
	g.add("members' questions", serveShort(m.log, m.port.HTTPOver(transport.Member), admission.Questions()))
	g.add("agents", func(ctx context.Context) error { return m.peers.agents.Run(ctx, m.port.Protocol(transport.Tunnel)) })
	g.add("removals", m.notifyRemovals)
	g.add("api", m.api.Run)
	g.add("api port", serveHTTP(m.log, m.port.HTTP(), ui.Over(m.api.Handler())))
	g.add("leader", m.lead)
	g.add("held back writers", m.warnHeldBackWriters)
	g.add("seal", m.keepSeal)
	g.add("encryption", m.atRest.Run)
	keeper := m.newAgentKeeper()
	program, err := m.newNodeRelease(keeper)
	if err != nil {
		return err
	}
	g.add("upgrade", program.run)
	g.add("node calls", serveHTTP(m.log, transport.Calls(m.port.HTTPOver(transport.Node)), m.nodeCalls(keeper, program)))
	g.add("agent", keeper.Run)
	g.add("peers file", m.keepPeers)
	g.add("clock", m.keepClock)
	g.add("certificate", m.keepCert)
	g.add("authority", m.rotation.Run)
	g.add("gossip key", m.gossipKeys.Run)
	g.add("revocations", m.keepRevoked)
	g.add("memory", keepMemory)
	g.add("ready", func(ctx context.Context) error {
		if err := m.waitReady(ctx); err != nil {
			return err
		}
		m.parts.serves.Store(true)
		if onReady != nil {
			if err := onReady(ctx, m); err != nil {
				return err
			}
		}
		return notifySystemd(ctx, m.log, "answers at "+m.cfg.addr().String())
	})
	m.log.Info("clusterd runs", "version", version(), "go", runtime.Version(), "procs", runtime.GOMAXPROCS(0), "gogc", gogc(), "addr", m.cfg.addr(), "data", m.cfg.Data, "id", m.id.NodeID())
	return g.run(ctx)
}

// keepStore closes the store when its turn to stop has come: after all that
// uses it, before the port it hands its leadership over through. A store that
// stops by itself ends the node; started again, it is healed by the others.
func (m *Main) keepStore(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return m.store.Close()
	case <-m.store.Failed():
		return m.store.Err()
	}
}

// begin makes this node the first voter of a new cluster, once.
func (m *Main) begin() error {
	if m.bootstrap == nil {
		return nil
	}
	if err := m.store.Bootstrap(); err != nil && !errors.Is(err, raftstore.ErrStateExists) {
		return fmt.Errorf("begin the cluster: %w", err)
	}
	return nil
}

// recordCluster writes the first records of a new cluster, as its first
// leader. It can be repeated: bootstrap.json goes last.
func (m *Main) recordCluster(ctx context.Context) error {
	if m.bootstrap == nil {
		return nil
	}
	err := join.PutCluster(ctx, m.store, *m.bootstrap, join.Record{
		ID: m.id.NodeID(), Name: m.cfg.Name, Addr: m.cfg.addr(), Joined: time.Now().UTC(), Confirmed: true,
	})
	if err != nil && !errors.Is(err, join.ErrRecorded) {
		return err
	}
	m.bootstrap = nil
	return m.dir.RemoveBootstrap()
}

func (m *Main) joinServer() *join.Server {
	return &join.Server{
		Store:    m.store,
		Trust:    m.trust.Load,
		SealKeys: m.retiredSeals,
		OwnSeals: m.ownSeals,
		NoteTrust: func(ctx context.Context, id string, number uint64, may func() bool) error {
			return authority.RecordState(ctx, m.store, id, number, may)
		},
		NoteSeparate: func(ctx context.Context, id string, may func() bool) error {
			return authority.RecordSeparateSupport(ctx, m.store, id, may)
		},
		GossipKeys:  m.gossipKeys.Answer,
		Epoch:       m.store.Epoch(),
		HasLeader:   func() bool { return m.store.Leader() != "" },
		Servers:     m.serverAddrs,
		Removed:     m.rights.RemovedServers,
		ReleaseKeys: m.releaseKeys, Leave: m.clusterAPI.leave,
		Now: m.clock.Now, Log: room(m.log, "join"),
	}
}

// waitReady returns when a request through this node's whole API succeeds.
func (m *Main) waitReady(ctx context.Context) error {
	client, err := kubernetes.NewForConfig(m.api.LoopbackConfig())
	if err != nil {
		return err
	}
	return wait.PollUntilContextCancel(ctx, 20*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		_, err := client.CoreV1().Namespaces().Get(ctx, metav1.NamespaceDefault, metav1.GetOptions{})
		return err == nil, nil
	})
}

// waitNodeReady returns when this node is Ready.
func (m *Main) waitNodeReady(ctx context.Context) error {
	client, err := kubernetes.NewForConfig(m.api.LoopbackConfig())
	if err != nil {
		return err
	}
	mine := fields.OneTermEqualSelector(metav1.ObjectNameField, m.cfg.Name)
	nodes := cache.NewListWatchFromClient(client.CoreV1().RESTClient(), "nodes", metav1.NamespaceAll, mine)
	_, err = watchtools.UntilWithSync(ctx, nodes, &corev1.Node{}, nil, func(event watch.Event) (bool, error) {
		node, ok := event.Object.(*corev1.Node)
		return ok && event.Type != watch.Deleted && core.NodeReady(node), nil
	})
	return err
}

// shortTime bounds requests that are short, and their answers.
const shortTime = 45 * time.Second

// serveShort is serveHTTP for short requests, of those who may be anybody or be slow:
// none holds a connection for long.
func serveShort(log *slog.Logger, ln net.Listener, h http.Handler) func(context.Context) error {
	srv := newHTTPServer(log, h)
	srv.ReadTimeout, srv.WriteTimeout, srv.IdleTimeout = shortTime, shortTime, shortTime
	return serve(srv, ln)
}

// serveHTTP serves a handler on a listener until its context ends; then it
// lets requests finish for a moment.
func serveHTTP(log *slog.Logger, ln net.Listener, h http.Handler) func(context.Context) error {
	return serve(newHTTPServer(log, h), ln)
}

func newHTTPServer(log *slog.Logger, h http.Handler) *http.Server {
	return &http.Server{
		Handler:           h,
		ConnContext:       transport.WithPeer,
		ReadHeaderTimeout: 30 * time.Second,
		IdleTimeout:       3 * time.Minute,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}

func serve(srv *http.Server, ln net.Listener) func(context.Context) error {
	return func(ctx context.Context) error {
		done := make(chan error, 1)
		go func() { done <- srv.Serve(ln) }()
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
		}
		shutdownCtx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		if srv.Shutdown(shutdownCtx) != nil {
			srv.Close()
		}
		<-done
		return nil
	}
}

// close gives back what New took, in reverse.
func (m *Main) close() {
	for _, flush := range m.flush {
		flush()
	}
	if m.atRest != nil {
		m.atRest.Close()
	}
	if m.images != nil {
		_ = m.images.Close() // never fails
	}
	if m.store != nil {
		if err := m.store.Close(); err != nil {
			m.log.Warn("the store did not close cleanly", "err", err)
		}
	}
	if m.port != nil {
		m.port.Close()
	}
	if m.lock != nil {
		m.lock.Close()
	}
}
