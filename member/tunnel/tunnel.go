// Package tunnel lets servers call an agent over connections that the agent
// dialled: logs, exec and figures of a machine behind NAT or a firewall need no
// way in. An agent keeps one connection to every server; a call is a stream on
// it (hashicorp/yamux, of the makers of our raft and gossip).
//
//	agent                                   server
//	Keep: dial ──── TLS, ALPN tunnel ────▶ Hub: one session for each agent
//	http.Server ◀── stream ◀── session ◀── Dial
package tunnel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/transport"
)

const (
	// A session is asked whether it lives every keepAlive, and is given up when
	// an answer or a write takes longer than answerTimeout.
	keepAlive     = 10 * time.Second
	answerTimeout = 10 * time.Second
	// openTimeout is what an agent may take to accept a call.
	openTimeout = 10 * time.Second
	// refresh is how often the list of servers is looked at.
	refresh = 5 * time.Second
	// A server that cannot be reached is tried again after minPause, doubled up
	// to maxPause, and a part of that more: agents do not come together.
	minPause = time.Second
	maxPause = 30 * time.Second
)

func config() *yamux.Config {
	c := yamux.DefaultConfig()
	c.KeepAliveInterval, c.ConnectionWriteTimeout = keepAlive, answerTimeout
	c.StreamOpenTimeout, c.StreamCloseTimeout = openTimeout, time.Minute
	c.LogOutput, c.Logger = io.Discard, nil // what ends a session is returned
	return c
}

// ErrNone is returned by Dial for an agent that has no connection to this
// server.
var ErrNone = errors.New("the agent has no connection to this server")

// Hub is a server's end: the sessions of the agents that are connected to it.
// Its methods may be called concurrently.
type Hub struct {
	log   *slog.Logger
	began time.Time

	mu       sync.Mutex
	sessions map[string]*session // by the agent's id
	met      map[string]bool     // ids of agents that have been connected

	// connected is signalled (capacity 1) when an agent has connected, for Probe;
	// arrived the same for Arrivals.
	connected, arrived chan struct{}
}

type session struct {
	*yamux.Session
	conn net.Conn // below it: TLS, with the agent's certificate
	name string   // the agent's, by that
	link func() (transport.Link, error)

	// Of Probe: the agent's last sign of life, whether a ping is under way, and when
	// the next one is due (of Probe's goroutine).
	heard    atomic.Pointer[time.Time]
	pinging  atomic.Bool
	nextPing time.Time
}

// NewHub returns a Hub without sessions.
func NewHub(log *slog.Logger) *Hub {
	return &Hub{log: log, began: time.Now(), sessions: map[string]*session{}, met: map[string]bool{}, connected: make(chan struct{}, 1), arrived: make(chan struct{}, 1)}
}

// Arrivals is signalled (capacity 1, for one reader) when an agent has connected.
func (h *Hub) Arrivals() <-chan struct{} { return h.arrived }

// Agents are the names of those that are connected, by id.
func (h *Hub) Agents() map[string]string {
	h.mu.Lock()
	defer h.mu.Unlock()
	names := make(map[string]string, len(h.sessions))
	for id, s := range h.sessions {
		names[id] = s.name
	}
	return names
}

// Awaits reports whether the agent with that id may be about to connect for the
// first time: this server began not long ago, and an agent that did not find it
// tries again after up to one and a half times maxPause.
func (h *Hub) Awaits(id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return !h.met[id] && time.Since(h.began) < maxPause*3/2
}

// Run takes agents' connections from ln, the listener of transport.Tunnel, until
// ctx ends or ln is closed, and then closes all of them.
func (h *Hub) Run(ctx context.Context, ln net.Listener) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	defer stop()
	defer h.closeAll()
	for {
		conn, err := ln.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return fmt.Errorf("tunnel: %w", err)
		}
		id, name := transport.PeerOf(conn)
		mux, err := yamux.Client(conn, config())
		if err != nil {
			conn.Close()
			h.log.Warn("an agent's connection could not be used", "node", name, "err", err)
			continue
		}
		s := &session{Session: mux, conn: conn, name: name, link: func() (transport.Link, error) { return transport.LinkOf(conn) }}
		s.hear()
		h.put(id, s)
		wg.Go(func() {
			<-s.CloseChan()
			h.drop(id, s)
		})
	}
}

// put makes s the session of the agent. One that was there is of a connection
// that the agent no longer uses: it keeps one.
func (h *Hub) put(id string, s *session) {
	h.mu.Lock()
	old := h.sessions[id]
	h.sessions[id] = s
	h.met[id] = true
	h.mu.Unlock()
	for _, ch := range []chan struct{}{h.connected, h.arrived} {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
	if old != nil {
		old.Close()
	}
}

func (h *Hub) drop(id string, s *session) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.sessions[id] == s {
		delete(h.sessions, id)
	}
}

func (h *Hub) closeAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.sessions {
		s.Close()
	}
}

// Dial opens a connection to the node calls of the agent with that id;
// transport.PeerOf tells its peer. It returns ErrNone if the agent has no
// connection to this server.
func (h *Hub) Dial(ctx context.Context, id string) (net.Conn, error) {
	h.mu.Lock()
	s := h.sessions[id]
	h.mu.Unlock()
	if s == nil || s.IsClosed() {
		return nil, ErrNone
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	stream, err := s.OpenStream()
	if err != nil {
		return nil, fmt.Errorf("call an agent over its own connection: %w", err)
	}
	return transport.Over(stream, s.conn), nil
}

// Config is what an agent's end needs.
type Config struct {
	// Servers are those to be connected to, as known at the moment.
	Servers func() []join.ServerAddr
	// Dial connects to a server by the protocol transport.Tunnel.
	Dial func(context.Context, join.ServerAddr) (net.Conn, error)
	// Serve answers the calls of one server until ctx ends or the listener is
	// closed.
	Serve  func(context.Context, net.Listener) error
	Logger *slog.Logger
}

// Keep keeps a connection to each server until ctx ends.
func Keep(ctx context.Context, cfg Config) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	kept := map[join.ServerAddr]context.CancelFunc{}
	defer func() {
		for _, stop := range kept {
			stop()
		}
	}()
	tick := time.NewTicker(refresh)
	defer tick.Stop()
	for {
		wanted := map[join.ServerAddr]bool{}
		for _, s := range cfg.Servers() {
			wanted[s] = true
			if kept[s] != nil {
				continue
			}
			one, stop := context.WithCancel(ctx)
			kept[s] = stop
			wg.Go(func() { cfg.keepOne(one, s) })
		}
		for s, stop := range kept {
			if !wanted[s] {
				stop()
				delete(kept, s)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (cfg *Config) keepOne(ctx context.Context, to join.ServerAddr) {
	pause := minPause
	for ctx.Err() == nil {
		began := time.Now()
		err := cfg.serveOne(ctx, to)
		if ctx.Err() != nil {
			return
		}
		cfg.Logger.Debug("the connection for a server's calls ended", "server", to.Name, "addr", to.Addr, "err", err)
		if time.Since(began) > maxPause {
			pause = minPause
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause + rand.N(pause/2)):
		}
		pause = min(2*pause, maxPause)
	}
}

// serveOne answers a server's calls over one connection until that ends.
func (cfg *Config) serveOne(ctx context.Context, to join.ServerAddr) error {
	conn, err := cfg.Dial(ctx, to)
	if err != nil {
		return err
	}
	mux, err := yamux.Server(conn, config())
	if err != nil {
		conn.Close()
		return err
	}
	defer mux.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // the listener's end is the session's
		select {
		case <-mux.CloseChan():
		case <-ctx.Done():
		}
		cancel()
	}()
	return cfg.Serve(ctx, listener{mux, conn})
}

// listener gives a session's streams as connections of which transport.PeerOf
// knows the peer.
type listener struct {
	*yamux.Session
	conn net.Conn
}

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Session.Accept()
	if err != nil {
		return nil, err
	}
	return transport.Over(c, l.conn), nil
}
