package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// client is a store as its caller sees it, see via. All methods may be called
// concurrently.
type client interface {
	put(ctx context.Context, key string, value []byte) error
	// compareAndSet writes when the key's revision is rev (0: absent). It
	// returns the key's revision now, whether it wrote or not.
	compareAndSet(ctx context.Context, key string, rev int64, value []byte) (int64, error)
	get(ctx context.Context, key string) error
	// count is linearizable, too.
	count(ctx context.Context, prefix string) (int64, error)
	// watch calls got with each value written under prefix until ctx ends. It
	// returns when the watch is in place.
	watch(ctx context.Context, prefix string, got func(value []byte)) error
}

// Load is what some clients do at a time, each as fast as it is answered.
type Load struct {
	Op      string // put, cas, get or fill
	Clients int
	Size    int // of a value, bytes
	For     time.Duration
	Keys    int // fill: write each of so many keys once
}

// Times is what a load came to.
type Times struct {
	Ops      int
	PerS     float64
	P50, P99 float64 // ms
}

// run puts a load on conns, which its clients share.
func run(ctx context.Context, conns []client, l Load) (Times, error) {
	value := make([]byte, l.Size)
	for i := range value {
		value[i] = byte(i * 7)
	}
	var filled atomic.Int64
	op := func(ctx context.Context, c client, n, turn int) (bool, error) {
		switch l.Op {
		case "put":
			return true, c.put(ctx, fmt.Sprintf("/bench/%d/%d", n, turn%64), value)
		case "get":
			return true, c.get(ctx, fmt.Sprintf("/bench/%d/0", n))
		case "fill":
			k := int(filled.Add(1)) - 1
			if k >= l.Keys {
				return false, nil
			}
			return true, c.put(ctx, fmt.Sprintf("/registry/pods/namespace-%d/pod-%06d", k%100, k), value)
		}
		return false, fmt.Errorf("unknown load %q", l.Op)
	}
	if l.Op == "cas" {
		revs := make([]int64, l.Clients) // each client's own
		op = func(ctx context.Context, c client, n, _ int) (_ bool, err error) {
			revs[n], err = c.compareAndSet(ctx, fmt.Sprintf("/cas/%d", n), revs[n], value)
			return true, err
		}
	}
	times := make([][]time.Duration, l.Clients)
	errs := make([]error, l.Clients)
	begin := time.Now()
	var wg sync.WaitGroup
	for n := range l.Clients {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for turn := 0; l.Op == "fill" || time.Since(begin) < l.For; turn++ {
				start := time.Now()
				more, err := op(ctx, conns[n%len(conns)], n, turn)
				if errs[n] = err; err != nil || !more {
					return
				}
				times[n] = append(times[n], time.Since(start))
			}
		}()
	}
	wg.Wait()
	took := time.Since(begin)
	return summary(slices.Concat(times...), took), errors.Join(errs...)
}

func summary(all []time.Duration, took time.Duration) Times {
	if len(all) == 0 {
		return Times{}
	}
	slices.Sort(all)
	ms := func(q float64) float64 { return millis(all[int(q*float64(len(all)-1))]) }
	return Times{Ops: len(all), PerS: float64(len(all)) / took.Seconds(), P50: ms(0.5), P99: ms(0.99)}
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// Stamps is a load of values that say when they were sent, at a steady rate,
// to a number of prefixes in turn.
type Stamps struct {
	Rate     int // writes a second
	Prefixes int
	For      time.Duration
}

func stampPrefix(n int) string { return fmt.Sprintf("/watch/%d/", n) }

// stamp writes them. A write that is late is not made up for by a burst.
func stamp(ctx context.Context, conns []client, s Stamps) error {
	tick := time.NewTicker(time.Second / time.Duration(s.Rate))
	defer tick.Stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	failed := make(chan error, 1)
	begin := time.Now()
	for n := 0; time.Since(begin) < s.For; n++ {
		select {
		case <-tick.C:
		case err := <-failed:
			return err
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			value := strconv.AppendInt(nil, time.Now().UnixNano(), 10)
			if err := conns[n%len(conns)].put(ctx, stampPrefix(n%s.Prefixes)+"k", value); err != nil {
				select {
				case failed <- err:
				default:
				}
			}
		}()
	}
	return nil
}

// deliveries is how long stamped values took to reach watchers.
type deliveries struct {
	cancel context.CancelFunc
	begin  time.Time

	mu  sync.Mutex
	all []time.Duration
}

// receive starts watchers, in turn on prefixes.
func receive(ctx context.Context, conns []client, watchers, prefixes int) (*deliveries, error) {
	d := &deliveries{}
	ctx, d.cancel = context.WithCancel(ctx)
	for n := range watchers {
		err := conns[n%len(conns)].watch(ctx, stampPrefix(n%prefixes), func(value []byte) {
			sent, err := strconv.ParseInt(string(value), 10, 64)
			took := time.Since(time.Unix(0, sent))
			if err == nil {
				d.mu.Lock()
				d.all = append(d.all, took)
				d.mu.Unlock()
			}
		})
		if err != nil {
			d.cancel()
			return nil, err
		}
	}
	d.begin = time.Now()
	return d, nil
}

// stop ends the watchers.
func (d *deliveries) stop() Times {
	d.cancel()
	d.mu.Lock()
	defer d.mu.Unlock()
	return summary(d.all, time.Since(d.begin))
}

// Success is one write that was acknowledged, in unix nanoseconds.
type Success struct{ Start, End int64 }

// probe writes one key again and again, as a client does that does not give
// up, and returns the writes that were acknowledged.
func probe(ctx context.Context, c client, d time.Duration) (got []Success) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	for ctx.Err() == nil {
		try, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		start := time.Now()
		if err := c.put(try, "/failover", []byte("x")); err == nil {
			got = append(got, Success{start.UnixNano(), time.Now().UnixNano()})
		}
		cancel()
		time.Sleep(time.Millisecond)
	}
	return got
}

// first writes one key again and again until it is acknowledged.
func first(ctx context.Context, c client) (Success, error) {
	for {
		try, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		start := time.Now()
		err := c.put(try, "/silent", []byte("x"))
		cancel()
		if err == nil {
			return Success{start.UnixNano(), time.Now().UnixNano()}, nil
		}
		if ctx.Err() != nil {
			return Success{}, err
		}
		time.Sleep(time.Millisecond)
	}
}
