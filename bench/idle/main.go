// Command idle measures what clusters of one and three nodes cost without
// requests: memory, processor time, wake-ups and bytes written to
// disk, a node. It prints one JSON object per figure and fails when one is
// beyond its bound, which are wide: they catch a loop that spins or a log that
// grows, not a slow machine.
//
// Two builds are compared by clusters that stand beside each other at the same time:
//
//	make bench-idle
//	go run ./idle -bin ../bin -beside OTHER -nodes 1
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
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/bench/internal/proc"
	"github.com/clusterd/clusterd/e2e/cluster"
)

// figure is one line of output, of one node; keys follow HOUSE.md, section 7.
type figure struct {
	Bench   string  `json:"bench"`
	Case    string  `json:"case"`
	Nodes   int     `json:"nodes"`
	Node    string  `json:"node"`
	Bin     string  `json:"bin,omitempty"` // where two builds are compared
	Seconds float64 `json:"seconds"`
	RSS     float64 `json:"rss_mib"`
	File    float64 `json:"file_mib"` // of RSS: pages of files, of which the kernel keeps one for all who use them
	CPU     float64 `json:"cpu_pct"`  // of one processor
	Wakeups float64 `json:"wakeups_per_s"`
	Written float64 `json:"written_mib_per_hour"`
}

// bounds of a figure: a node may cost so much when idle.
type bounds struct{ rss, cpu, wakeups, written float64 }

// check says which bounds a figure is beyond.
func (b bounds) check(f figure) error {
	var errs []error
	for _, one := range []struct {
		name    string
		is, may float64
	}{
		{"rss_mib", f.RSS, b.rss}, {"cpu_pct", f.CPU, b.cpu}, {"wakeups_per_s", f.Wakeups, b.wakeups}, {"written_mib_per_hour", f.Written, b.written},
	} {
		if one.is > one.may {
			errs = append(errs, fmt.Errorf("%d nodes, %s: %s is %.1f, at most %.1f is allowed", f.Nodes, f.Node, one.name, one.is, one.may))
		}
	}
	return errors.Join(errs...)
}

func main() {
	bin := flag.String("bin", "bin", "folder with clusterd and clusterctl")
	beside := flag.String("beside", "", "folder of another build, whose clusters stand beside those of the first")
	counts := flag.String("nodes", "1,3", "how many nodes the clusters have, one after the other")
	span := flag.Duration("for", time.Minute, "how long each cluster is watched")
	settle := flag.Duration("settle", 20*time.Second, "how long it is left alone before")
	var b bounds
	flag.Float64Var(&b.rss, "max-rss", 300, "most MiB a node may hold")
	flag.Float64Var(&b.cpu, "max-cpu", 10, "most percent of a processor")
	flag.Float64Var(&b.wakeups, "max-wakeups", 800, "most wake-ups a second")
	flag.Float64Var(&b.written, "max-written", 256, "most MiB an hour written to disk")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var errs []error
	bins := []string{*bin}
	if *beside != "" {
		bins = append(bins, *beside)
	}
	for count := range strings.SplitSeq(*counts, ",") {
		nodes, err := strconv.Atoi(count)
		if err != nil || nodes < 1 {
			errs = append(errs, fmt.Errorf("-nodes=%s: numbers from 1 on, separated by commas", *counts))
			break
		}
		errs = append(errs, measure(ctx, bins, nodes, *settle, *span, b))
	}
	if err := errors.Join(errs...); err != nil {
		fmt.Fprintln(os.Stderr, "bench idle:", err)
		os.Exit(1)
	}
}

// up makes a cluster, the number-th of those that stand at a time. down removes it.
func up(ctx context.Context, bin string, number, nodes int) (c *cluster.Netns, down func() error, err error) {
	if bin, err = filepath.Abs(bin); err != nil {
		return nil, nil, err
	}
	dir, err := os.MkdirTemp("", "clusterd-idle-")
	if err != nil {
		return nil, nil, err
	}
	bridge := "cdidle"
	if number > 0 {
		bridge += strconv.Itoa(number + 1)
	}
	c, err = cluster.Up(ctx, cluster.Config{
		Dir: filepath.Join(dir, "c"), Bin: bin, Nodes: nodes, Bridge: bridge,
		Subnet: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 87, byte(number), 0}), 24),
	})
	if err != nil {
		return nil, nil, err
	}
	down = func() error {
		if err := c.Down(context.WithoutCancel(ctx)); err != nil {
			return err // what holds mounts is not removed
		}
		return os.RemoveAll(dir)
	}
	if err := waitReady(ctx, c, nodes); err != nil {
		return nil, nil, errors.Join(err, down())
	}
	return c, down, nil
}

// measure makes a cluster of each build, leaves them alone, and prints what each node
// costs.
func measure(ctx context.Context, bins []string, nodes int, settle, span time.Duration, b bounds) (err error) {
	clusters := make([]*cluster.Netns, len(bins))
	for i, bin := range bins {
		c, down, err2 := up(ctx, bin, i, nodes)
		if err2 != nil {
			return err2
		}
		defer func() { err = errors.Join(err, down()) }()
		clusters[i] = c
	}
	if err := sleep(ctx, settle); err != nil {
		return err
	}
	type place struct {
		cluster int
		node    string
	}
	before := map[place]proc.Usage{}
	for i, c := range clusters {
		for _, n := range c.Nodes() {
			if before[place{i, n.Name}], err = proc.Of(c, n.Name); err != nil {
				return err
			}
		}
	}
	began := time.Now()
	if err := sleep(ctx, span); err != nil {
		return err
	}
	var beyond []error
	for i, c := range clusters {
		for _, n := range c.Nodes() {
			now, err := proc.Of(c, n.Name)
			if err != nil {
				return err
			}
			was, seconds := before[place{i, n.Name}], time.Since(began).Seconds()
			f := figure{
				Bench: "idle", Case: "server", Nodes: nodes, Node: n.Name, Seconds: round(seconds), RSS: round(now.RSS / (1 << 20)), File: round(now.File / (1 << 20)),
				CPU: round(100 * (now.CPU - was.CPU).Seconds() / seconds), Wakeups: round((now.Wakeups - was.Wakeups) / seconds),
				Written: round((now.Written - was.Written) / (1 << 20) / seconds * 3600),
			}
			if len(bins) > 1 {
				f.Bin = bins[i]
			}
			if err := json.NewEncoder(os.Stdout).Encode(f); err != nil {
				return err
			}
			beyond = append(beyond, b.check(f))
		}
	}
	return errors.Join(beyond...)
}

func round(x float64) float64 { return float64(int64(x*10+0.5)) / 10 }

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// waitReady waits until so many nodes are Ready.
func waitReady(ctx context.Context, c *cluster.Netns, nodes int) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	client, _, err := c.Client(c.Nodes()[0].Name)
	if err != nil {
		return err
	}
	for {
		ready := 0
		list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err == nil {
			for _, n := range list.Items {
				for _, cond := range n.Status.Conditions {
					if cond.Type == corev1.NodeReady && cond.Status == corev1.ConditionTrue {
						ready++
					}
				}
			}
		}
		if ready == nodes {
			return nil
		}
		if err := sleep(ctx, 200*time.Millisecond); err != nil {
			return fmt.Errorf("%d of %d nodes are Ready: %w", ready, nodes, err)
		}
	}
}
