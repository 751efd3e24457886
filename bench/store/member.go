package main

import (
	"context"
	"errors"
	"io"
	"net/rpc"
	"os"
	"runtime/debug"
	"strings"
	"time"
)

// host is the store that runs in a member's process.
type host interface {
	bootstrap() error
	add(id string) error
	leads() bool  // and is ready to serve
	call() client // without a network in between
	close() error
}

// serveMember is a process with one member of ours or of etcd. It does what it is
// asked over its standard input and output, and ends with them.
func serveMember(m memberFlags) error {
	h, err := m.open()
	if err != nil {
		return err
	}
	server := rpc.NewServer()
	if err := server.Register(&Member{host: h, conns: []client{h.call()}}); err != nil {
		return errors.Join(err, h.close())
	}
	server.ServeConn(struct {
		io.Reader
		io.WriteCloser
	}{os.Stdin, os.Stdout})
	return h.close()
}

// memberFlags say which member a process is.
type memberFlags struct {
	kind   string // ours or etcd; "": the process is none
	name   string
	dir    string
	peers  string // name=address of all, separated by commas
	client string // address of its gRPC services
}

func (m *memberFlags) open() (host, error) {
	addrs := map[string]string{}
	for p := range strings.SplitSeq(m.peers, ",") {
		name, addr, _ := strings.Cut(p, "=")
		addrs[name] = addr
	}
	if m.kind == "etcd" {
		return openEtcd(m, addrs)
	}
	return openOurs(m, addrs)
}

// Member is what the benchmark asks of a member's process.
type Member struct {
	host  host
	conns []client
	got   *deliveries
}

// None stands for no argument or no result.
type None struct{}

// Bootstrap makes the member the first one of a store.
func (m *Member) Bootstrap(None, *None) error { return m.host.bootstrap() }

// Add makes id a voter.
func (m *Member) Add(id string, _ *None) error { return m.host.add(id) }

// Leads says whether the member leads and is ready to serve.
func (m *Member) Leads(_ None, leads *bool) error {
	*leads = m.host.leads()
	return nil
}

// Count waits until the member answers a linearizable read, and returns how
// many keys there are under prefix.
func (m *Member) Count(prefix string, n *int64) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	for {
		try, cancel := context.WithTimeout(ctx, time.Second)
		count, err := m.conns[0].count(try, prefix)
		cancel()
		if err == nil {
			*n = count
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

// Load runs a load in this process.
func (m *Member) Load(l Load, t *Times) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), l.For+timeout)
	defer cancel()
	*t, err = run(ctx, m.conns, l)
	return err
}

// Stamp is stamp.
func (m *Member) Stamp(s Stamps, _ *None) error {
	ctx, cancel := context.WithTimeout(context.Background(), s.For+timeout)
	defer cancel()
	return stamp(ctx, m.conns, s)
}

// Receive starts watchers; Received ends them.
func (m *Member) Receive(n [2]int, _ *None) (err error) {
	m.got, err = receive(context.Background(), m.conns, n[0], n[1])
	return err
}

// Received ends the watchers and says how long deliveries took.
func (m *Member) Received(_ None, t *Times) error {
	*t = m.got.stop()
	m.got = nil
	return nil
}

// Probe is probe.
func (m *Member) Probe(d time.Duration, got *[]Success) error {
	*got = probe(context.Background(), m.conns[0], d)
	return nil
}

// First is first.
func (m *Member) First(_ None, got *Success) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	*got, err = first(ctx, m.conns[0])
	return err
}

// Settle gives memory that is free back to the system.
func (m *Member) Settle(None, *None) error {
	debug.FreeOSMemory()
	return nil
}
