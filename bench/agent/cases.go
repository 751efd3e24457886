package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
)

// subject is what the load is put on: the agent, or its peer. Calls for
// different pods may overlap.
type subject interface {
	// up makes a pod with one container of the box image and says how long it
	// took until that container ran.
	up(ctx context.Context, name string) (time.Duration, error)
	// settle waits until nothing is under way for the pod any more.
	settle(ctx context.Context, name string) error
	// hears waits until the box in the pod would hear its stop signal: the first
	// process of a container that has no handler yet is killed after the grace
	// period, which is a whole second.
	hears(ctx context.Context, name string) error
	// down ends the pod and says how long it took until nothing of it was left.
	down(ctx context.Context, name string) (time.Duration, error)
	// exec runs /bin/box true in the pod's container.
	exec(ctx context.Context, name string) (time.Duration, error)
	// cpu is the processor time of all its processes so far, dead ones included.
	cpu() (time.Duration, error)
	// pss is the proportional set size of all its processes but the apps.
	pss() (kib float64, err error)
}

// logHas waits until a container's log, found by a pattern, has the box's word
// that it listens.
func logHas(ctx context.Context, pattern string) error {
	return await(ctx, "ready in "+pattern, func() bool {
		files, _ := filepath.Glob(pattern)
		return slices.ContainsFunc(files, func(f string) bool {
			b, err := os.ReadFile(f)
			return err == nil && bytes.Contains(b, []byte(" ready\n"))
		})
	})
}

// result is what one kind of action took.
type result struct {
	took  times
	total time.Duration // of batches; 0: there were none
	cpu   time.Duration
}

func (r *result) perS() *float64 {
	if r.total == 0 {
		return nil
	}
	return num(float64(len(r.took)) / r.total.Seconds())
}

func (r *result) cpuPerPod() *float64 {
	if r.cpu == 0 || len(r.took) == 0 {
		return nil
	}
	return num(float64(r.cpu.Microseconds()) / 1000 / float64(len(r.took)))
}

// pair is the same action by us and by the peer.
type pair struct{ ours, theirs result }

func (p *pair) print(f figure) {
	f.P50, f.P99, f.Max = p.ours.took.at(0.5), p.ours.took.at(0.99), p.ours.took.at(1)
	f.PerS, f.CPUTime = p.ours.perS(), p.ours.cpuPerPod()
	if len(p.theirs.took) > 0 {
		f.Peer = peerName
		f.PeerP50, f.PeerP99 = p.theirs.took.at(0.5), p.theirs.took.at(0.99)
		f.PeerPerS, f.PeerCPU = p.theirs.perS(), p.theirs.cpuPerPod()
		f.RatioP50, f.RatioP99, f.RatioPerS = ratio(f.P50, f.PeerP50), ratio(f.P99, f.PeerP99), ratio(f.PerS, f.PeerPerS)
	}
	f.print()
}

// inTurns runs a round on us, then on the peer, as often as rounds say.
func (m *measurement) inTurns(round func(s subject, n int, theirs bool) error) error {
	for n := range m.rounds {
		if err := round(m.node, n, false); err != nil {
			return err
		}
		if m.peer == nil {
			continue
		}
		if err := round(m.peer, n, true); err != nil {
			return fmt.Errorf("%s: %w", peerName, err)
		}
	}
	return nil
}

// alone starts and deletes one pod at a time, each after a rest: the common
// case of a node, in which nothing is warm.
func (m *measurement) alone(ctx context.Context) error {
	const pods = 20
	var up, down pair
	err := m.inTurns(func(s subject, round int, theirs bool) error {
		u, d := &up.ours, &down.ours
		if theirs {
			u, d = &up.theirs, &down.theirs
		}
		for i := range pods {
			name := fmt.Sprintf("alone-%d-%d", round, i)
			took, err := s.up(ctx, name)
			if err != nil {
				return err
			}
			u.took = append(u.took, took)
			if err := s.settle(ctx, name); err != nil {
				return err
			}
			if err := s.hears(ctx, name); err != nil {
				return err
			}
			if took, err = s.down(ctx, name); err != nil {
				return err
			}
			d.took = append(d.took, took)
			if err := sleep(ctx, 100*time.Millisecond); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	up.print(figure{Case: "pod_up", Clients: 1, Pods: pods * m.rounds})
	down.print(figure{Case: "pod_down", Clients: 1, Pods: pods * m.rounds})
	return nil
}

// parallel keeps so many pods under way until a batch is up, then down.
func (m *measurement) parallel(ctx context.Context) error {
	const clients, batch = 16, 96
	var up, down pair
	err := m.inTurns(func(s subject, round int, theirs bool) error {
		u, d := &up.ours, &down.ours
		if theirs {
			u, d = &up.theirs, &down.theirs
		}
		name := func(i int) string { return fmt.Sprintf("par-%d-%d", round, i) }
		if err := u.all(ctx, s, clients, batch, name, s.up); err != nil {
			return err
		}
		for i := range batch {
			if err := s.settle(ctx, name(i)); err != nil {
				return err
			}
			if err := s.hears(ctx, name(i)); err != nil {
				return err
			}
		}
		return d.all(ctx, s, clients, batch, name, s.down)
	})
	if err != nil {
		return err
	}
	up.print(figure{Case: "pod_up", Clients: clients, Pods: batch * m.rounds})
	down.print(figure{Case: "pod_down", Clients: clients, Pods: batch * m.rounds})
	return nil
}

// all does one action for a batch of pods, clients at a time.
func (r *result) all(ctx context.Context, s subject, clients, batch int, name func(int) string, do func(context.Context, string) (time.Duration, error)) error {
	took := make(times, batch)
	before, err := s.cpu()
	if err != nil {
		return err
	}
	began := time.Now()
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(clients)
	for i := range batch {
		g.Go(func() (err error) {
			took[i], err = do(gctx, name(i))
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	r.total += time.Since(began)
	r.took = append(r.took, took...)
	after, err := s.cpu()
	r.cpu += after - before
	return err
}

// execs runs true in a container, one after another, each after a rest.
func (m *measurement) execs(ctx context.Context) error {
	var both pair
	err := m.inTurns(func(s subject, round int, theirs bool) error {
		r := &both.ours
		if theirs {
			r = &both.theirs
		}
		name := fmt.Sprintf("exec-%d", round)
		if _, err := s.up(ctx, name); err != nil {
			return err
		}
		if err := s.settle(ctx, name); err != nil {
			return err
		}
		for range 40 {
			took, err := s.exec(ctx, name)
			if err != nil {
				return err
			}
			r.took = append(r.took, took)
			if err := sleep(ctx, 50*time.Millisecond); err != nil {
				return err
			}
		}
		_, err := s.down(ctx, name)
		return err
	})
	if err != nil {
		return err
	}
	both.print(figure{Case: "exec_true", Clients: 1})
	return nil
}

// memory is what an idle pod costs outside its app: helpers and pauses by
// proportional set size, and the growth of the agent's own heap.
func (m *measurement) memory(ctx context.Context) error {
	const pods = 50
	ownBefore, err := ownRSS()
	if err != nil {
		return err
	}
	ours, err := m.growth(ctx, m.node, pods, func() error {
		own, err := ownRSS()
		if err != nil {
			return err
		}
		figure{Case: "pod_in_agent_and_api", Pods: pods, KiB: num((own - ownBefore) / pods), RSS: num(own / 1024)}.print()
		return nil
	})
	if err != nil {
		return err
	}
	f := figure{Case: "pod_outside_app", Pods: pods, KiB: num(ours)}
	if m.peer != nil {
		theirs, err := m.growth(ctx, m.peer, pods, func() error { return nil })
		if err != nil {
			return fmt.Errorf("%s: %w", peerName, err)
		}
		f.Peer, f.PeerKiB = peerName, num(theirs)
		f.RatioKiB = ratio(f.KiB, f.PeerKiB)
	}
	f.print()
	return nil
}

// growth is by how many KiB a subject's processes grow per pod.
func (m *measurement) growth(ctx context.Context, s subject, pods int, full func() error) (float64, error) {
	if _, err := s.up(ctx, "warm"); err != nil {
		return 0, err
	}
	name := func(i int) string { return fmt.Sprintf("mem-%d", i) }
	read := func() (float64, error) {
		if err := sleep(ctx, time.Second); err != nil {
			return 0, err
		}
		return s.pss()
	}
	before, err := read()
	if err != nil {
		return 0, err
	}
	var r result
	if err := r.all(ctx, s, 8, pods, name, s.up); err != nil {
		return 0, err
	}
	after, err := read()
	if err != nil {
		return 0, err
	}
	if err := full(); err != nil {
		return 0, err
	}
	if err := r.all(ctx, s, 8, pods, name, s.down); err != nil {
		return 0, err
	}
	_, err = s.down(ctx, "warm")
	return (after - before) / float64(pods), err
}

func ownRSS() (float64, error) {
	debug.FreeOSMemory()
	return procKiB("/proc/self/status", "VmRSS:")
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
