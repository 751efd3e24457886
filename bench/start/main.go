// Command start measures the CPU time that nodes take from their first instruction until
// all are Ready: of a new cluster, and of servers that start again with its data. It
// prints one JSON object per figure. CPU time is what a busy machine changes least; two
// builds are compared in turn, round by round:
//
//	make bench-start
//	go run ./start -bin ../bin -beside OTHER -nodes 1
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
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/bench/internal/proc"
	"github.com/clusterd/clusterd/e2e/cluster"
)

// figure is one line of output: the median of rounds, for a node of one case.
type figure struct {
	Bench  string  `json:"bench"`
	Case   string  `json:"case"` // new or again
	Nodes  int     `json:"nodes"`
	Bin    string  `json:"bin"`
	Rounds int     `json:"rounds"`
	CPU    float64 `json:"cpu_ms"` // of clusterd and podmon, of one node on average
	Least  float64 `json:"cpu_least_ms"`
	Most   float64 `json:"cpu_most_ms"`
}

// key is what figures are kept apart by.
type key struct {
	bin, part string
	nodes     int
}

func main() {
	bin := flag.String("bin", "bin", "folder with clusterd and clusterctl")
	beside := flag.String("beside", "", "folder of another build, measured in turn with the first")
	counts := flag.String("nodes", "1,3", "how many servers the clusters have")
	rounds := flag.Int("rounds", 5, "rounds of each case")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	bins := []string{*bin}
	if *beside != "" {
		bins = append(bins, *beside)
	}
	if err := run(ctx, bins, *counts, *rounds); err != nil {
		fmt.Fprintln(os.Stderr, "bench start:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, bins []string, counts string, rounds int) error {
	if rounds < 1 {
		return fmt.Errorf("-rounds=%d: a number from 1 on", rounds)
	}
	for count := range strings.SplitSeq(counts, ",") {
		nodes, err := strconv.Atoi(count)
		if err != nil || nodes < 1 {
			return fmt.Errorf("-nodes=%s: numbers from 1 on, separated by commas", counts)
		}
		taken := map[key][]float64{}
		for range rounds {
			for _, bin := range bins {
				first, second, err := once(ctx, bin, nodes)
				if err != nil {
					return fmt.Errorf("%s, %d nodes: %w", bin, nodes, err)
				}
				taken[key{bin, "new", nodes}] = append(taken[key{bin, "new", nodes}], first)
				taken[key{bin, "again", nodes}] = append(taken[key{bin, "again", nodes}], second)
			}
		}
		for _, bin := range bins {
			for _, part := range []string{"new", "again"} {
				all := taken[key{bin, part, nodes}]
				slices.Sort(all)
				f := figure{Bench: "start", Case: part, Nodes: nodes, Bin: bin, Rounds: rounds, CPU: all[len(all)/2], Least: all[0], Most: all[len(all)-1]}
				if err := json.NewEncoder(os.Stdout).Encode(f); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// once makes a cluster, stops its servers, starts them again, and returns the
// milliseconds of CPU that a node took for each.
func once(ctx context.Context, bin string, nodes int) (first, second float64, err error) {
	if bin, err = filepath.Abs(bin); err != nil {
		return 0, 0, err
	}
	dir, err := os.MkdirTemp("", "clusterd-start-")
	if err != nil {
		return 0, 0, err
	}
	c, err := cluster.Up(ctx, cluster.Config{
		Dir: filepath.Join(dir, "c"), Bin: bin, Nodes: nodes, Bridge: "cdstart",
		Subnet: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 88, 0, 0}), 24),
	})
	if err != nil {
		return 0, 0, err
	}
	defer func() {
		if err2 := c.Down(context.WithoutCancel(ctx)); err2 != nil {
			err = errors.Join(err, err2) // what holds mounts is not removed
			return
		}
		err = errors.Join(err, os.RemoveAll(dir))
	}()
	if err := waitReady(ctx, c, time.Time{}); err != nil {
		return 0, 0, err
	}
	if first, err = used(c); err != nil {
		return 0, 0, err
	}
	for _, n := range c.Nodes() {
		if err := c.Stop(ctx, n.Name); err != nil {
			return 0, 0, err
		}
	}
	began := time.Now()
	podmon, err := used(c) // lives on
	if err != nil {
		return 0, 0, err
	}
	for _, n := range c.Nodes() {
		if err := c.Start(ctx, n.Name); err != nil {
			return 0, 0, err
		}
	}
	if err := waitReady(ctx, c, began); err != nil {
		return 0, 0, err
	}
	second, err = used(c)
	return first, second - podmon, err
}

// used is the CPU time of the processes of a node, on average, in milliseconds.
func used(c *cluster.Netns) (float64, error) {
	var sum time.Duration
	for _, n := range c.Nodes() {
		u, err := proc.Of(c, n.Name)
		if err != nil {
			return 0, err
		}
		sum += u.CPU
	}
	return float64(sum.Milliseconds()) / float64(len(c.Nodes())), nil
}

// waitReady waits until all nodes are Ready, and have said so since a time.
func waitReady(ctx context.Context, c *cluster.Netns, since time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
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
				lease, err := client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, n.Name, metav1.GetOptions{})
				if err != nil || lease.Spec.RenewTime == nil || lease.Spec.RenewTime.Time.Before(since) {
					continue
				}
				for _, cond := range n.Status.Conditions {
					if cond.Type == corev1.NodeReady && cond.Status == corev1.ConditionTrue {
						ready++
					}
				}
			}
		}
		if ready == len(c.Nodes()) {
			return nil
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("%d of %d nodes are Ready: %w", ready, len(c.Nodes()), ctx.Err())
		}
	}
}
