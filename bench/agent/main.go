// Command agent measures the agent of one node: the real agent with podmon, images
// and pod network below an API in memory, in a network namespace of its own.
// Where containerd, runc and the CNI plugins are installed it puts the same load
// on a private containerd through its CRI, in turns with the agent, and says
// how the two compare. It prints one JSON object per figure. Times hold for the
// machine they were taken on; compare figures of one run.
//
//	make bin/podmon && cd bench && sudo go run ./agent
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
	"runtime/pprof"
	"slices"
	"strings"
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
	CPU     *float64 `json:"cpu_pct,omitempty"`        // of one core
	CPUTime *float64 `json:"cpu_ms_per_pod,omitempty"` // of all processes involved
	// Whose processor time it is; the API in memory is the agent's here.
	AgentCPU   *float64 `json:"agent_cpu_pct,omitempty"`
	PodmonCPU  *float64 `json:"podmon_cpu_pct,omitempty"` // its keeper included
	AppsCPU    *float64 `json:"apps_cpu_pct,omitempty"`
	AgentEach  *float64 `json:"agent_cpu_us_per_probe,omitempty"`
	PodmonEach *float64 `json:"podmon_cpu_us_per_probe,omitempty"`
	AppsEach   *float64 `json:"apps_cpu_us_per_probe,omitempty"`
	BytesEach  *float64 `json:"bytes_per_probe,omitempty"` // allocated by the agent
	BytesPerS  *float64 `json:"bytes_per_s,omitempty"`
	Peer       string   `json:"peer,omitempty"`
	PeerP50    *float64 `json:"peer_p50_ms,omitempty"`
	PeerP99    *float64 `json:"peer_p99_ms,omitempty"`
	PeerPerS   *float64 `json:"peer_per_s,omitempty"`
	PeerKiB    *float64 `json:"peer_kib_per_pod,omitempty"`
	PeerCPU    *float64 `json:"peer_cpu_ms_per_pod,omitempty"`
	// Ours divided by the peer's.
	RatioP50  *float64 `json:"ratio_p50,omitempty"`
	RatioP99  *float64 `json:"ratio_p99,omitempty"`
	RatioPerS *float64 `json:"ratio_per_s,omitempty"`
	RatioKiB  *float64 `json:"ratio_kib,omitempty"`
	Machine   string   `json:"machine"`
}

func (f figure) print() {
	f.Bench, f.Nodes, f.Machine = "agent", 1, describeMachine()
	if err := json.NewEncoder(os.Stdout).Encode(f); err != nil {
		panic(err) // stdout is gone
	}
}

// inNamespace is set in the process that measures.
const inNamespace = "CLUSTERD_BENCH_AGENT_NETNS"

// config is the command line.
type config struct {
	podmon string
	rounds int
	cases  string // separated by commas; empty: all
	// profiles is a directory for pprof's profiles of this process; empty: none.
	profiles string
	peer     bool
}

func main() {
	var cfg config
	flag.StringVar(&cfg.podmon, "podmon", "../bin/podmon", "podmon, from `make bin/podmon`")
	flag.IntVar(&cfg.rounds, "rounds", 3, "rounds of the cases with many pods")
	flag.StringVar(&cfg.cases, "cases", "", "cases to run: alone, parallel, exec, memory, idle, probes (all)")
	flag.StringVar(&cfg.profiles, "profiles", "", "a folder for processor and allocation profiles of the cases parallel, idle and probes")
	flag.BoolVar(&cfg.peer, "peer", true, "measure containerd too, where it is installed")
	flag.Parse()
	if err := run(cfg); err != nil {
		fmt.Fprintln(os.Stderr, "bench agent:", err)
		os.Exit(1)
	}
}

func run(cfg config) (err error) {
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
	if cfg.podmon, err = filepath.Abs(cfg.podmon); err != nil {
		return err
	}
	if _, err := os.Stat(cfg.podmon); err != nil {
		return fmt.Errorf("no podmon, run make bin/podmon: %w", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	n, err := newNode(ctx, cfg.podmon)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.end()) }()
	m := &measurement{node: n, rounds: cfg.rounds, profiles: cfg.profiles}
	if cfg.peer {
		peer, err := newContainerd(ctx, n.boxTar)
		if errors.Is(err, errNoPeer) {
			fmt.Fprintln(os.Stderr, "bench agent: without a peer:", err)
		} else if err != nil {
			return fmt.Errorf("containerd: %w", err)
		} else {
			m.peer = peer
			defer func() { err = errors.Join(err, peer.end()) }()
		}
	}
	return m.run(ctx, cfg.cases)
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

// measurement is one run of the cases.
type measurement struct {
	node   *node
	peer   *containerd // nil: not installed
	rounds int
	// profiles is where profiles go; "": there are none.
	profiles string
}

// profiled runs do and keeps what the processor did for this process, and what
// was allocated since its start, as NAME.cpu and NAME.allocs.
func (m *measurement) profiled(name string, do func() error) error {
	if m.profiles == "" {
		return do()
	}
	f, err := os.Create(filepath.Join(m.profiles, name+".cpu"))
	if err != nil {
		return err
	}
	defer f.Close()
	if err := pprof.StartCPUProfile(f); err != nil {
		return err
	}
	err = do()
	pprof.StopCPUProfile()
	if err != nil {
		return err
	}
	a, err := os.Create(filepath.Join(m.profiles, name+".allocs"))
	if err != nil {
		return err
	}
	return errors.Join(pprof.Lookup("allocs").WriteTo(a, 0), a.Close())
}

// run runs the named cases, or all.
func (m *measurement) run(ctx context.Context, only string) error {
	cases := []struct {
		name string
		run  func(context.Context) error
	}{{"alone", m.alone}, {"parallel", func(ctx context.Context) error {
		return m.profiled("parallel", func() error { return m.parallel(ctx) })
	}}, {"exec", m.execs}, {"memory", m.memory}, {"idle", m.idle}, {"probes", m.probes}}
	names := strings.Split(only, ",")
	for _, c := range cases {
		if only != "" && !slices.Contains(names, c.name) {
			continue
		}
		if err := c.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// times are how long something took, over and over.
type times []time.Duration

// at is a quantile in milliseconds; nil of nothing.
func (t times) at(q float64) *float64 {
	if len(t) == 0 {
		return nil
	}
	s := slices.Sorted(slices.Values(t))
	return num(float64(s[min(len(s)-1, int(q*float64(len(s))))].Microseconds()) / 1000)
}

func num(v float64) *float64 { return &v }

// ratio is nil where either is.
func ratio(ours, theirs *float64) *float64 {
	if ours == nil || theirs == nil || *theirs == 0 {
		return nil
	}
	return num(*ours / *theirs)
}
