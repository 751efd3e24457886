package main

import (
	"context"
	"fmt"
	"os"
	"syscall"
	"time"
)

// silentLeader measures how long a client of another member waits for its write
// when the leader falls silent: its process is frozen, its cable is pulled, or the
// network drops its packets. No process is notified of it: that is what timeouts
// are for. The members are in network namespaces, so it takes root.
func (b *bench) silentLeader(ctx context.Context) error {
	if !b.wants("silent-stop") && !b.wants("silent-link") && !b.wants("silent-drop") {
		return nil
	}
	if os.Geteuid() != 0 {
		return b.out.Encode(map[string]any{"bench": "store", "case": "silent-*", "note": "left out: network namespaces take root"})
	}
	sides, err := b.newSides("silent", true)
	defer closeAll(sides)
	if err != nil {
		return err
	}
	for _, s := range sides {
		if err := s.start(ctx); err != nil {
			return fmt.Errorf("start %s: %w", s.kind, err)
		}
	}
	for _, f := range []struct {
		name, what string
		inject     func(s *side, i int) error
		heal       func(s *side, i int) error
	}{
		{"silent-stop", "SIGSTOP of the leader",
			func(s *side, i int) error { return s.cmds[i].Process.Signal(syscall.SIGSTOP) },
			func(s *side, i int) error { return s.cmds[i].Process.Signal(syscall.SIGCONT) }},
		{"silent-link", "the leader's link is down",
			func(s *side, i int) error { return s.machines.link(i, false) },
			func(s *side, i int) error { return s.machines.link(i, true) }},
		{"silent-drop", "the leader's packets are dropped",
			func(s *side, i int) error { return s.machines.drop(i, true) },
			func(s *side, i int) error { return s.machines.drop(i, false) }},
	} {
		if !b.wants(f.name) {
			continue
		}
		rounds := make([][]sample, b.silent)
		for r := range rounds {
			rounds[r] = make([]sample, len(sides))
			for n := range sides {
				i := (n + r) % len(sides)
				took, err := b.silence(ctx, sides[i], f.inject, f.heal)
				if err != nil {
					return fmt.Errorf("%s of %s: %w", f.name, sides[i].kind, err)
				}
				rounds[r][i].Times = Times{P50: millis(took), P99: millis(took)}
			}
		}
		if err := b.reportSilence(f.name, f.what, rounds); err != nil {
			return err
		}
	}
	return nil
}

// silence is one round: from the fault until a write is acknowledged that was
// begun after it.
func (b *bench) silence(ctx context.Context, s *side, inject, heal func(*side, int) error) (took time.Duration, err error) {
	l, err := s.leader(ctx)
	if err != nil {
		return 0, err
	}
	if err := inject(s, l); err != nil {
		return 0, err
	}
	began := time.Now()
	var first Success
	err = s.call(ctx, (l+1)%nodes, "First", None{}, &first)
	if herr := heal(s, l); err == nil {
		err = herr
	}
	if err != nil {
		return 0, err
	}
	// Until it is back, and all is quiet.
	if _, err := s.count(ctx, l, fillPrefix); err != nil {
		return 0, err
	}
	return time.Unix(0, first.End).Sub(began), pause(ctx, 2*time.Second)
}

func (b *bench) reportSilence(name, what string, rounds [][]sample) error {
	var slowest, peer float64
	for _, r := range rounds {
		slowest = max(slowest, r[0].P50)
		if len(r) > 1 {
			peer = max(peer, r[1].P50)
		}
	}
	note := fmt.Sprintf("%s, until a write through a follower: the median of %d; the slowest %.0f ms", what, len(rounds), slowest)
	if peer != 0 {
		note += fmt.Sprintf(", peer %.0f ms", peer)
	}
	f, err := b.report(figure{Case: name, Clients: 1, Note: note}, rounds)
	if err == nil {
		b.atMost(name+": median ≤ 1000 ms", 1000, f.P50)
		b.atMost(name+": the slowest ≤ 1500 ms", 1500, slowest)
	}
	return err
}
