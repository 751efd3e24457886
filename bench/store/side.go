package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/rpc"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// via is how clients reach a member.
type via int

const (
	inside   via = iota // Go calls in the member's process
	overGRPC            // clientv3 in this process, and etcd's gRPC services
)

// side is one of the two stores that are measured: three members in processes of
// their own, which is also where clients are that call them inside.
type side struct {
	procs
	kind string // ours or etcd
	// machines are where its members run; nil: on this one.
	machines *machines
	dir      string
	ids      [nodes]string
	peer     []string // addresses
	client   []string
	calls    [nodes]*rpc.Client
	conns    [nodes][]client
	clients  []*clientv3.Client
	got      *deliveries // over gRPC
}

// grpcConns is over how many connections the clients of one member go.
const grpcConns = 8

// newSide makes a side that is yet to be started. apart: its members are on
// machines of their own, and their gRPC services are not called.
func newSide(kind, dir string, apart bool) (*side, error) {
	s := &side{kind: kind, dir: filepath.Join(dir, kind)}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, err
	}
	addrs := []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	if apart {
		m, err := newMachines("bench-" + kind)
		if err != nil {
			return nil, err
		}
		s.machines = &m
		for i := range nodes {
			addrs = append(addrs, netip.MustParseAddr(machineAddr(i)))
			s.peer = append(s.peer, machineAddr(i)+":7080")
			s.client = append(s.client, "127.0.0.1:7079")
		}
	}
	var err error
	if s.ids, err = makeIdentities(s.dir, addrs); err != nil || apart {
		return s, err
	}
	free, err := freeAddrs(2 * nodes)
	if err != nil {
		return s, err
	}
	s.peer, s.client = free[:nodes], free[nodes:]
	for i := range nodes {
		for range grpcConns {
			c, err := dialServices(s.client[i])
			if err != nil {
				return s, err
			}
			s.clients = append(s.clients, c)
			s.conns[i] = append(s.conns[i], etcdClient{c})
		}
	}
	return s, nil
}

func memberName(i int) string { return fmt.Sprint("n", i) }

// start starts all members, makes them a store the first time, and returns when
// one leads.
func (s *side) start(ctx context.Context) error {
	_, err := os.Stat(filepath.Join(s.dir, memberName(0)))
	fresh := errors.Is(err, os.ErrNotExist)
	for i := range nodes {
		if err := s.startMember(i); err != nil {
			return err
		}
	}
	for i := 0; fresh && i < nodes; i++ {
		var err error
		if i == 0 {
			err = s.call(ctx, 0, "Bootstrap", None{}, &None{})
		} else {
			err = s.call(ctx, 0, "Add", s.ids[i], &None{})
		}
		if err != nil {
			return err
		}
	}
	_, err = s.leader(ctx)
	return err
}

func (s *side) startMember(i int) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var peers []string
	for j, a := range s.peer {
		peers = append(peers, memberName(j)+"="+a)
	}
	args := []string{self, "-member", s.kind, "-name", memberName(i), "-dir", s.dir, "-peers", strings.Join(peers, ","), "-client", s.client[i]}
	if s.machines != nil {
		args = append([]string{"ip", "netns", "exec", s.machines.name(i)}, args...)
	}
	cmd := exec.Command(args[0], args[1:]...)
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := s.procs.start(i, cmd, filepath.Join(s.dir, memberName(i)+".log")); err != nil {
		return err
	}
	s.calls[i] = rpc.NewClient(struct {
		io.Reader
		io.WriteCloser
	}{out, in})
	return nil
}

// call asks member i's process.
func (s *side) call(ctx context.Context, i int, what string, arg, result any) error {
	call := s.calls[i].Go("Member."+what, arg, result, make(chan *rpc.Call, 1))
	select {
	case <-call.Done:
		if call.Error != nil {
			return fmt.Errorf("%s on %s of %s: %w", what, memberName(i), s.kind, call.Error)
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// leader returns the member that leads.
func (s *side) leader(ctx context.Context) (int, error) {
	return waitLeader(ctx, func() int {
		for i := range nodes {
			try, cancel := context.WithTimeout(ctx, time.Second)
			leads := false
			err := s.call(try, i, "Leads", None{}, &leads)
			cancel()
			if err == nil && leads {
				return i
			}
		}
		return -1
	})
}

func (s *side) load(ctx context.Context, i int, v via, l Load) (t Times, err error) {
	if v == overGRPC {
		return run(ctx, s.conns[i], l)
	}
	return t, s.call(ctx, i, "Load", l, &t)
}

func (s *side) stamp(ctx context.Context, i int, v via, st Stamps) error {
	if v == overGRPC {
		return stamp(ctx, s.conns[i], st)
	}
	return s.call(ctx, i, "Stamp", st, &None{})
}

func (s *side) receive(ctx context.Context, i int, v via, watchers, prefixes int) (err error) {
	if v == overGRPC {
		s.got, err = receive(ctx, s.conns[i], watchers, prefixes)
		return err
	}
	return s.call(ctx, i, "Receive", [2]int{watchers, prefixes}, &None{})
}

func (s *side) received(i int, v via) (t Times, err error) {
	if v == overGRPC {
		return s.got.stop(), nil
	}
	return t, s.call(context.Background(), i, "Received", None{}, &t)
}

func (s *side) probe(ctx context.Context, i int, d time.Duration) (got []Success, err error) {
	return got, s.call(ctx, i, "Probe", d, &got)
}

func (s *side) count(ctx context.Context, i int, prefix string) (n int64, err error) {
	return n, s.call(ctx, i, "Count", prefix, &n)
}

func (s *side) close() {
	for _, c := range s.clients {
		_ = c.Close()
	}
	s.procs.stop(os.Interrupt)
	if s.machines != nil {
		s.machines.remove()
	}
}

func closeAll(sides []*side) {
	for _, s := range sides {
		s.close()
	}
}
