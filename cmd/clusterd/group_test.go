package main

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestGroupStopsInReverse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var order []string
		g := group{log: slog.New(slog.DiscardHandler)}
		for _, name := range []string{"a", "b", "c"} {
			g.add(name, func(ctx context.Context) error {
				<-ctx.Done()
				mu.Lock()
				defer mu.Unlock()
				order = append(order, name)
				return ctx.Err()
			})
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- g.run(ctx) }()
		synctest.Wait()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if !slices.Equal(order, []string{"c", "b", "a"}) {
			t.Errorf("stopped in order %v", order)
		}
	})
}

func TestGroupEndsWithAPart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		boom := errors.New("boom")
		for want, end := range map[error]error{boom: boom, errEndedEarly: nil} {
			g := group{log: slog.New(slog.DiscardHandler)}
			g.add("quiet", func(ctx context.Context) error { <-ctx.Done(); return nil })
			g.add("ends", func(context.Context) error { return end })
			if err := g.run(t.Context()); !errors.Is(err, want) {
				t.Errorf("run = %v, want %v", err, want)
			}
		}
	})
}

func TestGroupLeavesAStuckPartBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		g := group{log: slog.New(slog.DiscardHandler)}
		g.add("stuck", func(context.Context) error { <-release; return nil })
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		start := time.Now()
		if err := g.run(ctx); err != nil {
			t.Error(err)
		}
		if d := time.Since(start); d != stopTimeout {
			t.Errorf("waited %s", d)
		}
		close(release)
	})
}
