// Command agents measures three servers with many agents: real servers, and
// agents that are the agent's own code over a runtime, images and a network in
// memory (see hollow.go). They join with a token, keep their tunnels, Leases and
// watches, and run pods; then a server is killed, a follower first, the leader
// then. It prints one JSON object per figure.
//
//	make bench-scale
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/member/pki"
)

// options are the command's flags.
type options struct {
	bin, dir, log, profiles string
	nodes, podsEach, atOnce int
	settle, span            time.Duration
	kill                    bool
}

func main() {
	var o options
	flag.StringVar(&o.bin, "bin", "../bin", "folder with clusterd and clusterctl")
	flag.StringVar(&o.dir, "dir", "/dev/shm", "where the hollow agents' folders are made")
	flag.StringVar(&o.log, "log", "", "a file for what hollow agents log; default: it is dropped")
	flag.StringVar(&o.profiles, "profiles", "", "a folder for profiles of this process and of servers that were built with -tags profile")
	flag.IntVar(&o.nodes, "nodes", 1000, "hollow agents")
	flag.IntVar(&o.podsEach, "pods-per-node", 10, "pods of each")
	flag.IntVar(&o.atOnce, "at-once", 16, "agents that join at one time")
	flag.DurationVar(&o.settle, "settle", time.Minute, "how long the cluster is left alone before it is measured at rest")
	flag.DurationVar(&o.span, "for", time.Minute, "how long it is measured at rest")
	flag.BoolVar(&o.kill, "kill", true, "kill a follower, and then the leader")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench agents:", err)
		os.Exit(1)
	}
}

// inotifyInstances is how many directories and files one user may watch: each agent
// takes one, and all of them are one user here.
const inotifyInstances = "/proc/sys/fs/inotify/max_user_instances"

// host makes this machine the one of all hollow agents: packets to them arrive
// here, and nothing answers them.
func host(ctx context.Context, nodes int) (undo func() error, err error) {
	if nodes > 4000 {
		return nil, fmt.Errorf("-nodes %d: %s has room for 4000", nodes, machines)
	}
	before, err := os.ReadFile(inotifyInstances)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(inotifyInstances, fmt.Appendf(nil, "%d", 2*nodes+512), 0o644); err != nil {
		return nil, err
	}
	route := func(do string) error {
		if out, err := exec.CommandContext(context.WithoutCancel(ctx), "ip", "route", do, "local", machines.String(), "dev", "lo").CombinedOutput(); err != nil {
			return fmt.Errorf("ip route %s local %s: %w: %s", do, machines, err, out)
		}
		return nil
	}
	if err := route("replace"); err != nil {
		return nil, errors.Join(err, os.WriteFile(inotifyInstances, before, 0o644))
	}
	return func() error { return errors.Join(route("del"), os.WriteFile(inotifyInstances, before, 0o644)) }, nil
}

// quiet sends what the agents' code logs to a file, or nowhere.
func quiet(file string) (*slog.Logger, func() error, error) {
	out, done := io.Discard, func() error { return nil }
	if file != "" {
		f, err := os.Create(file)
		if err != nil {
			return nil, nil, err
		}
		out, done = f, f.Close
	}
	log := slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelInfo}))
	slog.SetDefault(log)
	klog.SetSlogLogger(log)
	return log, done, nil
}

func run(ctx context.Context, o options) (err error) {
	if o.bin, err = filepath.Abs(o.bin); err != nil {
		return err
	}
	log, closeLog, err := quiet(o.log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeLog()) }()
	undo, err := host(ctx, o.nodes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, undo()) }()
	dir, err := os.MkdirTemp("", "clusterd-agents-")
	if err != nil {
		return err
	}
	hollowDir, err := os.MkdirTemp(o.dir, "clusterd-hollow-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(hollowDir)) }()
	c, err := cluster.Up(ctx, cluster.Config{
		Dir: filepath.Join(dir, "c"), Bin: o.bin, Nodes: 3, Bridge: "cdagents", Subnet: netip.MustParsePrefix("10.86.0.0/16"),
		Args:     []string{"--log-level=warn"},
		InitArgs: []string{"--cluster-cidr=" + podRange.String()}, // room for a network per node
	})
	if err != nil {
		return err
	}
	defer func() {
		if down := c.Down(context.WithoutCancel(ctx)); down != nil {
			err = errors.Join(err, down) // what holds mounts is not removed
			return
		}
		err = errors.Join(err, os.RemoveAll(dir))
	}()
	b := &bench{options: o, cluster: c, requests: newRequests(), log: log}
	b.settings = &settings{dir: hollowDir, pods: podRange, services: svcRange, requests: b.requests, log: log}
	for _, n := range c.Nodes() {
		b.settings.servers = append(b.settings.servers, netip.AddrPortFrom(n.Addr, serverPort))
	}
	if b.settings.token, err = token(ctx, c); err != nil {
		return err
	}
	agents, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		if b.fleet != nil {
			err = errors.Join(err, b.fleet.run.Wait())
		}
	}()
	return b.stages(ctx, agents)
}

// token makes one with which any number of agents may join.
func token(ctx context.Context, c *cluster.Netns) (pki.Token, error) {
	n := c.Nodes()[0]
	cmd := c.Exec(ctx, n.Name, c.Bin("clusterctl"), "token", "create", "--role", "agent", "--uses", "0", "-o", "json", "--kubeconfig", n.Kubeconfig())
	var out struct{ Token string }
	b, err := cmd.Output()
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil {
		return pki.Token{}, fmt.Errorf("make a token: %w: %s", err, b)
	}
	return pki.ParseToken(strings.TrimSpace(out.Token))
}

// apiOf is a client of one server's API.
func apiOf(c *cluster.Netns, server string) (kubernetes.Interface, error) {
	_, config, err := c.Client(server)
	if err != nil {
		return nil, err
	}
	config.QPS = -1
	config.ContentType, config.AcceptContentTypes = "application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf,application/json"
	return kubernetes.NewForConfig(config)
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func round(x float64) float64 { return float64(int64(x*10+0.5)) / 10 }

func machine() string {
	return fmt.Sprintf("%d cores, %s/%s", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH)
}
