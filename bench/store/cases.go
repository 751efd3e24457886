package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"
)

// speed is what clients see while nothing goes wrong.
func (b *bench) speed(ctx context.Context, sides []*side) error {
	var leaders []int
	for _, s := range sides {
		l, err := s.leader(ctx)
		if err != nil {
			return err
		}
		// What is read has to be there, for as many clients as there are.
		if _, err := s.load(ctx, l, inside, Load{Op: "put", Clients: 512, Size: valueSize, For: time.Second}); err != nil {
			return err
		}
		leaders = append(leaders, l)
	}
	at := func(side int, via string) int {
		if via == "leader" {
			return leaders[side]
		}
		return (leaders[side] + 1) % nodes
	}
	for _, c := range comparisons {
		if err := b.compare(ctx, sides, at, c); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// comparison is one way to put the two beside each other, see the top of main.go.
type comparison struct {
	name  string
	vias  [2]via // of ours, and of the peer
	note  string
	least map[string]float64 // ratios of operations a second that are goals
	more  func(b *bench, name string, f figure)
}

var comparisons = []comparison{
	{
		"in-process", [2]via{inside, inside}, "Go calls in the member's process, the peer's by its v3client",
		map[string]float64{"put-leader 1": 1.5, "put-leader 128": 3.5, "put-leader 512": 4, "get-leader 128": 5, "get-follower 128": 5}, nil,
	},
	{
		"grpc", [2]via{overGRPC, overGRPC}, "clientv3 in another process, etcd's gRPC services on both sides",
		map[string]float64{"put-leader 1": 1.2, "put-leader 128": 2, "put-leader 512": 2}, nil,
	},
	{
		"api-server", [2]via{inside, overGRPC}, "as an API server sees it: ours in its process, the peer through clientv3",
		map[string]float64{"put-leader 128": 3, "put-leader 512": 4, "cas-leader 128": 3, "cas-leader 512": 4, "get-leader 128": 10},
		func(b *bench, name string, f figure) {
			switch name {
			case "put-leader 1", "cas-leader 1":
				b.atMost("api-server/"+name+" clients: p50 ≤ 0.8× etcd's", 0.8, f.RatioP50)
			case "put-leader 128", "cas-leader 128":
				b.atMost("api-server/"+name+" clients: p99 ≤ 0.5× etcd's", 0.5, f.RatioP99)
			}
		},
	},
}

// compare measures the speed of both in one way.
func (b *bench) compare(ctx context.Context, sides []*side, at func(side int, via string) int, cmp comparison) error {
	for _, c := range []struct {
		op      string
		clients []int
		via     string
	}{
		{"put", []int{1, 128, 512}, "leader"},
		{"put", []int{1, 128, 512}, "follower"},
		{"cas", []int{1, 128, 512}, "leader"},
		{"get", []int{1, 128}, "leader"},
		{"get", []int{1, 128}, "follower"},
	} {
		short := c.op + "-" + c.via
		name := cmp.name + "/" + short
		if !b.wants(name) {
			continue
		}
		for _, clients := range c.clients {
			rounds, err := b.alternate(sides, func(i int) (sample, error) {
				l := Load{Op: c.op, Clients: clients, Size: valueSize, For: b.dur}
				before, err := usageOf(sides[i].pids())
				if err != nil {
					return sample{}, err
				}
				t, err := sides[i].load(ctx, at(i, c.via), cmp.vias[i], l)
				if err != nil {
					return sample{}, fmt.Errorf("%s with %d clients on %s: %w", name, clients, sides[i].kind, err)
				}
				after, err := usageOf(sides[i].pids())
				s := sample{Times: t}
				if c.op != "get" {
					s.perWrite = float64(after.written-before.written) / nodes / float64(max(t.Ops, 1))
				}
				return s, err
			})
			if err != nil {
				return err
			}
			f, err := b.report(figure{Case: name, Clients: clients, Size: valueSize, Note: cmp.note}, rounds)
			if err != nil {
				return err
			}
			with := fmt.Sprintf("%s %d", short, clients)
			if want := cmp.least[with]; want != 0 {
				b.atLeast(fmt.Sprintf("%s/%s clients: ≥ %v× etcd's", cmp.name, with, want), want, f.RatioPerS)
			}
			if cmp.more != nil {
				cmp.more(b, with, f)
			}
		}
	}
	for _, w := range []struct{ watchers, prefixes, rate int }{{100, 1, 100}, {10000, 1000, 1000}} {
		name := fmt.Sprintf("%s/watch-%d", cmp.name, w.watchers)
		if !b.wants(name) {
			continue
		}
		rounds, err := b.alternate(sides, func(i int) (sample, error) {
			reader, v := at(i, "follower"), cmp.vias[i]
			if err := sides[i].receive(ctx, reader, v, w.watchers, w.prefixes); err != nil {
				return sample{}, err
			}
			if err := sides[i].stamp(ctx, at(i, "leader"), v, Stamps{Rate: w.rate, Prefixes: w.prefixes, For: b.dur}); err != nil {
				return sample{}, err
			}
			t, err := sides[i].received(reader, v)
			return sample{Times: t}, err
		})
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		f, err := b.report(figure{Case: name, Clients: w.watchers,
			Note: fmt.Sprintf("%s; written on the leader at %d/s over %d prefixes, received on a follower; per_s are deliveries", cmp.note, w.rate, w.prefixes)}, rounds)
		if err != nil {
			return err
		}
		if w.watchers == 100 && cmp.more != nil {
			b.atMost(name+": p99 ≤ 0.5× etcd's", 0.5, f.RatioP99)
		}
	}
	return nil
}

// alternate runs the rounds of a case on all sides in turn, the other side
// first each time.
func (b *bench) alternate(sides []*side, do func(side int) (sample, error)) ([][]sample, error) {
	var rounds [][]sample
	for r := range b.rounds {
		got := make([]sample, len(sides))
		for n := range sides {
			i := (n + r) % len(sides)
			s, err := do(i)
			if err != nil {
				return nil, err
			}
			got[i] = s
		}
		rounds = append(rounds, got)
	}
	return rounds, nil
}

const fillPrefix = "/registry/pods/"

// state is what a store with many keys weighs, and what happens to it.
func (b *bench) state(ctx context.Context, sides []*side) error {
	if !b.wants("memory") && !b.wants("restart") && !b.wants("idle") && !b.wants("failover") {
		return nil
	}
	for _, s := range sides {
		l, err := s.leader(ctx)
		if err != nil {
			return err
		}
		if _, err := s.load(ctx, l, inside, Load{Op: "fill", Clients: 128, Size: valueSize, Keys: b.keys}); err != nil {
			return fmt.Errorf("fill %s: %w", s.kind, err)
		}
	}
	size := fmt.Sprintf("%d keys of %d bytes", b.keys, valueSize)
	for _, c := range []struct {
		name string
		do   func(context.Context, []*side) error
	}{
		{"memory", func(ctx context.Context, sides []*side) error { return b.memory(ctx, sides, "memory", size) }},
		{"idle", b.idling},
		{"failover", b.failover},
		{"restart", func(ctx context.Context, sides []*side) error { return b.restart(ctx, sides, size) }},
	} {
		if !b.wants(c.name) {
			continue
		}
		if err := c.do(ctx, sides); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// memory reports what a member takes, some seconds after it had to do anything.
func (b *bench) memory(ctx context.Context, sides []*side, name, note string) error {
	if err := pause(ctx, 10*time.Second); err != nil {
		return err
	}
	got := make([]sample, len(sides))
	for i, s := range sides {
		u, err := usageOf(s.pids())
		if err != nil {
			return err
		}
		got[i].usage = u
	}
	f, err := b.report(figure{Case: name, Note: note}, [][]sample{got})
	if err == nil {
		b.atMost(name+", "+note+" ≤ 1.0× etcd's", 1, f.RatioPSS)
	}
	return err
}

// idling reports what members do without requests.
func (b *bench) idling(ctx context.Context, sides []*side) error {
	if err := pause(ctx, 10*time.Second); err != nil {
		return err
	}
	before := make([]usage, len(sides))
	var err error
	for i, s := range sides {
		if before[i], err = usageOf(s.pids()); err != nil {
			return err
		}
	}
	if err := pause(ctx, b.idle); err != nil {
		return err
	}
	got := make([]sample, len(sides))
	for i, s := range sides {
		after, err := usageOf(s.pids())
		if err != nil {
			return err
		}
		got[i].perHour = float64(after.written-before[i].written) / nodes * float64(time.Hour) / float64(b.idle)
		got[i].perS = float64(after.wakeups-before[i].wakeups) / nodes / b.idle.Seconds()
	}
	_, err = b.report(figure{Case: "idle", Note: fmt.Sprintf("written_bytes: of a member in an hour, as in %s", b.idle)}, [][]sample{got})
	return err
}

// failover kills the leader under a client of another member, and reports how
// long it is until a write that the client begins after that is acknowledged.
func (b *bench) failover(ctx context.Context, sides []*side) error {
	const settle, watch = time.Second, 6 * time.Second
	rounds := make([][]sample, max(b.rounds, 5))
	for r := range rounds {
		rounds[r] = make([]sample, len(sides))
		for n := range sides {
			i := (n + r) % len(sides)
			s := sides[i]
			l, err := s.leader(ctx)
			if err != nil {
				return err
			}
			type result struct {
				got []Success
				err error
			}
			done := make(chan result, 1)
			go func() {
				got, err := s.probe(ctx, (l+1)%nodes, settle+watch)
				done <- result{got, err}
			}()
			if err := pause(ctx, settle); err != nil {
				return err
			}
			s.kill(l)
			killed := time.Now().UnixNano()
			res := <-done
			if res.err != nil {
				return res.err
			}
			first := slices.IndexFunc(res.got, func(g Success) bool { return g.Start > killed })
			if first < 0 {
				return fmt.Errorf("%s: no write within %s", s.kind, watch)
			}
			ms := millis(time.Duration(res.got[first].End - killed))
			rounds[r][i].Times = Times{P50: ms, P99: ms}
			if err := s.startMember(l); err != nil {
				return err
			}
			// Until the member is back and has what it missed.
			if _, err := s.count(ctx, l, fillPrefix); err != nil {
				return err
			}
		}
	}
	slowest := figure{}
	for _, r := range rounds {
		slowest.P99 = max(slowest.P99, r[0].P99)
		if len(r) > 1 {
			slowest.PeerP99 = max(slowest.PeerP99, r[1].P99)
		}
	}
	f, err := b.report(figure{Case: "failover", Clients: 1, Note: fmt.Sprintf(
		"kill -9 of the leader, p50 and p99 are the median of %d; the slowest: %.0f ms, peer %.0f ms", len(rounds), slowest.P99, slowest.PeerP99)}, rounds)
	if err == nil {
		b.atMost("failover: median ≤ 0.5× etcd's", 0.5, f.RatioP50)
		b.atMost("failover: median ≤ 1000 ms", 1000, f.P50)
	}
	return err
}

// restart kills all members and reports how long it is from their start until
// one of them answers a linearizable read of all keys.
func (b *bench) restart(ctx context.Context, sides []*side, note string) error {
	rounds, err := b.alternate(sides, func(i int) (sample, error) {
		s := sides[i]
		s.stop(os.Kill)
		start := time.Now()
		for m := range nodes {
			if err := s.startMember(m); err != nil {
				return sample{}, err
			}
		}
		n, err := s.count(ctx, 0, fillPrefix)
		took := millis(time.Since(start))
		if err == nil && n != int64(b.keys) {
			err = fmt.Errorf("%s has %d keys after a restart, not %d", s.kind, n, b.keys)
		}
		return sample{Times: Times{P50: took, P99: took}}, err
	})
	if err != nil {
		return err
	}
	f, err := b.report(figure{Case: "restart", Note: note + ", all members, until a linearizable read"}, rounds)
	if err != nil {
		return err
	}
	b.atMost("restart, "+note+" ≤ 0.5× etcd's", 0.5, f.RatioP50)
	return b.memory(ctx, sides, "memory after restart", note)
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
