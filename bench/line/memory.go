package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// settle lets a cluster come to rest before memory is read.
const settle = 5 * time.Second

// idleMemory prints what clusterd holds with nothing deployed, the mean of the
// nodes.
func idleMemory(ctx context.Context, c *cluster.Netns, nodes int) error {
	if err := sleep(ctx, settle); err != nil {
		return err
	}
	rss, err := clusterdRSS(c)
	if err != nil {
		return err
	}
	figure{Case: "rss_idle", Nodes: nodes, RSS: &rss}.print()
	return nil
}

// podMemory prints clusterd's memory with 50 pods, and what one pod costs
// outside clusterd and its app: podmon and the pauses, proportional set size.
func podMemory(ctx context.Context, c *cluster.Netns, w *workload, nodes int) error {
	const pods = 50
	before, err := helpersPSS(c)
	if err != nil {
		return err
	}
	if _, err := w.apply(ctx, "bench-memory", pods); err != nil {
		return err
	}
	if err := sleep(ctx, settle); err != nil {
		return err
	}
	rss, err := clusterdRSS(c)
	if err != nil {
		return err
	}
	after, err := helpersPSS(c)
	if err != nil {
		return err
	}
	figure{Case: "rss_with_pods", Nodes: nodes, Pods: pods, RSS: &rss}.print()
	kib := (after - before) / pods
	figure{Case: "pod_outside_app", Nodes: nodes, Pods: pods, KiB: &kib}.print()
	return w.remove(ctx, "bench-memory")
}

func clusterdRSS(c *cluster.Netns) (mib float64, err error) {
	for _, n := range c.Nodes() {
		pid, err := c.Pid(n.Name)
		if err != nil {
			return 0, err
		}
		kib, err := procKiB(filepath.Join("/proc", strconv.Itoa(pid), "status"), "VmRSS:")
		if err != nil {
			return 0, err
		}
		mib += kib / 1024
	}
	return mib / float64(len(c.Nodes())), nil
}

// helpersPSS sums the proportional set size (proc(5), smaps_rollup) of podmon
// and all that it runs but the app.
func helpersPSS(c *cluster.Netns) (kib float64, err error) {
	for _, n := range c.Nodes() {
		pids, err := c.Processes(n.Name)
		if err != nil {
			return 0, err
		}
		for _, pid := range pids {
			comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
			if err != nil {
				continue // it ended
			}
			switch strings.TrimSpace(string(comm)) {
			case "clusterd", "hello":
				continue
			}
			pss, err := procKiB(fmt.Sprintf("/proc/%d/smaps_rollup", pid), "Pss:")
			if err != nil {
				continue
			}
			kib += pss
		}
	}
	return kib, nil
}

// procKiB reads one "Key: 123 kB" line.
func procKiB(path, key string) (float64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if fields := strings.Fields(s.Text()); len(fields) >= 2 && fields[0] == key {
			return strconv.ParseFloat(fields[1], 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s", path, key)
}

func describeMachine() string {
	mem, _ := procKiB("/proc/meminfo", "MemTotal:")
	release, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	return fmt.Sprintf("%d cores, %.0f GiB, Linux %s", runtime.NumCPU(), mem/1024/1024, strings.TrimSpace(string(release)))
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
