package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"google.golang.org/grpc"

	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// ourMember is a raftstore on clusterd's own port, and etcd's services over it.
type ourMember struct {
	s       *raftstore.Store
	grpc    *grpc.Server
	stop    context.CancelFunc
	stopped chan error
}

func openOurs(m *memberFlags, addrs map[string]string) (host, error) {
	id, self, err := identity(m.dir, m.name)
	if err != nil {
		return nil, err
	}
	byID := map[string]string{}
	for name, addr := range addrs {
		_, other, err := identity(m.dir, name)
		if err != nil {
			return nil, err
		}
		byID[other] = addr
	}
	at, err := netip.ParseAddrPort(addrs[m.name])
	if err != nil {
		return nil, err
	}
	logger := slog.New(slog.NewTextHandler(os.Stderr, nil))
	port, err := transport.Listen(at, id, logger)
	if err != nil {
		return nil, err
	}
	o := &ourMember{stopped: make(chan error, 1)}
	var ctx context.Context
	ctx, o.stop = context.WithCancel(context.Background())
	listener := port.Protocol(transport.Raft)
	go func() { o.stopped <- port.Run(ctx) }()
	o.s, err = raftstore.Open(raftstore.Config{
		ID: self, Dir: filepath.Join(m.dir, m.name), Listener: listener, Logger: logger,
		PeerID: func(c net.Conn) string {
			id, _ := transport.PeerOf(c)
			return id
		},
		Dial: func(ctx context.Context, want string) (net.Conn, error) {
			c, err := id.DialHost(ctx, byID[want], want, transport.Raft)
			if err != nil {
				return nil, err // and not an interface around nil
			}
			return c, nil
		},
	})
	if err != nil {
		o.stop()
		return nil, errors.Join(err, <-o.stopped)
	}
	l, err := net.Listen("tcp", m.client)
	if err != nil {
		return nil, errors.Join(err, o.close())
	}
	o.grpc = grpc.NewServer()
	register(o.grpc, o.s)
	go func() { _ = o.grpc.Serve(l) }() // ends with close
	return o, nil
}

func (o *ourMember) bootstrap() error { return o.s.Bootstrap() }

func (o *ourMember) add(id string) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return o.s.AddVoter(ctx, id)
}

func (o *ourMember) leads() bool  { return o.s.IsLeader() }
func (o *ourMember) call() client { return inProcess{o.s} }

func (o *ourMember) close() error {
	if o.grpc != nil {
		o.grpc.Stop()
	}
	err := o.s.Close()
	o.stop()
	return errors.Join(err, <-o.stopped)
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

func (c inProcess) count(ctx context.Context, prefix string) (int64, error) {
	l, err := c.s.List(ctx, prefix, raftstore.ListOptions{CountOnly: true})
	return l.Count, err
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
