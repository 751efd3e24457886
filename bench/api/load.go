package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// load is one case: requests of one kind to one server.
type load struct {
	name string
	// server is what the server includes, includes what the requests pass there.
	server, includes string
	// beside is the case it is compared with.
	beside string
	child  *child
	do     func(ctx context.Context, name string) error
	// undo removes what requests have made; nil: nothing.
	undo func(ctx context.Context) error

	turns   int
	samples []sample
}

// sample is what one turn of a case cost, for each request.
type sample struct {
	cpu, gc   time.Duration
	allocated float64
	p50       time.Duration
}

// turn makes so many requests, one after the other, between two collections.
func (l *load) turn(ctx context.Context, requests int) (s sample, err error) {
	if _, err := l.child.collect(ctx); err != nil {
		return s, err
	}
	l.turns++
	times := make([]time.Duration, requests)
	before, err := l.child.cpu()
	if err != nil {
		return s, err
	}
	began := time.Now()
	for i := range requests {
		at := time.Now()
		if err := l.do(ctx, fmt.Sprintf("t%d-%d", l.turns, i)); err != nil {
			return s, err
		}
		times[i] = time.Since(at)
	}
	took := time.Since(began)
	after, err := l.child.cpu()
	if err != nil {
		return s, err
	}
	allocated, err := l.child.collect(ctx)
	if err != nil {
		return s, err
	}
	slices.Sort(times)
	n := time.Duration(requests)
	s.p50 = times[requests/2]
	s.allocated = float64(allocated) / float64(requests)
	// As Go collects by default: when as much has been allocated as lives.
	s.gc = time.Duration(float64(l.child.collection) * s.allocated / float64(max(l.child.live, 4<<20)))
	s.cpu = (after-before-time.Duration(float64(l.child.rest)*took.Seconds()))/n + s.gc
	if l.undo != nil {
		err = l.undo(ctx)
	}
	return s, err
}

// profiles takes a profile of the server under each case.
func profiles(ctx context.Context, o options, part string, loads []*load) error {
	if err := os.MkdirAll(o.profiles, 0o755); err != nil {
		return err
	}
	for _, l := range loads {
		taken := make(chan error, 1)
		file := filepath.Join(o.profiles, part+"-"+l.name+".pprof")
		go func() { taken <- l.child.profile(ctx, 10*time.Second, file) }()
		for done := false; !done; {
			if _, err := l.turn(ctx, o.requests); err != nil {
				return errors.Join(err, <-taken)
			}
			select {
			case err := <-taken:
				if done = true; err != nil {
					return err
				}
			default:
			}
		}
	}
	return nil
}

func report(o options, part string, loads []*load) (all []figure) {
	byName := map[string]*load{}
	for _, l := range loads {
		byName[l.name] = l
	}
	for _, l := range loads {
		of := func(what func(s sample) float64) float64 {
			var xs []float64
			for _, s := range l.samples {
				xs = append(xs, what(s))
			}
			return quantile(xs, 0.5)
		}
		f := figure{
			Bench: "api-" + part, Case: l.name, Server: l.server, Includes: l.includes, Rounds: o.rounds, Requests: o.requests, Machine: machine(),
			CPU: of(func(s sample) float64 { return micro(s.cpu) }), GC: of(func(s sample) float64 { return micro(s.gc) }),
			Allocated: round(of(func(s sample) float64 { return s.allocated / 1024 })), P50: of(func(s sample) float64 { return micro(s.p50) / 1000 }),
		}
		if other := byName[l.beside]; other != nil {
			var more []float64
			for i := range l.samples {
				more = append(more, micro(l.samples[i].cpu-other.samples[i].cpu))
			}
			f.Beside, f.Beyond, f.BeyondLow, f.BeyondHigh = l.beside, quantile(more, 0.5), quantile(more, 0.25), quantile(more, 0.75)
		}
		all = append(all, f)
	}
	return all
}

// micro is a time in microseconds, to a tenth.
func micro(d time.Duration) float64 { return round(float64(d) / float64(time.Microsecond)) }

func round(x float64) float64 { return float64(int64(x*10)) / 10 }

// quantile is the q-th part of the values in order.
func quantile(xs []float64, q float64) float64 {
	xs = slices.Sorted(slices.Values(xs))
	if len(xs) == 0 {
		return 0
	}
	return xs[int(q*float64(len(xs)-1)+0.5)]
}
