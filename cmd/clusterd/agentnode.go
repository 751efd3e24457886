package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	goruntime "runtime"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/agent/image"
	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/apis/server/rbac"
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
	cfg     Config
	dir     dataDir
	id      *identity
	cert    atomic.Pointer[tls.Certificate]
	log     *slog.Logger
	tid     transport.Identity
	servers *servers.List
	// promoted holds a word when the servers said that this node is one of them.
	promoted chan struct{}
}

// role is the role of the member whose data folder it is.
func (d dataDir) role() (pki.Role, error) {
	b, err := os.ReadFile(d.path("pki", "node.crt"))
	if err != nil {
		return "", err
	}
	cert, err := pki.ParseCert(b)
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(d.path("pki", "ca.key")); err == nil {
		return pki.Server, nil // a certificate that is older than roles does not name it
	}
	return pki.NodeRole(cert), nil
}

// runAgentNode runs the node until ctx ends.
func runAgentNode(ctx context.Context, cfg Config, log *slog.Logger) error {
	n := &agentNode{cfg: cfg, dir: dataDir(cfg.Data), log: log, promoted: make(chan struct{}, 1)}
	lock, err := n.dir.lock()
	if err != nil {
		return err
	}
	defer lock.Close()
	if n.id, err = n.dir.readIdentity(); err != nil {
		return err
	}
	if name, _ := pki.NodeName(n.id.cert); name != cfg.Name {
		return fmt.Errorf("--name %q: this machine joined as %q; a node cannot be renamed", cfg.Name, name)
	}
	if r := n.dir.removed(); r != nil {
		return errRemoved(cfg, *r)
	}
	if err := n.dir.dropServerState(); err != nil { // of a server that was demoted
		return fmt.Errorf("remove what is a server's: %w", err)
	}
	n.cert.Store(n.id.tlsCertificate())
	n.tid = transport.Identity{Certificate: n.cert.Load, Roots: n.id.ca.Pool(), Revoked: func(id string) bool { return n.servers.Removed(id) }}
	known, err := n.dir.readServers()
	if err != nil {
		return err
	}
	removed, err := n.dir.readRemovedServers()
	if err != nil {
		return err
	}
	var port *transport.Port
	extra, err := cfg.peerAddrs()
	if err != nil {
		return err
	}
	n.servers, err = servers.New(servers.Config{
		Identity: n.tid, ID: n.id.nodeID(), Self: cfg.addr(), Known: known, Save: n.dir.writeServers, Extra: extra,
		KnownRemoved: removed, SaveRemoved: n.dir.writeRemovedServers,
		Cut: func(id string) {
			log.Warn("a server was removed from the cluster: this node refuses it from now on", "id", id)
			port.Cut(id)
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
		Warn: func(msg string, err error) { log.Warn(msg, "err", err) },
	})
	if err != nil {
		return err
	}
	images, err := image.Open(image.Config{Dir: n.dir.path("images"), Own: ownImage(), Logger: room(log, "image")})
	if err != nil {
		return fmt.Errorf("open the image store: %w", err)
	}
	port, err = transport.ListenNode(cfg.addr(), n.tid, room(log, "transport"))
	if err != nil {
		return err
	}
	defer port.Close()
	g := group{log: log}
	g.add("port", port.Run)
	g.add("certificate", n.keepCert)
	g.add("role", n.keepRole)
	g.add("servers", func(ctx context.Context) error { return n.servers.Run(ctx, n.askStanding) })
	network := n.client()
	network.Impersonate = rest.ImpersonationConfig{UserName: rbac.NodeNetwork}
	keeper := newAgentKeeper(log, func(ctx context.Context) (startedAgent, error) {
		return newNodeAgent(ctx, cfg, log, images, nodeClients{agent: n.client(), heartbeat: n.client(), network: network}, n.cert.Load)
	}, tellNotReady(log, cfg.Name, n.client()))
	calls := n.calls(keeper)
	g.add("node calls", serveHTTP(log, port.HTTPOver(transport.Node), calls))
	g.add("tunnels", func(ctx context.Context) error {
		return tunnel.Keep(ctx, tunnel.Config{
			Servers: n.servers.All,
			Dial: func(ctx context.Context, s join.ServerAddr) (net.Conn, error) {
				c, err := n.tid.Dial(ctx, s.Addr, s.ID, transport.Tunnel)
				if err != nil {
					return nil, err
				}
				return c, nil
			},
			Serve:  func(ctx context.Context, ln net.Listener) error { return serveHTTP(log, ln, calls)(ctx) },
			Logger: room(log, "tunnel"),
		})
	})
	g.add("agent", keeper.Run)
	log.Info("clusterd runs as an agent", "version", version(), "go", goruntime.Version(), "procs", goruntime.GOMAXPROCS(0), "gogc", gogc(), "addr", cfg.addr(), "data", cfg.Data, "id", n.id.nodeID(), "servers", len(n.servers.All()))
	return g.run(ctx)
}

// calls answers what servers ask of this node: of its agent, whether it runs as
// one, and that it look for news about the members, itself among them.
func (n *agentNode) calls(agent http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", agent)
	mux.HandleFunc("GET "+v1.Members, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.HandleFunc("POST "+v1.Members, func(w http.ResponseWriter, _ *http.Request) {
		n.servers.Poke()
		w.WriteHeader(http.StatusNoContent)
	})
	return mux
}

// client is the configuration of a client with a connection of its own to the
// API of any server.
func (n *agentNode) client() *rest.Config {
	return &rest.Config{
		Host:      "https://kubernetes",
		Transport: n.servers.Transport(),
		QPS:       -1,
		UserAgent: rest.DefaultKubernetesUserAgent(),
		ContentConfig: rest.ContentConfig{
			ContentType:        "application/vnd.kubernetes.protobuf",
			AcceptContentTypes: "application/vnd.kubernetes.protobuf,application/json",
		},
	}
}

// keepCert renews the node's certificate in time, and after it has ended, too.
func (n *agentNode) keepCert(ctx context.Context) error {
	for {
		wait := time.Minute
		if pki.NeedsRenewal(n.id.cert, time.Now()) {
			dial := func(ctx context.Context) (net.Conn, error) { return n.servers.Dial(ctx, transport.Join) }
			attempt, cancel := context.WithTimeout(ctx, 20*time.Second)
			cert, _, err := join.Renew(attempt, dial, n.cfg.Name, n.id.key)
			if err == nil && pki.NodeRole(cert) != pki.Agent {
				err = errors.New("it is a server's: this node was promoted, and becomes one first")
			}
			cancel()
			if err == nil {
				err = n.dir.writeNodeCert(cert)
			}
			switch {
			case err == nil:
				n.id.cert = cert
				n.cert.Store(n.id.tlsCertificate())
				n.log.Info("the node's certificate was renewed", "expires", cert.NotAfter)
			case ctx.Err() == nil:
				wait = 5 * time.Second
				n.log.Warn("the node's certificate could not be renewed", "expires", n.id.cert.NotAfter, "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

// askStanding asks the servers why none of them answers this node: it may have
// been removed.
func (n *agentNode) askStanding(ctx context.Context) error {
	for _, s := range n.servers.All() {
		attempt, cancel := context.WithTimeout(ctx, standingPatience)
		answer, err := join.AskStanding(attempt, func(ctx context.Context) (net.Conn, error) {
			c, err := n.tid.Dial(ctx, s.Addr, s.ID, transport.Join)
			if err != nil {
				return nil, err
			}
			return c, nil
		}, n.id.nodeID())
		cancel()
		if err == nil && answer.Removed != nil {
			return errors.Join(errRemoved(n.cfg, *answer.Removed), n.dir.markRemoved(*answer.Removed))
		}
	}
	return nil
}
