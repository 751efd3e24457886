// Command api measures what the API server's chain of requests costs of processor
// time: who are you, may you, admission, quota, the audit log; tokens; and the seal
// of Secrets. Servers run in processes of their own, each on a store of one member.
// Blocks of requests to them take turns, so that what else the machine does meets all
// alike, and what is compared is the server's own processor time. It prints one JSON
// object per figure, and one per goal.
//
//	make bench-api
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// figure is one line of output.
type figure struct {
	Bench string `json:"bench"`
	Case  string `json:"case"`
	// Server is what the server includes, Includes what the request passes there.
	Server   string `json:"server"`
	Includes string `json:"includes"`
	Rounds   int    `json:"rounds"`
	Requests int    `json:"requests"` // of a round
	// CPU is processor time of the server's process for one request, with its part of
	// garbage collection, which is GC.
	CPU float64 `json:"cpu_us"`
	GC  float64 `json:"gc_us"`
	// Allocated is memory for one request.
	Allocated float64 `json:"allocated_kib"`
	P50       float64 `json:"p50_ms"`
	// Beside is the case that this one is compared with, Beyond what it takes more: the
	// median of the differences of each round; BeyondLow and BeyondHigh are their quartiles.
	Beside     string  `json:"beside,omitempty"`
	Beyond     float64 `json:"beyond_us,omitempty"`
	BeyondLow  float64 `json:"beyond_us_q1,omitempty"`
	BeyondHigh float64 `json:"beyond_us_q3,omitempty"`
	Machine    string  `json:"machine"`
}

// goal compares a value with what was set as its goal.
type goal struct {
	Bench string  `json:"bench"`
	Goal  string  `json:"goal"`
	Value float64 `json:"value"`
	Met   bool    `json:"met"`
}

type options struct {
	dir, profiles, only string
	rounds, requests    int
}

func main() {
	var o options
	kind := flag.String("serve", "", "be a server of this kind; internal")
	flag.StringVar(&o.dir, "dir", "/dev/shm", "where a folder for the stores is made")
	flag.IntVar(&o.rounds, "rounds", 15, "how often each case has its turn")
	flag.IntVar(&o.requests, "requests", 300, "requests of a turn")
	flag.StringVar(&o.only, "only", "", "pods, tokens or secrets; default: all of them")
	flag.StringVar(&o.profiles, "profiles", "", "a folder for a profile of the server's processor time in each case")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	var err error
	if *kind != "" {
		err = serve(*kind, o.dir)
	} else {
		err = run(ctx, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench api:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (err error) {
	if o.rounds < 3 || o.requests < 10 {
		return fmt.Errorf("-rounds=%d -requests=%d: at least 3 rounds of 10 requests", o.rounds, o.requests)
	}
	if o.dir, err = os.MkdirTemp(o.dir, "clusterd-api-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(o.dir)) }()
	out := json.NewEncoder(os.Stdout)
	for _, part := range []struct {
		name    string
		servers []string
		cases   func(context.Context, map[string]*child) ([]*load, error)
		goals   func(map[string]figure) []goal
	}{
		{"pods", []string{bare, chained}, podCases, podGoals},
		{"tokens", []string{chained}, tokenCases, tokenGoals},
		{"secrets", []string{opened, chained}, secretCases, secretGoals},
	} {
		if o.only != "" && o.only != part.name {
			continue
		}
		dir := filepath.Join(o.dir, part.name)
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
		figures, err := measure(ctx, o, part.name, dir, part.servers, part.cases)
		if err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
		byName := map[string]figure{}
		for _, f := range figures {
			byName[f.Case] = f
			if err := out.Encode(f); err != nil {
				return err
			}
		}
		for _, g := range part.goals(byName) {
			if err := out.Encode(g); err != nil {
				return err
			}
		}
	}
	return nil
}

// measure starts servers and has each case of a part take its turns.
func measure(ctx context.Context, o options, part, dir string, kinds []string, cases func(context.Context, map[string]*child) ([]*load, error)) ([]figure, error) {
	servers := map[string]*child{}
	for _, kind := range kinds {
		c, err := spawn(kind, dir)
		if err != nil {
			return nil, err
		}
		defer c.end()
		servers[kind] = c
		if err := fill(ctx, c); err != nil {
			return nil, c.failed(err)
		}
	}
	loads, err := cases(ctx, servers)
	if err != nil {
		return nil, err
	}
	for _, l := range loads { // connections, caches, and code that is read for the first time
		if _, err := l.turn(ctx, min(o.requests, 50)); err != nil {
			return nil, err
		}
	}
	for _, c := range servers {
		if err := c.idle(ctx, 5*time.Second); err != nil {
			return nil, err
		}
	}
	for round := range o.rounds {
		for i := range loads {
			// Another one begins each round: none is always behind the same one.
			l := loads[(i+round)%len(loads)]
			s, err := l.turn(ctx, o.requests)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", l.name, err)
			}
			l.samples = append(l.samples, s)
		}
	}
	if o.profiles != "" {
		if err := profiles(ctx, o, part, loads); err != nil {
			return nil, err
		}
	}
	return report(o, part, loads), nil
}

func machine() string {
	return fmt.Sprintf("%d cores, %s/%s", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH)
}
