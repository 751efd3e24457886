package main

import (
	"context"
	"crypto"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/agent"
	"github.com/clusterd/clusterd/agent/agenttest"
	"github.com/clusterd/clusterd/agent/dns"
	"github.com/clusterd/clusterd/agent/netpol"
	"github.com/clusterd/clusterd/agent/pressure"
	"github.com/clusterd/clusterd/agent/service"
	"github.com/clusterd/clusterd/agent/watches"
	"github.com/clusterd/clusterd/apis/server/admission/noderestriction"
	"github.com/clusterd/clusterd/apis/server/rbac"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/servers"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/member/tunnel"
)

// hollow is an agent without a machine: it joins, finds servers, keeps tunnels
// to all of them and runs the agent's own code as clusterd does (cmd/clusterd's
// agentNode and newNodeAgent, which are of package main), over a runtime, images,
// mounts and a network in memory.
type hollow struct {
	name string
	addr netip.AddrPort
	key  crypto.Signer

	id      transport.Identity
	servers *servers.List
	contact *contact
	handler http.Handler
	parts   []func(context.Context) error
}

// settings are the same for all hollow agents.
type settings struct {
	token    pki.Token
	dir      string // of all; each has a directory there
	servers  []netip.AddrPort
	pods     netip.Prefix // the range of all pods
	services netip.Prefix
	requests *requests
	log      *slog.Logger
}

// newHollow joins the machine of that number, and puts its parts together.
func newHollow(ctx context.Context, s *settings, number int) (*hollow, error) {
	h := &hollow{name: nameOf(number), addr: netip.AddrPortFrom(addrOf(number), serverPort), contact: newContact(s.requests)}
	var err error
	if h.key, err = pki.NewKey(); err != nil {
		return nil, err
	}
	known, err := h.join(ctx, s, s.servers[number%len(s.servers)])
	if err != nil {
		return nil, fmt.Errorf("join %s: %w", h.name, err)
	}
	h.servers, err = servers.New(servers.Config{
		Identity: h.id, ID: pki.Fingerprint(h.key.Public()), Self: h.addr, Known: known, Save: func([]byte) error { return nil },
		Warn: func(msg string, err error) { s.log.Warn(msg, "node", h.name, "err", err) },
	})
	if err != nil {
		return nil, err
	}
	if err := h.build(s, number); err != nil {
		return nil, fmt.Errorf("agent %s: %w", h.name, err)
	}
	return h, nil
}

// joinTimeout is what an agent may take to join, with all tries.
const joinTimeout = 3 * time.Minute

// join makes the machine a member and returns the list of servers.
func (h *hollow) join(ctx context.Context, s *settings, server netip.AddrPort) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	var answer *join.Response
	for {
		var err error
		answer, err = join.Join(ctx, join.Options{Server: server.String(), Token: s.token, Name: h.name, Addr: h.addr, Key: h.key, Version: "hollow"})
		if err == nil {
			break
		}
		var no *join.Refusal
		if ctx.Err() != nil || isRefusal(err, &no) {
			return nil, err
		}
		s.log.Warn("a hollow agent could not join yet", "node", h.name, "err", err)
		if ended := sleep(ctx, 500*time.Millisecond); ended != nil {
			return nil, errors.Join(err, ended)
		}
	}
	trust, err := answer.Trusts()
	if err != nil {
		return nil, err
	}
	cert, err := pki.ParseCert(answer.NodeCert)
	if err != nil {
		return nil, err
	}
	shown := &tls.Certificate{Certificate: [][]byte{cert.Raw, trust.For(pki.ForNodes).Signer().Cert.Raw}, PrivateKey: h.key, Leaf: cert}
	h.id = transport.Identity{Certificate: func() *tls.Certificate { return shown }, Roots: trust.Roots, Sessions: transport.NewSessions()}
	return servers.Encode(answer.Servers)
}

// client is a client of the API by that way.
func (h *hollow) client(way http.RoundTripper, user string) (kubernetes.Interface, error) {
	config := &rest.Config{
		Host: "https://kubernetes", Transport: way, QPS: -1, UserAgent: rest.DefaultKubernetesUserAgent(),
		ContentConfig: rest.ContentConfig{
			ContentType:        "application/vnd.kubernetes.protobuf",
			AcceptContentTypes: "application/vnd.kubernetes.protobuf,application/json",
		},
		Impersonate: rest.ImpersonationConfig{UserName: user},
	}
	return kubernetes.NewForConfig(config)
}

func (h *hollow) build(s *settings, number int) error {
	// Heartbeats have a connection of their own.
	way, own := h.contact.over(h.servers.Transport()), h.contact.over(h.servers.Transport())
	client, err := h.client(way, "")
	if err != nil {
		return err
	}
	heartbeat, err := h.client(own, "")
	if err != nil {
		return err
	}
	events, err := h.client(way, "")
	if err != nil {
		return err
	}
	reader, err := h.client(way, rbac.NodeNetwork)
	if err != nil {
		return err
	}
	policies, err := netpol.New(netpol.Config{NodeName: h.name, Client: reader, Enforcer: noRules{}, Logger: s.log})
	if err != nil {
		return err
	}
	seen, err := watches.New(client)
	if err != nil {
		return err
	}
	proxy, err := service.New(service.Config{
		NodeName: h.name, Services: seen.Services, Slices: seen.Slices, Nodes: seen.Nodes, Balancer: noBalancer{}, Flows: noBalancer{},
		PodCIDRs: []netip.Prefix{s.pods}, ServiceCIDRs: []netip.Prefix{s.services}, Logger: s.log,
	})
	if err != nil {
		return err
	}
	dir := filepath.Join(s.dir, h.name)
	a, err := agent.New(agent.Config{
		NodeName: h.name, NodeIPs: []netip.Addr{h.addr.Addr()}, DataDir: dir, CgroupRoot: "/clusterd-hollow/" + h.name,
		Client: client, HeartbeatClient: heartbeat, EventClient: events,
		Runtime: agenttest.NewRuntime(), Images: &images{agenttest.Images{Dir: filepath.Join(dir, "images")}}, Mounter: &agenttest.Mounter{},
		Network: &network{agenttest.Network{First: podAddr(number)}, policies}, Watches: seen,
		Version: "v1.37.0", Eviction: []pressure.Threshold{}, ImageGC: agent.ImageGC{High: 100, Low: 99},
		ClusterDNS: []netip.Addr{dnsAddr(number)},
		DNS:        &dns.Config{Addrs: []netip.Addr{dnsAddr(number)}, Ranges: func() []netip.Prefix { return []netip.Prefix{s.pods, s.services} }, Settings: reader},
		NodePort:   int32(h.addr.Port()), NodeLabels: map[string]string{noderestriction.AgentLabel: ""},
	})
	if err != nil {
		return err
	}
	h.handler = a.Handler()
	h.parts = []func(context.Context) error{
		a.Run, seen.Run, policies.Run, proxy.Run, h.keepTunnels(s.log),
		func(ctx context.Context) error {
			return h.servers.Run(ctx, func(context.Context) error { return nil })
		},
	}
	return nil
}

func (h *hollow) keepTunnels(log *slog.Logger) func(context.Context) error {
	return func(ctx context.Context) error {
		return tunnel.Keep(ctx, tunnel.Config{
			Servers: h.servers.All,
			Dial: func(ctx context.Context, s join.ServerAddr) (net.Conn, error) {
				c, err := h.id.Dial(ctx, s.Addr, s.ID, transport.Tunnel)
				if err != nil {
					return nil, err
				}
				return c, nil
			},
			Serve: func(ctx context.Context, ln net.Listener) error {
				srv := &http.Server{Handler: h.handler, ConnContext: transport.WithPeer, ReadHeaderTimeout: 30 * time.Second, IdleTimeout: 3 * time.Minute}
				stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
				defer stop()
				return srv.Serve(transport.Calls(ln))
			},
			Logger: log,
		})
	}
}

// run runs the agent until ctx ends.
func (h *hollow) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, part := range h.parts {
		g.Go(func() error {
			err := part(ctx)
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("a part of %s ended: %w", h.name, err)
		})
	}
	return g.Wait()
}

// fleet are all hollow agents.
type fleet struct {
	mu     sync.Mutex
	agents []*hollow
	run    *errgroup.Group
}

// startFleet joins and starts so many, at most atOnce of them joining at one time.
func startFleet(ctx context.Context, s *settings, from, to, atOnce int) (*fleet, error) {
	f := &fleet{}
	f.run, ctx = errgroup.WithContext(ctx)
	var joining errgroup.Group
	joining.SetLimit(atOnce)
	for i := from; i < to; i++ {
		joining.Go(func() error {
			h, err := newHollow(ctx, s, i)
			if err != nil {
				return err
			}
			f.mu.Lock()
			f.agents = append(f.agents, h)
			f.mu.Unlock()
			f.run.Go(func() error { return h.run(ctx) })
			return nil
		})
	}
	return f, joining.Wait()
}
