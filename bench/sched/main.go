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
	"strconv"
	"strings"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// figure is one line of output. Keys follow HOUSE.md, section 7.
type figure struct {
	Bench   string `json:"bench"`
	Case    string `json:"case"`
	Servers int    `json:"servers"`
	Nodes   int    `json:"nodes"`
	Pods    int    `json:"pods"`
	// PerS counts pods from the request to the last one Running.
	PerS float64 `json:"per_s"`
	// P50 and P99 are from when a pod was seen without a node until it was seen
	// with one.
	P50 float64 `json:"bound_p50_ms"`
	P99 float64 `json:"bound_p99_ms"`
	// CPU is of all servers, per pod; IdleCPU what they take, as a part of one
	// core, with the nodes and no pod: it is not taken off.
	CPU       float64 `json:"cpu_ms_per_pod"`
	IdleCPU   float64 `json:"idle_cpu_pct"`
	ClientCPU float64 `json:"client_cpu_ms_per_pod"`
	RSS       float64 `json:"rss_mib"` // of the leader's server, after
	// Upstream is what kube-scheduler's own CI asks for at 5 000 nodes, in pods
	// a second, on far larger machines and with the scheduler alone.
	Upstream float64 `json:"kube_scheduler_ci_per_s,omitempty"`
	Machine  string  `json:"machine"`
}

func main() {
	bin := flag.String("bin", "../bin", "folder with clusterd")
	servers := flag.Int("servers", 1, "servers of the cluster")
	cases := flag.String("cases", "100x400,1000x2500", "nodes x pods, separated by commas; the goal's largest is 5000x10000")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *bin, *servers, *cases); err != nil {
		fmt.Fprintln(os.Stderr, "bench sched:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, bin string, servers int, cases string) error {
	bin, err := filepath.Abs(bin)
	if err != nil {
		return err
	}
	for _, c := range strings.Split(cases, ",") {
		var nodes, pods int
		if _, err := fmt.Sscanf(c, "%dx%d", &nodes, &pods); err != nil || nodes < 1 || pods < 1 {
			return fmt.Errorf("-cases %q: nodes x pods is required, such as 100x400", c)
		}
		if err := one(ctx, bin, servers, nodes, pods); err != nil {
			return fmt.Errorf("%d nodes, %d pods: %w", nodes, pods, err)
		}
	}
	return nil
}

// one measures a fresh cluster.
func one(ctx context.Context, bin string, servers, nodes, pods int) (err error) {
	dir, err := os.MkdirTemp("", "clusterd-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	c, err := cluster.Up(ctx, cluster.Config{
		Dir: filepath.Join(dir, "c"), Bin: bin, Nodes: servers, Bridge: "cdbench", Subnet: netip.MustParsePrefix("10.88.0.0/24"),
		// Room for a network per node.
		Args: []string{"--log-level=warn", "--cluster-cidr=10.128.0.0/9"},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Down(context.WithoutCancel(ctx))) }()
	_, config, err := c.Client(c.Nodes()[0].Name)
	if err != nil {
		return err
	}
	config.QPS = -1
	config.ContentType, config.AcceptContentTypes = "application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf,application/json"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	if err := cordon(ctx, client, servers); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	h, err := newHollow(ctx, client, nodes)
	if err != nil {
		return err
	}
	defer h.wait()
	defer cancel()

	const idle = 5 * time.Second
	before, err := cpu(c)
	if err != nil {
		return err
	}
	select {
	case <-time.After(idle):
	case <-ctx.Done():
		return ctx.Err()
	}
	began, err := cpu(c)
	if err != nil {
		return err
	}
	mine, err := cpuOf(os.Getpid())
	if err != nil {
		return err
	}
	start := time.Now()
	bound, err := h.deploy(ctx, pods)
	if err != nil {
		return err
	}
	took := time.Since(start)
	ended, err := cpu(c)
	if err != nil {
		return err
	}
	mineEnded, err := cpuOf(os.Getpid())
	if err != nil {
		return err
	}
	each := func(d time.Duration) float64 { return round(d.Seconds() * 1000 / float64(pods)) }
	f := figure{
		Bench: "sched", Case: "deploy_to_running", Servers: servers, Nodes: nodes, Pods: pods, PerS: round(float64(pods) / took.Seconds()),
		P50: round(at(bound, 0.5)), P99: round(at(bound, 0.99)),
		CPU: each(ended - began), IdleCPU: round(100 * (began - before).Seconds() / idle.Seconds()), ClientCPU: each(mineEnded - mine),
		RSS: rss(c), Machine: fmt.Sprintf("%d cores, %s/%s", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH),
	}
	if nodes >= 5000 {
		f.Upstream = 680
	}
	return json.NewEncoder(os.Stdout).Encode(f)
}

func round(f float64) float64 { return float64(int64(f*100+0.5)) / 100 }

// at returns a percentile of sorted times, in ms.
func at(sorted []time.Duration, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))].Seconds() * 1000
}

// cpu is the processor time that all servers have taken.
func cpu(c *cluster.Netns) (sum time.Duration, err error) {
	for _, n := range c.Nodes() {
		pid, err := c.Pid(n.Name)
		if err != nil {
			return 0, err
		}
		d, err := cpuOf(pid)
		if err != nil {
			return 0, err
		}
		sum += d
	}
	return sum, nil
}

// cpuOf reads user and system time of a process, in ticks of 10 ms.
func cpuOf(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat: %q", pid, b)
	}
	var ticks int
	for _, f := range fields[11:13] {
		n, err := strconv.Atoi(f)
		if err != nil {
			return 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond, nil
}

// rss is the first server's, in MiB; it began the cluster and leads it.
func rss(c *cluster.Netns) float64 {
	pid, err := c.Pid(c.Nodes()[0].Name)
	if err != nil {
		return 0
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0
	}
	var size, resident int
	if _, err := fmt.Sscan(string(b), &size, &resident); err != nil {
		return 0
	}
	return round(float64(resident) * float64(os.Getpagesize()) / (1 << 20))
}
