package tunnel

import (
	"context"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/silence"
	"github.com/clusterd/clusterd/member/transport"
)

// valve holds back what arrives on connections while it is shut.
type valve struct {
	mu   sync.Mutex
	open chan struct{} // closed: open
}

func newValve() *valve {
	v := &valve{open: make(chan struct{})}
	close(v.open)
	return v
}

func (v *valve) set(open bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if open {
		close(v.open)
	} else {
		v.open = make(chan struct{})
	}
}

type valvedConn struct {
	net.Conn
	v *valve
}

func (c valvedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.v.mu.Lock()
	open := c.v.open
	c.v.mu.Unlock()
	<-open
	return n, err
}

// probedAgent is an agent with a valve before its end of the tunnel to one server.
func probedAgent(t *testing.T) (hub *Hub, id string, v *valve, end func()) {
	t.Helper()
	ca, err := pki.NewCA("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	n1, a1 := newMember(t, ca, "n1", pki.Server), newMember(t, ca, "a1", pki.Agent)
	p, hub, _ := server(t, n1, "127.0.0.1:0")
	v = newValve()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	end = sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(end)
	go func() {
		defer close(done)
		_ = Keep(ctx, Config{
			Servers: func() []join.ServerAddr { return []join.ServerAddr{{ID: n1.id, Name: "n1", Addr: p.Addr()}} },
			Logger:  quiet,
			Dial: func(ctx context.Context, s join.ServerAddr) (net.Conn, error) {
				c, err := a1.Dial(ctx, s.Addr, s.ID, transport.Tunnel)
				if err != nil {
					return nil, err
				}
				return valvedConn{c, v}, nil
			},
			Serve: func(ctx context.Context, ln net.Listener) error {
				srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.NotFoundHandler()}
				stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
				defer stop()
				return srv.Serve(ln)
			},
		})
	}()
	ask(t, hub, a1.id)
	return hub, a1.id, v, end
}

// named waits for a suspicion.
func named(t *testing.T, suspects <-chan string) {
	t.Helper()
	select {
	case name := <-suspects:
		if name != "a1" {
			t.Errorf("%q is suspected", name)
		}
	case <-time.After(time.Minute):
		t.Fatal("the agent is not suspected")
	}
}

// heardAfter waits until the agent has given a sign of life after at.
func heardAfter(t *testing.T, hub *Hub, id string, at time.Time) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		hub.mu.Lock()
		s := hub.sessions[id]
		hub.mu.Unlock()
		if s != nil && s.heard.Load().After(at) {
			return
		}
	}
	t.Fatal("the agent gave no sign of life")
}

// TestProbe: an agent whose link is silent is suspected, again when that happens
// again, and one that has gone is.
func TestProbe(t *testing.T) {
	hub, id, v, end := probedAgent(t)
	ctx, cancel := context.WithCancel(t.Context())
	suspects, done := make(chan string), make(chan struct{})
	go func() { defer close(done); hub.Probe(ctx, suspects) }()
	defer func() { cancel(); <-done }()

	heardAfter(t, hub, id, time.Now()) // it answers pings
	for range 2 {
		v.set(false)
		named(t, suspects)
		at := time.Now()
		v.set(true)
		heardAfter(t, hub, id, at)
	}
	end()
	named(t, suspects)
}

// TestProbeWaitsForAgents: one that connects when Probe had none to ping is pinged, and
// suspected when it is silent.
func TestProbeWaitsForAgents(t *testing.T) {
	hub, id, v, _ := probedAgent(t)
	hub.mu.Lock()
	s := hub.sessions[id]
	delete(hub.sessions, id)
	hub.mu.Unlock()
	<-hub.connected
	ctx, cancel := context.WithCancel(t.Context())
	suspects, done := make(chan string), make(chan struct{})
	go func() { defer close(done); hub.Probe(ctx, suspects) }()
	defer func() { cancel(); <-done }()

	before := s.heard.Load()
	hub.put(id, s)
	heardAfter(t, hub, id, *before)
	v.set(false)
	defer v.set(true)
	named(t, suspects)
}

// TestAwaits: an agent that has been connected is no longer awaited.
func TestAwaits(t *testing.T) {
	hub, id, _, end := probedAgent(t)
	hub.began = time.Now() // the agent may have taken its time
	if hub.Awaits(id) || !hub.Awaits("another") {
		t.Error("an agent that is there is awaited, or one that is not is not")
	}
	end()
	if hub.Awaits(id) {
		t.Error("one that has gone is awaited")
	}
	hub.began = hub.began.Add(-time.Hour)
	if hub.Awaits("another") {
		t.Error("one is awaited an hour after the start")
	}
}

// TestProbeOnce looks at one connection at chosen times.
func TestProbeOnce(t *testing.T) {
	hub, id, v, end := probedAgent(t)
	known := &probe{sessions: map[string]*session{}}
	begin := time.Now()
	if silent := hub.probeOnce(known, begin); len(silent) > 0 {
		t.Errorf("suspected at once: %q", silent)
	}
	heardAfter(t, hub, id, begin)
	if silent := hub.probeOnce(known, begin.Add(silence.After)); len(silent) > 0 {
		t.Errorf("suspected although it answered: %q", silent)
	}
	v.set(false)
	defer v.set(true)
	late := time.Now().Add(time.Minute) // later than any answer that was under way
	if silent := hub.probeOnce(known, late); len(silent) != 1 || silent[0] != "a1" {
		t.Errorf("silent for a minute: %q", silent)
	}
	if silent := hub.probeOnce(known, late.Add(silence.Again)); len(silent) > 0 {
		t.Errorf("named again at once: %q", silent)
	}
	if silent := hub.probeOnce(known, late.Add(silence.Again+time.Millisecond)); len(silent) != 1 {
		t.Errorf("silent for longer: %q", silent)
	}
	v.set(true)
	end()
	v.set(false) // for the deferred call
	hub.probeOnce(known, late.Add(time.Hour))
	if len(known.sessions) > 0 {
		t.Errorf("%d are remembered", len(known.sessions))
	}
}

// TestSign: a machine that acknowledges stands for its agent for a while, and no
// longer.
func TestSign(t *testing.T) {
	ours, theirs := net.Pipe()
	defer theirs.Close()
	mux, err := yamux.Client(ours, config())
	if err != nil {
		t.Fatal(err)
	}
	defer mux.Close()
	heard := time.Now()
	var link transport.Link
	var broken error
	s := &session{Session: mux, link: func() (transport.Link, error) { return link, broken }}
	s.heard.Store(&heard)
	acked := transport.Link{Acked: 100 * time.Millisecond}
	for _, tt := range []struct {
		name  string
		after time.Duration // since it was heard
		link  transport.Link
		err   error
		want  time.Duration
	}{
		{"just heard", time.Second, acked, nil, 0},
		{"its machine acknowledges", 2 * time.Second, acked, nil, 2 * time.Second},
		{"it acknowledges for long", time.Minute, acked, nil, slowFor},
		{"it acknowledges nothing", 2 * time.Second, transport.Link{Acked: 1900 * time.Millisecond, Unacked: true}, nil, 0},
		{"nothing was sent since", 2 * time.Second, transport.Link{Acked: 2 * time.Second}, nil, 0},
		{"the kernel does not say", 2 * time.Second, acked, net.ErrClosed, 0},
	} {
		link, broken = tt.link, tt.err
		if got := s.sign(heard.Add(tt.after)).Sub(heard); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
	mux.Close()
	link, broken = acked, nil
	if got := s.sign(heard.Add(2 * time.Second)); !got.Equal(heard) {
		t.Error("an agent whose connection has ended has a sign of life")
	}
}
