// Command agent measures one node's hands: the real agent with podmon, images
// and pod network below an API in memory, in a network namespace of its own.
// It prints one JSON object per figure. Times hold for the machine they were
// taken on; compare figures of one run.
//
//	make bin/podmon && sudo go run ./bench/agent
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
)

// figure is one line of output. Keys follow HOUSE.md, section 7.
type figure struct {
	Bench   string   `json:"bench"`
	Case    string   `json:"case"`
	Nodes   int      `json:"nodes"`
	Clients int      `json:"clients,omitempty"` // pods under way at a time
	Pods    int      `json:"pods,omitempty"`
	P50     *float64 `json:"p50_ms,omitempty"`
	P99     *float64 `json:"p99_ms,omitempty"`
	Max     *float64 `json:"max_ms,omitempty"`
	PerS    *float64 `json:"per_s,omitempty"`
	RSS     *float64 `json:"rss_mib,omitempty"`
	KiB     *float64 `json:"kib_per_pod,omitempty"`
	Machine string   `json:"machine"`
}

func (f figure) print() {
	f.Bench, f.Nodes, f.Machine = "agent", 1, describeMachine()
	if err := json.NewEncoder(os.Stdout).Encode(f); err != nil {
		panic(err) // stdout is gone
	}
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

// inNamespace is set in the process that measures.
const inNamespace = "CLUSTERD_BENCH_AGENT_NETNS"

func main() {
	podmon := flag.String("podmon", "bin/podmon", "podmon, from `make bin/podmon`")
	rounds := flag.Int("rounds", 3, "rounds of the cases with many pods")
	flag.Parse()
	if err := run(*podmon, *rounds); err != nil {
		fmt.Fprintln(os.Stderr, "bench agent:", err)
		os.Exit(1)
	}
}

func run(podmon string, rounds int) error {
	if os.Geteuid() != 0 {
		return errors.New("containers need root")
	}
	if os.Getenv(inNamespace) == "" {
		return reexec()
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	if podmon, err = filepath.Abs(podmon); err != nil {
		return err
	}
	if _, err := os.Stat(podmon); err != nil {
		return fmt.Errorf("no podmon, run make bin/podmon: %w", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	n, err := newNode(ctx, podmon)
	if err != nil {
		return err
	}
	return errors.Join(measure(ctx, n, rounds), n.end())
}

// reexec runs this program again in a network namespace of its own, so that
// nothing of the machine's network is touched and all of it goes at the end.
func reexec() error {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inNamespace+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	return cmd.Run()
}

// measure runs all cases.
func measure(ctx context.Context, n *node, rounds int) error {
	if err := n.alone(ctx, 20*rounds); err != nil {
		return fmt.Errorf("alone: %w", err)
	}
	if err := n.parallel(ctx, 16, 64, rounds); err != nil {
		return fmt.Errorf("parallel: %w", err)
	}
	if err := n.execs(ctx, 40*rounds); err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	if err := n.memory(ctx, 50); err != nil {
		return fmt.Errorf("memory: %w", err)
	}
	return nil
}
