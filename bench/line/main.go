// Command line measures the whole line, from apply to Running, on clusters of
// network namespaces on this machine, and prints one JSON object per figure.
// Times hold for the machine they were taken on; compare figures of one run.
//
//	make bench-line
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"time"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// figure is one line of output. Keys follow HOUSE.md, section 7.
type figure struct {
	Bench   string   `json:"bench"`
	Case    string   `json:"case"`
	Nodes   int      `json:"nodes"`
	Pods    int      `json:"pods,omitempty"`
	Rounds  int      `json:"rounds,omitempty"`
	P50     *float64 `json:"p50_ms,omitempty"`
	P99     *float64 `json:"p99_ms,omitempty"`
	Max     *float64 `json:"max_ms,omitempty"`
	PerS    *float64 `json:"per_s,omitempty"`
	RSS     *float64 `json:"rss_mib,omitempty"`
	KiB     *float64 `json:"kib_per_pod,omitempty"`
	Machine string   `json:"machine"`
}

var machine string

func (f figure) print() {
	f.Bench, f.Machine = "line", machine
	if err := json.NewEncoder(os.Stdout).Encode(f); err != nil {
		panic(err) // stdout is gone
	}
}

func main() {
	bin := flag.String("bin", "../bin", "folder with clusterd and clusterctl")
	image := flag.String("image", "../bin/hello.tar", "demo image, from `make image`")
	rounds := flag.Int("rounds", 5, "rounds of each case")
	flag.Parse()
	machine = describeMachine()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *bin, *image, *rounds); err != nil {
		fmt.Fprintln(os.Stderr, "bench line:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, bin, image string, rounds int) error {
	bin, err := filepath.Abs(bin)
	if err != nil {
		return err
	}
	if image, err = filepath.Abs(image); err != nil {
		return err
	}
	if err := benchDev(ctx, bin, image, rounds); err != nil {
		return fmt.Errorf("dev: %w", err)
	}
	for _, nodes := range []int{1, 3} {
		if err := benchCluster(ctx, bin, image, nodes, rounds); err != nil {
			return fmt.Errorf("%d nodes: %w", nodes, err)
		}
	}
	return nil
}

// benchCluster measures one cluster: its memory when idle, the time from apply
// to Running for several sizes, and what each pod costs outside its app.
func benchCluster(ctx context.Context, bin, image string, nodes, rounds int) (err error) {
	dir, err := os.MkdirTemp("", "clusterd-bench-")
	if err != nil {
		return err
	}
	c, err := cluster.Up(ctx, cluster.Config{
		Dir: filepath.Join(dir, "c"), Bin: bin, Nodes: nodes, Bridge: "cdbench", Subnet: netip.MustParsePrefix("10.88.0.0/24"),
		Args: []string{"--log-level=warn", "--max-pods=250"},
	})
	if err != nil {
		return err
	}
	defer func() {
		down := c.Down(context.WithoutCancel(ctx))
		err = firstError(err, down, os.RemoveAll(dir))
	}()
	w, err := newWorkload(c)
	if err != nil {
		return err
	}
	if err := w.waitNodes(ctx, nodes); err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, c.Bin("clusterctl"), "--kubeconfig", c.Nodes()[0].Kubeconfig(), "image", "load", image).CombinedOutput(); err != nil {
		return fmt.Errorf("load the image: %w: %s", err, out)
	}
	if err := idleMemory(ctx, c, nodes); err != nil {
		return err
	}
	for _, pods := range []int{1, 10, 100} {
		n := rounds
		if pods == 1 {
			n = rounds * 4
		}
		var all []time.Duration
		var total time.Duration
		for i := range n {
			took, err := w.applyAndWait(ctx, fmt.Sprintf("bench-%d-%d", pods, i), pods)
			if err != nil {
				return fmt.Errorf("%d pods: %w", pods, err)
			}
			all = append(all, took...)
			total += slices.Max(took)
		}
		f := figure{Case: "apply_to_running", Nodes: nodes, Pods: pods, Rounds: n}
		f.setTimes(all)
		perS := float64(pods*n) / total.Seconds()
		f.PerS = &perS
		f.print()
	}
	return podMemory(ctx, c, w, nodes)
}

// setTimes fills the percentiles.
func (f *figure) setTimes(d []time.Duration) {
	slices.Sort(d)
	at := func(q float64) *float64 {
		ms := float64(d[min(len(d)-1, int(q*float64(len(d))))].Microseconds()) / 1000
		return &ms
	}
	f.P50, f.P99, f.Max = at(0.5), at(0.99), at(1)
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
