// Command store measures raftstore: three members in this process, over
// loopback TCP, on real files with fsync. It prints one JSON object per line.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

func main() {
	dir := flag.String("dir", "", "folder for the members' data, on the disk to be measured; default: a temporary one")
	dur := flag.Duration("for", 3*time.Second, "how long each case runs")
	rounds := flag.Int("rounds", 3, "rounds of each case; the medians are printed")
	only := flag.String("run", "", "run only the cases that contain this")
	flag.Parse()
	if err := run(*dir, *dur, *rounds, *only); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// figure is one line of output.
type figure struct {
	Bench   string  `json:"bench"`
	Case    string  `json:"case"`
	Nodes   int     `json:"nodes"`
	Clients int     `json:"clients"`
	Size    int     `json:"size"`
	PerS    float64 `json:"per_s"`
	P50     float64 `json:"p50_ms"`
	P99     float64 `json:"p99_ms"`
	RSS     float64 `json:"rss_mib"` // of all members together
}

const (
	nodes     = 3
	valueSize = 1024
)

func run(dir string, dur time.Duration, rounds int, only string) (err error) {
	if dir == "" {
		if dir, err = os.MkdirTemp("", "bench-store-"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	}
	c, err := start(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	leader, follower, err := c.roles()
	if err != nil {
		return err
	}
	value := make([]byte, valueSize)
	var seq atomic.Int64
	write := func(s *raftstore.Store) func(context.Context, int) error {
		return func(ctx context.Context, client int) error {
			key := fmt.Sprintf("/bench/%d/%d", client, seq.Add(1)%64)
			_, err := s.Txn(ctx, mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: value}}})
			return err
		}
	}
	read := func(s *raftstore.Store) func(context.Context, int) error {
		return func(ctx context.Context, client int) error {
			_, _, err := s.Get(ctx, fmt.Sprintf("/bench/%d/1", client), raftstore.ReadOptions{})
			return err
		}
	}
	cases := []struct {
		name    string
		clients int
		op      func(context.Context, int) error
	}{
		{"write", 1, write(leader)},
		{"write", 128, write(leader)},
		{"write", 512, write(leader)},
		{"write-forwarded", 1, write(follower)},
		{"write-forwarded", 128, write(follower)},
		{"compare-and-set", 128, compareAndSet(leader, value)},
		{"read", 1, read(leader)},
		{"read", 128, read(leader)},
		{"read-follower", 1, read(follower)},
		{"read-follower", 128, read(follower)},
	}
	out := json.NewEncoder(os.Stdout)
	for _, tc := range cases {
		if !strings.Contains(tc.name, only) {
			continue
		}
		var fs []figure
		for range rounds {
			f, err := measure(tc.clients, dur, tc.op)
			if err != nil {
				return fmt.Errorf("%s with %d clients: %w", tc.name, tc.clients, err)
			}
			fs = append(fs, f)
		}
		f := median(fs)
		f.Bench, f.Case, f.Nodes, f.Clients, f.Size, f.RSS = "store", tc.name, nodes, tc.clients, valueSize, rss()
		if err := out.Encode(f); err != nil {
			return err
		}
	}
	if strings.Contains("watch", only) {
		f, err := watchFanOut(leader, follower, 100, dur)
		if err != nil {
			return fmt.Errorf("watch: %w", err)
		}
		return out.Encode(f)
	}
	return nil
}

func compareAndSet(s *raftstore.Store, value []byte) func(context.Context, int) error {
	var mu sync.Mutex
	revs := map[int]int64{}
	return func(ctx context.Context, client int) error {
		key := fmt.Sprintf("/cas/%d", client)
		mu.Lock()
		rev := revs[client]
		mu.Unlock()
		res, err := s.Txn(ctx, mvcc.Txn{
			Compares: []mvcc.Compare{{Key: key, ModRevision: rev}},
			Ops:      []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: value}},
		})
		switch {
		case err != nil:
			return err
		case res.Succeeded:
			rev = res.Revision
		case res.Current[0] != nil:
			rev = res.Current[0].ModRevision
		}
		mu.Lock()
		revs[client] = rev
		mu.Unlock()
		return nil
	}
}

// measure runs op in a loop in each client.
func measure(clients int, dur time.Duration, op func(context.Context, int) error) (figure, error) {
	ctx, cancel := context.WithTimeout(context.Background(), dur+30*time.Second)
	defer cancel()
	times := make([][]time.Duration, clients)
	errs := make([]error, clients)
	begin := time.Now()
	var wg sync.WaitGroup
	for i := range clients {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for time.Since(begin) < dur {
				start := time.Now()
				if errs[i] = op(ctx, i); errs[i] != nil {
					return
				}
				times[i] = append(times[i], time.Since(start))
			}
		}()
	}
	wg.Wait()
	took := time.Since(begin)
	if err := errors.Join(errs...); err != nil {
		return figure{}, err
	}
	return summary(slices.Concat(times...), took), nil
}

func summary(all []time.Duration, took time.Duration) figure {
	if len(all) == 0 {
		return figure{}
	}
	slices.Sort(all)
	ms := func(q float64) float64 {
		return float64(all[int(q*float64(len(all)-1))].Microseconds()) / 1000
	}
	return figure{PerS: float64(len(all)) / took.Seconds(), P50: ms(0.5), P99: ms(0.99)}
}

func median(fs []figure) figure {
	pick := func(of func(figure) float64) float64 {
		var xs []float64
		for _, f := range fs {
			xs = append(xs, of(f))
		}
		slices.Sort(xs)
		return xs[len(xs)/2]
	}
	return figure{
		PerS: pick(func(f figure) float64 { return f.PerS }),
		P50:  pick(func(f figure) float64 { return f.P50 }),
		P99:  pick(func(f figure) float64 { return f.P99 }),
	}
}

// watchFanOut measures write → receipt for watchers on a follower, at a
// hundred writes a second.
func watchFanOut(leader, follower *raftstore.Store, watchers int, dur time.Duration) (figure, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var (
		mu  sync.Mutex
		all []time.Duration
		wg  sync.WaitGroup
	)
	for range watchers {
		w, err := follower.Watch(ctx, "/watch/", raftstore.WatchOptions{})
		if err != nil {
			return figure{}, err
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			for b := range w.C() {
				now := time.Now()
				mu.Lock()
				for _, e := range b.Events {
					if sent, err := strconv.ParseInt(string(e.KV.Value), 10, 64); err == nil {
						all = append(all, now.Sub(time.Unix(0, sent)))
					}
				}
				mu.Unlock()
			}
		}()
	}
	begin := time.Now()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	var last int64
	for time.Since(begin) < dur {
		<-tick.C
		res, err := leader.Txn(ctx, mvcc.Txn{Ops: []mvcc.Op{{
			Type: mvcc.OpPut, Key: "/watch/k", Value: []byte(strconv.FormatInt(time.Now().UnixNano(), 10)),
		}}})
		if err != nil {
			return figure{}, err
		}
		last = res.Revision
	}
	took := time.Since(begin)
	if err := follower.WaitRevision(ctx, last); err != nil {
		return figure{}, err
	}
	cancel()
	wg.Wait()
	f := summary(all, took)
	f.Bench, f.Case, f.Nodes, f.Clients, f.Size, f.RSS = "store", "watch-fan-out-follower", nodes, watchers, 19, rss()
	return f, nil
}

// rss is this process's resident memory.
func rss() float64 {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(b))
	if len(fields) < 2 {
		return 0
	}
	pages, _ := strconv.ParseFloat(fields[1], 64)
	return float64(int(pages * float64(os.Getpagesize()) / (1 << 20)))
}

type cluster struct{ stores []*raftstore.Store }

func start(dir string) (_ *cluster, err error) {
	c := &cluster{}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	addrs := map[string]string{}
	var listeners []net.Listener
	for i := range nodes {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return c, err
		}
		listeners = append(listeners, l)
		addrs[fmt.Sprint("n", i)] = l.Addr().String()
	}
	for i, l := range listeners {
		id := fmt.Sprint("n", i)
		s, err := raftstore.Open(raftstore.Config{
			ID: id, Dir: filepath.Join(dir, id), Listener: l,
			Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
			Dial: func(ctx context.Context, id string) (net.Conn, error) {
				var d net.Dialer
				return d.DialContext(ctx, "tcp", addrs[id])
			},
		})
		if err != nil {
			return c, err
		}
		c.stores = append(c.stores, s)
		if i == 0 {
			err = s.Bootstrap()
		} else {
			err = c.stores[0].AddVoter(ctx, id)
		}
		if err != nil {
			return c, err
		}
	}
	return c, nil
}

func (c *cluster) roles() (leader, follower *raftstore.Store, err error) {
	for range 3000 {
		leader, follower = nil, nil
		for _, s := range c.stores {
			if s.IsLeader() {
				leader = s
			} else if s.Leader() != "" {
				follower = s
			}
		}
		if leader != nil && follower != nil {
			return leader, follower, nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil, nil, errors.New("no leader")
}

func (c *cluster) close() error {
	var errs []error
	for _, s := range c.stores {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}
