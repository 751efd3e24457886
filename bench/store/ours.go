package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/rpc"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// ours is three raftstore members, each in a process of its own, which is
// also where its clients are.
type ours struct {
	procs
	dir   string
	addrs []string
	calls [nodes]*rpc.Client
}

func newOurs(dir string) (*ours, error) {
	addrs, err := freeAddrs(nodes)
	return &ours{dir: dir, addrs: addrs}, err
}

func (o *ours) name() string { return "ours" }

func memberID(i int) string { return fmt.Sprint("n", i) }

// start starts the members, and makes them a store the first time.
func (o *ours) start(ctx context.Context) error {
	_, err := os.Stat(filepath.Join(o.dir, memberID(0)))
	fresh := errors.Is(err, os.ErrNotExist)
	for i := range nodes {
		if err := o.startMember(i); err != nil {
			return err
		}
	}
	for i := 0; fresh && i < nodes; i++ {
		var err error
		if i == 0 {
			err = o.call(ctx, 0, "Bootstrap", None{}, &None{})
		} else {
			err = o.call(ctx, 0, "Add", memberID(i), &None{})
		}
		if err != nil {
			return err
		}
	}
	_, err = o.leader(ctx)
	return err
}

func (o *ours) startMember(i int) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var peers []string
	for j, a := range o.addrs {
		peers = append(peers, memberID(j)+"="+a)
	}
	cmd := exec.Command(self, "-member", memberID(i), "-dir", o.dir, "-peers", strings.Join(peers, ","))
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := o.procs.start(i, cmd, filepath.Join(o.dir, memberID(i)+".log")); err != nil {
		return err
	}
	o.calls[i] = rpc.NewClient(struct {
		io.Reader
		io.WriteCloser
	}{out, in})
	return nil
}

// call asks member i's process.
func (o *ours) call(ctx context.Context, i int, what string, arg, result any) error {
	call := o.calls[i].Go("Member."+what, arg, result, make(chan *rpc.Call, 1))
	select {
	case <-call.Done:
		if call.Error != nil {
			return fmt.Errorf("%s on %s: %w", what, memberID(i), call.Error)
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (o *ours) leader(ctx context.Context) (int, error) {
	return waitLeader(ctx, func() int {
		for i := range nodes {
			var id string
			if o.call(ctx, i, "Leader", None{}, &id) == nil && id == memberID(i) {
				return i
			}
		}
		return -1
	})
}

func (o *ours) load(ctx context.Context, i int, l Load) (t Times, err error) {
	return t, o.call(ctx, i, "Load", l, &t)
}

func (o *ours) stamp(ctx context.Context, i int, s Stamps) error {
	return o.call(ctx, i, "Stamp", s, &None{})
}

func (o *ours) receive(ctx context.Context, i, watchers, prefixes int) error {
	return o.call(ctx, i, "Receive", [2]int{watchers, prefixes}, &None{})
}

func (o *ours) received(i int) (t Times, err error) {
	err = o.call(context.Background(), i, "Received", None{}, &t)
	return t, err
}

func (o *ours) probe(ctx context.Context, i int, d time.Duration) (got []Success, err error) {
	err = o.call(ctx, i, "Probe", d, &got)
	return got, err
}

func (o *ours) count(ctx context.Context, i int, prefix string) (n int64, err error) {
	err = o.call(ctx, i, "Count", prefix, &n)
	return n, err
}

func (o *ours) close() { o.procs.stop(os.Interrupt) }
