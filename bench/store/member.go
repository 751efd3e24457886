package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/rpc"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// serveMember is a process with one raftstore member. It does what it is asked
// over its standard input and output, and ends with them.
func serveMember(id, dir, peers string) error {
	addrs := map[string]string{}
	for p := range strings.SplitSeq(peers, ",") {
		name, addr, _ := strings.Cut(p, "=")
		addrs[name] = addr
	}
	l, err := net.Listen("tcp", addrs[id])
	if err != nil {
		return err
	}
	s, err := raftstore.Open(raftstore.Config{
		ID: id, Dir: filepath.Join(dir, id), Listener: l,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		Dial: func(ctx context.Context, id string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", addrs[id])
		},
	})
	if err != nil {
		return err
	}
	server := rpc.NewServer()
	if err := server.Register(&Member{store: s, conns: []client{inProcess{s}}}); err != nil {
		return errors.Join(err, s.Close())
	}
	server.ServeConn(struct {
		io.Reader
		io.WriteCloser
	}{os.Stdin, os.Stdout})
	return s.Close()
}

// Member is what the benchmark asks of a member's process.
type Member struct {
	store *raftstore.Store
	conns []client
	got   *deliveries
}

// None stands for no argument or no result.
type None struct{}

// Bootstrap makes the member the first one of a store.
func (m *Member) Bootstrap(None, *None) error { return m.store.Bootstrap() }

// Add makes id a voter.
func (m *Member) Add(id string, _ *None) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return m.store.AddVoter(ctx, id)
}

// Leader returns the ID of the leader, "" when it is not ready to serve.
func (m *Member) Leader(_ None, id *string) error {
	if *id = m.store.Leader(); *id == m.store.Status().ID && !m.store.IsLeader() {
		*id = ""
	}
	return nil
}

// Count waits until the member answers a linearizable read, and returns how
// many keys there are under prefix.
func (m *Member) Count(prefix string, n *int64) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		l, err := m.store.List(ctx, prefix, raftstore.ListOptions{CountOnly: true})
		if err == nil {
			*n = l.Count
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
	ctx, cancel := context.WithTimeout(context.Background(), l.For+patience)
	defer cancel()
	*t, err = run(ctx, m.conns, l)
	return err
}

// Stamp is stamp.
func (m *Member) Stamp(s Stamps, _ *None) error {
	ctx, cancel := context.WithTimeout(context.Background(), s.For+patience)
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

// Settle gives memory that is free back to the system.
func (m *Member) Settle(None, *None) error {
	debug.FreeOSMemory()
	return nil
}

// inProcess is a store called without a network in between.
type inProcess struct{ s *raftstore.Store }

func (c inProcess) put(ctx context.Context, key string, value []byte) error {
	_, err := c.s.Txn(ctx, mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: value}}})
	return err
}

func (c inProcess) compareAndSet(ctx context.Context, key string, rev int64, value []byte) (int64, error) {
	res, err := c.s.Txn(ctx, mvcc.Txn{
		Compares: []mvcc.Compare{{Key: key, ModRevision: rev}},
		Ops:      []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: value}},
	})
	switch {
	case err != nil:
		return 0, err
	case res.Succeeded:
		return res.Revision, nil
	case res.Current[0] != nil:
		return res.Current[0].ModRevision, nil
	}
	return 0, nil
}

func (c inProcess) get(ctx context.Context, key string) error {
	kv, _, err := c.s.Get(ctx, key, raftstore.ReadOptions{})
	if err == nil && kv == nil {
		err = fmt.Errorf("%s is not there", key)
	}
	return err
}

func (c inProcess) watch(ctx context.Context, prefix string, got func([]byte)) error {
	w, err := c.s.Watch(ctx, prefix, raftstore.WatchOptions{})
	if err != nil {
		return err
	}
	go func() {
		for b := range w.C() {
			for _, e := range b.Events {
				got(e.KV.Value)
			}
		}
	}()
	return nil
}
