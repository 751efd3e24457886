package main

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
)

// alone starts and deletes one pod at a time, each after a rest: the common
// case of a node, in which nothing is warm.
func (n *node) alone(ctx context.Context, pods int) error {
	var up, down []time.Duration
	for i := range pods {
		name := fmt.Sprintf("alone-%d", i)
		took, err := n.up(ctx, name)
		if err != nil {
			return err
		}
		up = append(up, took)
		if err := n.settle(ctx, name); err != nil {
			return err
		}
		if took, err = n.down(ctx, name); err != nil {
			return err
		}
		down = append(down, took)
		if err := sleep(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
	f := figure{Case: "pod_up", Clients: 1, Pods: pods}
	f.setTimes(up)
	f.print()
	f = figure{Case: "pod_down", Clients: 1, Pods: pods}
	f.setTimes(down)
	f.print()
	return nil
}

// parallel keeps so many pods under way until a batch is up, then down.
func (n *node) parallel(ctx context.Context, clients, batch, rounds int) error {
	var ups, downs []time.Duration
	var up, down time.Duration
	for round := range rounds {
		each := func(times *[]time.Duration, do func(context.Context, string) (time.Duration, error)) (time.Duration, error) {
			took := make([]time.Duration, batch)
			began := time.Now()
			g, ctx := errgroup.WithContext(ctx)
			g.SetLimit(clients)
			for i := range batch {
				g.Go(func() (err error) {
					took[i], err = do(ctx, fmt.Sprintf("par-%d-%d", round, i))
					return err
				})
			}
			err := g.Wait()
			*times = append(*times, took...)
			return time.Since(began), err
		}
		d, err := each(&ups, n.up)
		if err != nil {
			return err
		}
		up += d
		for i := range batch {
			if err := n.settle(ctx, fmt.Sprintf("par-%d-%d", round, i)); err != nil {
				return err
			}
		}
		if d, err = each(&downs, n.down); err != nil {
			return err
		}
		down += d
	}
	print := func(name string, times []time.Duration, total time.Duration) {
		f := figure{Case: name, Clients: clients, Pods: batch * rounds}
		f.setTimes(times)
		perS := float64(batch*rounds) / total.Seconds()
		f.PerS = &perS
		f.print()
	}
	print("pod_up", ups, up)
	print("pod_down", downs, down)
	return nil
}

// execs runs true in a container, one after another, each after a rest.
func (n *node) execs(ctx context.Context, count int) error {
	if _, err := n.up(ctx, "exec"); err != nil {
		return err
	}
	id := n.times.of("exec").container
	var times []time.Duration
	for range count {
		began := time.Now()
		code, err := n.runtime.Exec(ctx, api.Exec{ContainerID: id, Args: []string{"/bin/box", "true"}}, runtime.ExecIO{})
		if err != nil || code != 0 {
			return fmt.Errorf("exit code %d, %w", code, err)
		}
		times = append(times, time.Since(began))
		if err := sleep(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
	f := figure{Case: "exec_true", Clients: 1}
	f.setTimes(times)
	f.print()
	_, err := n.down(ctx, "exec")
	return err
}

// memory is what an idle pod costs outside its app: podmon and the pause by
// proportional set size, and the growth of the agent's own heap.
func (n *node) memory(ctx context.Context, pods int) error {
	if _, err := n.up(ctx, "warm"); err != nil {
		return err
	}
	read := func() (helpers, own float64, err error) {
		if err := sleep(ctx, time.Second); err != nil {
			return 0, 0, err
		}
		if helpers, err = n.helpersPSS(); err != nil {
			return 0, 0, err
		}
		debug.FreeOSMemory()
		own, err = procKiB("/proc/self/status", "VmRSS:")
		return helpers, own, err
	}
	before, ownBefore, err := read()
	if err != nil {
		return err
	}
	for i := range pods {
		if _, err := n.up(ctx, fmt.Sprintf("mem-%d", i)); err != nil {
			return err
		}
	}
	after, ownAfter, err := read()
	if err != nil {
		return err
	}
	kib := (after - before) / float64(pods)
	figure{Case: "pod_outside_app", Pods: pods, KiB: &kib}.print()
	own, mib := (ownAfter-ownBefore)/float64(pods), ownAfter/1024
	figure{Case: "pod_in_agent_and_api", Pods: pods, KiB: &own, RSS: &mib}.print()
	for i := range pods {
		if _, err := n.down(ctx, fmt.Sprintf("mem-%d", i)); err != nil {
			return err
		}
	}
	_, err = n.down(ctx, "warm")
	return err
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
