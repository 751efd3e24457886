// Command sched measures the line from a Deployment to pods that run, on many
// nodes without machines: nodes and agents are played by this process, server,
// store, scheduler and controllers are the real ones. It prints one JSON object
// per figure. Times hold for the machine they were taken on; compare figures of
// one run.
//
//	make bench-sched
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// figure is one line of output. Keys follow HOUSE.md, section 7.
type figure struct {
	Bench   string `json:"bench"`
	Case    string `json:"case"`
	Bin     string `json:"bin,omitempty"` // the directory of the program, if two are compared
	Servers int    `json:"servers"`
	Nodes   int    `json:"nodes"`
	Pods    int    `json:"pods"`
	// PerS counts pods from the request to the last one Running.
	PerS float64 `json:"per_s"`
	// P50 and P99 are from when a pod was seen without a node until it was seen
	// with one; in a burst from when its creation was asked for.
	P50 float64 `json:"bound_p50_ms"`
	P99 float64 `json:"bound_p99_ms"`
	// CPU is of all servers, per pod; IdleCPU what they take, as a part of one
	// core, with the nodes and no pod. BusyCPU is CPU without that.
	CPU float64 `json:"cpu_ms_per_pod"`
	// Alloc is what all servers allocated, per pod: no other work on the machine changes it.
	Alloc float64 `json:"alloc_kib_per_pod"`
	// Entries of the leader's log, per pod.
	Entries   float64 `json:"entries_per_pod"`
	IdleCPU   float64 `json:"idle_cpu_pct"`
	BusyCPU   float64 `json:"busy_cpu_ms_per_pod"`
	ClientCPU float64 `json:"client_cpu_ms_per_pod"`
	RSS       float64 `json:"rss_mib"` // of the leader's server, after
	// Upstream is what kube-scheduler's own CI asks for at 5 000 nodes, in pods
	// a second, on far larger machines and with the scheduler alone.
	Upstream float64 `json:"kube_scheduler_ci_per_s,omitempty"`
	Machine  string  `json:"machine"`
}

// options are what the flags say.
type options struct {
	bin, beside, cases, burst, profiles string
	servers, rounds                     int
}

func main() {
	var o options
	flag.StringVar(&o.bin, "bin", "../bin", "folder with clusterd")
	flag.StringVar(&o.beside, "beside", "", "folder with another clusterd, which takes turns with the first")
	flag.IntVar(&o.servers, "servers", 1, "servers of the cluster")
	flag.IntVar(&o.rounds, "rounds", 1, "how often each case is measured")
	flag.StringVar(&o.cases, "cases", "100x400,1000x2500", "nodes x pods of a Deployment, separated by commas; the goal's largest is 5000x10000")
	flag.StringVar(&o.burst, "burst", "", "nodes x pods that are made at once and by themselves, separated by commas")
	flag.StringVar(&o.profiles, "profiles", "", "a folder for profiles of servers that were built with -tags profile")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench sched:", err)
		os.Exit(1)
	}
}

// size is that of one case.
type size struct {
	nodes, pods int
	burst       bool
}

func sizes(list string, burst bool) (out []size, err error) {
	for c := range strings.SplitSeq(list, ",") {
		if c == "" {
			continue
		}
		s := size{burst: burst}
		if _, err := fmt.Sscanf(c, "%dx%d", &s.nodes, &s.pods); err != nil || s.nodes < 1 || s.pods < 1 {
			return nil, fmt.Errorf("the case %q: nodes x pods is required, such as 100x400", c)
		}
		out = append(out, s)
	}
	return out, nil
}

func run(ctx context.Context, o options) error {
	bins := []string{o.bin}
	if o.beside != "" {
		bins = append(bins, o.beside)
	}
	for i, bin := range bins {
		var err error
		if bins[i], err = filepath.Abs(bin); err != nil {
			return err
		}
	}
	all, err := sizes(o.cases, false)
	if err != nil {
		return err
	}
	bursts, err := sizes(o.burst, true)
	if err != nil {
		return err
	}
	for range o.rounds {
		for _, s := range append(all, bursts...) {
			for _, bin := range bins {
				f, err := one(ctx, bin, o.servers, s, o.profiles)
				if err != nil {
					return fmt.Errorf("%d nodes, %d pods: %w", s.nodes, s.pods, err)
				}
				if len(bins) > 1 {
					f.Bin = bin
				}
				if err := json.NewEncoder(os.Stdout).Encode(f); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// one measures a fresh cluster.
func one(ctx context.Context, bin string, servers int, s size, profiles string) (f figure, err error) {
	dir, err := os.MkdirTemp("", "clusterd-bench-")
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	c, err := cluster.Up(ctx, cluster.Config{
		Dir: filepath.Join(dir, "c"), Bin: bin, Nodes: servers, Bridge: "cdbench", Subnet: netip.MustParsePrefix("10.88.0.0/24"),
		Args:     []string{"--log-level=warn"},
		InitArgs: []string{"--cluster-cidr=10.128.0.0/9"}, // room for a network per node
	})
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, c.Down(context.WithoutCancel(ctx))) }()
	_, config, err := c.Client(c.Nodes()[0].Name)
	if err != nil {
		return f, err
	}
	config.QPS = -1
	config.ContentType, config.AcceptContentTypes = "application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf,application/json"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return f, err
	}
	if err := cordon(ctx, client, servers); err != nil {
		return f, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	h, err := newHollow(ctx, client, s.nodes)
	if err != nil {
		return f, err
	}
	defer h.wait()
	defer cancel()

	const idle = 5 * time.Second
	before, err := cpu(c)
	if err != nil {
		return f, err
	}
	select {
	case <-time.After(idle):
	case <-ctx.Done():
		return f, ctx.Err()
	}
	began, err := look(ctx, c)
	if err != nil {
		return f, err
	}
	profiled := profile(ctx, c, filepath.Join(profiles, fmt.Sprintf("%dx%d", s.nodes, s.pods)), profiles != "")
	start := time.Now()
	f = figure{Bench: "sched", Case: "deploy_to_running"}
	work := h.deploy
	if s.burst {
		f.Case, work = "burst", h.burst
	}
	bound, err := work(ctx, s.pods)
	if err != nil {
		return f, err
	}
	took := time.Since(start)
	ended, err := look(ctx, c)
	if err != nil {
		return f, err
	}
	profiled()
	each := func(v float64) float64 { return round(v / float64(s.pods)) }
	f.Servers, f.Nodes, f.Pods, f.PerS = servers, s.nodes, s.pods, round(float64(s.pods)/took.Seconds())
	f.P50, f.P99 = round(at(bound, 0.5)), round(at(bound, 0.99))
	f.CPU, f.ClientCPU = each((ended.cpu-began.cpu).Seconds()*1000), each((ended.client-began.client).Seconds()*1000)
	idly := float64(began.cpu-before) / float64(idle)
	f.BusyCPU = each((ended.cpu-began.cpu).Seconds()*1000 - idly*took.Seconds()*1000)
	f.IdleCPU = round(100 * idly)
	f.Alloc, f.Entries = each((ended.allocated-began.allocated)/1024), each(ended.entries-began.entries)
	f.RSS, f.Machine = rss(c), fmt.Sprintf("%d cores, %s/%s", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH)
	if s.nodes >= 5000 {
		f.Upstream = 680
	}
	return f, nil
}

func round(f float64) float64 { return float64(int64(f*100+0.5)) / 100 }

// at returns a percentile of sorted times, in ms.
func at(sorted []time.Duration, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))].Seconds() * 1000
}
