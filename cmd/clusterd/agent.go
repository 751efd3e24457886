package main

import (
	"context"
	"crypto"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"slices"

	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/cpuset"

	"github.com/clusterd/clusterd/agent"
	"github.com/clusterd/clusterd/agent/cpu"
	"github.com/clusterd/clusterd/agent/dns"
	"github.com/clusterd/clusterd/agent/host"
	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/kubeletapi"
	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/podnetwork"
	"github.com/clusterd/clusterd/agent/runtime"
	"github.com/clusterd/clusterd/agent/watches"
	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/apis/server/admission/noderestriction"
	"github.com/clusterd/clusterd/apis/server/rbac"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/netsetup/announce"
	"github.com/clusterd/clusterd/netsetup/loopback"
)

// readyNetworks is how many pod networks a node keeps ready. A burst of pods
// drains them, and then each waits for its own.
const readyNetworks = 8

// newAgentKeeper makes the part that keeps this node's agent running.
func (m *Main) newAgentKeeper() *agentKeeper {
	who := m.api.ClientConfigFor(pki.NodeUserPrefix+m.cfg.Name, pki.NodesGroup, pki.ServersGroup)
	network := m.api.ClientConfigFor(rbac.NodeNetwork)
	// It may read by a role, and is refused until roles are in force: its first
	// requests wait for that.
	network.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(req *http.Request) (*http.Response, error) {
			if err := m.api.WaitAuthorized(req.Context()); err != nil {
				return nil, err
			}
			return next.RoundTrip(req)
		})
	})
	traced := tracedClient(m.cfg, rest.CopyConfig(who), m.agentTracer)
	clients := nodeClients{agent: traced, heartbeat: who, events: who, network: network, key: m.id.Key, tracer: m.agentTracer, membership: membership{m}}
	return newAgentKeeper(m.log, func(ctx context.Context) (startedAgent, error) {
		defer m.parts.agent.Store(true)
		return newNodeAgent(ctx, m.cfg, m.log, m.images, clients, m.cert.Load)
	}, reportNotReady(m.log, m.cfg.Name, who))
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// nodeCalls answers what other members ask of this node: of its agent while
// that runs, of its store always.
func (m *Main) nodeCalls(agent http.Handler, program *nodeRelease) http.Handler {
	calls := http.NewServeMux()
	calls.Handle("/", agent)
	calls.HandleFunc("GET "+storePath, serversAsk(func(w http.ResponseWriter, _ *http.Request) {
		reply(w, http.StatusOK, nodeStore{m.store.Status(), m.encryptionState()})
	}))
	calls.HandleFunc("GET "+reachPath+"{node}", serversAsk(m.peers.getReach))
	program.register(calls)
	calls.HandleFunc("POST "+recoveryPath, serversOwn(m.clusterAPI.postRecoveryOrder))
	return calls
}

// serversAsk is for what servers ask for themselves: a user's request that was passed
// on, to a path of his choice, is refused. An older server does not say whose request it
// is: what changes anything is serversOwn's.
func serversAsk(do http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if who := transport.CallerFrom(r.Context()); who != nil {
			refuse(w, http.StatusForbidden, fmt.Sprintf("user %q: only servers ask for this, for themselves", who.User))
			return
		}
		do(w, r)
	}
}

// serversOwn is serversAsk for what only servers may do that say for whom they ask.
func serversOwn(do http.HandlerFunc) http.HandlerFunc {
	return serversAsk(func(w http.ResponseWriter, r *http.Request) {
		if transport.CallerUnknown(r.Context()) {
			refuse(w, http.StatusForbidden, "the server that asks runs a version that does not say for whom it asks: upgrade it first, or ask through another server")
			return
		}
		do(w, r)
	})
}

// callerOf is the user for whom a server makes a node call; nil: for itself.
func callerOf(ctx context.Context) user.Info {
	who := transport.CallerFrom(ctx)
	if who == nil {
		return nil
	}
	return &user.DefaultInfo{Name: who.User, UID: who.UID, Groups: who.Groups, Extra: who.Extra}
}

// nodeClients say how the parts of a node reach the API.
type nodeClients struct {
	// They are apart: heartbeats do not queue behind the rest, on an agent not even
	// on its connection, nor does anything behind events.
	agent, heartbeat, events *rest.Config
	network                  *rest.Config  // of the part that names and guards pods
	key                      crypto.Signer // the node's
	tracer                   trace.TracerProvider
	membership               agent.Membership // how the node leaves the cluster
}

// nodeAgent is what every node of a cluster has, servers and agents alike.
type nodeAgent struct {
	*agent.Agent
	calls *kubeletapi.Calls
	parts []func(context.Context) error // that run beside it
	undo  []func()
}

// close gives back what the parts hold. The containers and the rules stay.
func (a *nodeAgent) close() {
	for _, f := range slices.Backward(a.undo) {
		f()
	}
}

// Handler answers servers' calls that their users may make.
func (a *nodeAgent) Handler() http.Handler { return a.calls }

// run runs the node's parts until ctx or one of them ends.
func (a *nodeAgent) run(ctx context.Context) error {
	return together(ctx, slices.Concat(a.parts, []func(context.Context) error{a.Run}))
}

// together runs parts until ctx ends. One that ends before, with an error or without,
// ends them all.
func together(ctx context.Context, parts []func(context.Context) error) error {
	work, ctx := errgroup.WithContext(ctx)
	for _, part := range parts {
		work.Go(func() error {
			if err := part(ctx); err != nil || ctx.Err() != nil {
				return err
			}
			return errEndedEarly
		})
	}
	return work.Wait()
}

// newNodeAgent finds or starts podmon and builds a node's parts. cert is the
// node's certificate at the moment.
func newNodeAgent(ctx context.Context, cfg Config, log *slog.Logger, images *image.Store, clients nodeClients, cert func() *tls.Certificate) (_ *nodeAgent, err error) {
	a := &nodeAgent{}
	defer func() {
		if err != nil {
			a.close()
		}
	}()
	if err := noteHostDirs(nodedir.Dir(cfg.Data), cfg); err != nil {
		return nil, fmt.Errorf("record the folders that this node uses: %w", err)
	}
	containers, err := startRuntime(ctx, cfg, room(log, "runtime"))
	if err != nil {
		return nil, err
	}
	a.undo = append(a.undo, func() { containers.Close() })
	kept, err := newCheckpoint(ctx, cfg, &clients)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(clients.agent)
	if err != nil {
		return nil, fmt.Errorf("agent's client: %w", err)
	}
	heartbeat, err := kubernetes.NewForConfig(clients.heartbeat)
	if err != nil {
		return nil, fmt.Errorf("agent's client for heartbeats: %w", err)
	}
	events, err := kubernetes.NewForConfig(clients.events)
	if err != nil {
		return nil, fmt.Errorf("agent's client for events: %w", err)
	}
	addr, nodeIPs := cfg.addr().Addr(), cfg.nodeIPs(log)
	seen, err := watches.New(client)
	if err != nil {
		return nil, err
	}
	a.parts = append(a.parts, seen.Run)
	reader, err := kubernetes.NewForConfig(clients.network)
	if err != nil {
		return nil, fmt.Errorf("agent's client for the network: %w", err)
	}
	var network *podnetwork.Network
	attached := func(uid types.UID) bool { return network.Attached(string(uid)) } // asked when all parts run
	running := func() []*v1.Pod { return a.Agent.RunningPods() }
	policies, closePolicies, err := newPolicies(cfg, room(log, "netpol"), reader, attached, running, a.repaired, a.policiesFault)
	if err != nil {
		return nil, err
	}
	a.parts = append(a.parts, policies.Run)
	a.undo = append(a.undo, closePolicies)
	network, err = podnetwork.New(podnetwork.Config{
		Guard:    policies,
		Repaired: a.repaired,
		NodeName: cfg.Name,
		NodeIPs:  nodeIPs,
		Client:   client,
		Nodes:    seen.Nodes,
		Bridge:   podBridge,
		Dir:      nodedir.Dir(cfg.Data).Path("network"),
		KeyDir:   cfg.wireguardDir(),
		PodCIDRs: cfg.podRanges(),
		Ready:    readyNetworks,
		Encrypt:  cfg.PodEncryption == podEncryptionWireGuard,
		KeyAge:   cfg.WireGuardKeyAge.Duration,
		Blocked:  a.blocked,
		Logger:   room(log, "netsetup"),
	})
	if err != nil {
		return nil, fmt.Errorf("open the pod network: %w", err)
	}
	ranges := newClusterRanges(cfg)
	server := pki.NodeRole(cert().Leaf) == pki.Server
	services, closeServices, err := newServiceProxy(cfg, room(log, "service"), seen, reader, ranges, a.repaired, a.fresh, server)
	if err != nil {
		return nil, err
	}
	a.parts = append(a.parts, services.Run)
	a.undo = append(a.undo, closeServices)
	if err := followCluster(kept, seen, policies, services); err != nil {
		return nil, err
	}
	cpus, allocatable, err := processors(cfg)
	if err != nil {
		return nil, err
	}
	settings := agent.Config{
		NodeName:        cfg.Name,
		NodeIPs:         nodeIPs,
		DataDir:         cfg.Data,
		CgroupRoot:      cfg.CgroupRoot,
		Client:          client,
		HeartbeatClient: heartbeat,
		EventClient:     events,
		Tracer:          clients.tracer.Tracer(tracerName),
		Runtime:         containers,
		Images:          images,
		Network:         network,
		Paths:           network.Paths,
		Watches:         seen,
		Version:         kubeVersion(),
		MaxPods:         cfg.MaxPods,
		LeaseTime:       cfg.NodeLeaseDuration.Duration,
		FenceClaims:     cfg.FenceClaims,
		Checkpoint:      kept,
		PidsLimit:       max(cfg.PodPidsLimit, 0),
		CPUs:            cpus,
		AllocatableCPUs: allocatable,
		NodePort:        int32(cfg.Port),
		NodeLabels:      map[string]string{noderestriction.AgentLabel: ""},
		StaticDir:       cfg.staticPods(),
		StaticURL:       cfg.StaticPodsURL,
	}
	if networks, err := announce.Networks(addr); err != nil {
		log.Warn("the networks in which this node announces addresses of Services are not known: it is elected for those of others, too", "err", err)
	} else {
		settings.NodeAnnotations = map[string]string{names.AnnounceNetworks: join.Ranges(networks).String()}
	}
	if server {
		settings.NodeLabels = map[string]string{noderestriction.ServerLabel: ""}
	}
	if err := errors.Join(cfg.settings(&settings), cfg.hostSettings(&settings)); err != nil {
		return nil, err
	}
	if cfg.LeaveOnShutdown {
		settings.Membership = clients.membership
		if settings.Shutdown == nil {
			log.Warn("--leave-on-shutdown has no effect: systemd does not run clusterd as a service, so that shutdowns are not held up")
		}
	}
	warnOf(log, settings.Notices)
	lo, err := loopback.Open()
	if err != nil {
		return nil, err
	}
	a.undo = append(a.undo, func() { lo.Close() })
	if addrs := cfg.nodeDNS(); len(addrs) > 0 {
		settings.DNS = &dns.Config{
			Addrs:    addrs,
			Ranges:   ranges.get,
			Address:  lo.Ensure,
			Settings: reader,
		}
	}
	if a.Agent, err = agent.New(settings); err != nil {
		return nil, err
	}
	a.calls, err = kubeletapi.NewCalls(kubeletapi.CallsConfig{
		NodeName: cfg.Name, Client: client, Caller: callerOf, Handler: a.Agent.Handler(), Logger: room(log, "kubeletapi"),
	})
	if err != nil {
		return nil, err
	}
	if cfg.ReadOnlyPort != 0 {
		a.parts = append(a.parts, readOnly(cfg, log, a.Agent.Handler()))
	}
	if cfg.KubeletPort == 0 {
		return a, nil
	}
	tools, err := kubeletapi.New(kubeletapi.Config{
		NodeName: cfg.Name, Addr: netip.AddrPortFrom(addr, cfg.KubeletPort), Client: client, Certificate: cert,
		Handler: a.Agent.Handler(), Logger: room(log, "kubeletapi"),
	})
	if err != nil {
		return nil, err
	}
	a.parts = append(a.parts, tools.Run)
	return a, nil
}

// tracerName is the instrumentation scope of the agent's spans.
const tracerName = "github.com/clusterd/clusterd/agent"

// warnOf says in the log what pods are worse off for on this machine.
func warnOf(log *slog.Logger, notices []host.Notice) {
	for _, n := range notices {
		log.Warn(n.Message, "reason", n.Reason)
	}
}

// readOnly is the part that serves the read-only port.
func readOnly(cfg Config, log *slog.Logger, h http.Handler) func(context.Context) error {
	return func(ctx context.Context) error {
		return kubeletapi.ServeReadOnly(ctx, kubeletapi.ReadOnlyConfig{
			Addr: netip.AddrPortFrom(cfg.addr().Addr(), cfg.ReadOnlyPort), Handler: h, Logger: room(log, "kubeletapi"),
		})
	}
}

// blocked passes on why pods get no network.
func (a *nodeAgent) blocked(reason, why string) { a.Agent.PodNetworkBlocked(reason, why) }

// repaired passes on what the rooms of the network tell while the node runs.
func (a *nodeAgent) repaired(table, what string) { a.Agent.RulesRepaired(table, what) }

// fresh says whether the node has renewed its Lease of late.
func (a *nodeAgent) fresh() uint64 { return a.Agent.Fresh() }

// policiesFault passes on which policies are not in force.
func (a *nodeAgent) policiesFault(changed []string, err error) { a.Agent.PoliciesFault(changed, err) }

// processors says which containers have processors of their own. Without the
// static policy it takes back what was given while it was in force.
func processors(cfg Config) (_ pod.CPUs, allocatable cpuset.CPUSet, _ error) {
	file := nodedir.Dir(cfg.Data).Path("cpus.json")
	static := cfg.CPUManagerPolicy == cpuPolicyStatic
	if _, err := os.Stat(file); !static && errors.Is(err, fs.ErrNotExist) {
		return nil, allocatable, nil
	}
	topology, err := cpu.Discover("/sys")
	if err != nil {
		return nil, allocatable, err
	}
	reserved, err := cpuset.Parse(cfg.ReservedCPUs)
	if err != nil {
		return nil, allocatable, err
	}
	cpus, err := cpu.New(cpu.Config{Topology: topology, Reserved: reserved, File: file, Shared: !static})
	if err != nil {
		return nil, allocatable, err
	}
	return cpus, cpus.Allocatable(), nil
}

// startRuntime connects to the data directory's podmon, starting one if none
// lives.
func startRuntime(ctx context.Context, cfg Config, log *slog.Logger) (*runtime.Client, error) {
	c, err := runtime.Start(ctx, runtime.Config{Dir: nodedir.Dir(cfg.Data).Path("podmon"), CgroupRoot: cfg.CgroupRoot, Logger: log})
	if err != nil {
		return nil, fmt.Errorf("reach podmon: %w", err)
	}
	return c, nil
}
