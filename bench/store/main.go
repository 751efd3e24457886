// Command store measures raftstore and, when an etcd binary is on PATH, etcd
// beside it: three members each, in processes of their own, over loopback TCP,
// on real files with fsync. Rounds of the two alternate. It prints one JSON
// object per line: figures, then the goals that need both.
//
// Each side is called as an API server would call it: etcd through clientv3,
// ours in the process of the leader, and in that of a follower, which forwards.
// Times hold for the machine they were taken on; compare figures of one run.
//
//	make bench-store
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
	"runtime"
	"strings"
	"syscall"
	"time"
)

const (
	nodes     = 3
	valueSize = 1024
	// patience is how long anything may take on a busy machine.
	patience = time.Minute
)

func main() {
	b := bench{out: json.NewEncoder(os.Stdout)}
	var member, peers string
	flag.StringVar(&b.dir, "dir", "", "folder for the members' data, on the disk to be measured; default: a temporary one")
	flag.DurationVar(&b.dur, "for", 3*time.Second, "how long each round of a case runs")
	flag.IntVar(&b.rounds, "rounds", 3, "rounds of each case; the medians are printed")
	flag.IntVar(&b.keys, "keys", 100000, "keys for the cases of memory and restart")
	flag.DurationVar(&b.idle, "idle", 60*time.Second, "how long idle members are looked at")
	flag.StringVar(&b.only, "run", "", "run only the cases whose name contains one of these, separated by commas")
	flag.BoolVar(&b.alone, "alone", false, "do not measure etcd")
	flag.StringVar(&member, "member", "", "internal: be the member with this name")
	flag.StringVar(&peers, "peers", "", "internal: the members' addresses")
	flag.Parse()
	var err error
	if member != "" {
		err = serveMember(member, b.dir, peers)
	} else {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		err = b.run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// side is one of the two stores that are measured. Members are numbered.
type side interface {
	name() string
	start(ctx context.Context) error // all members; returns when one leads
	startMember(i int) error
	kill(i int)
	stop(sig os.Signal)
	close()
	pids() []int
	leader(ctx context.Context) (int, error)
	load(ctx context.Context, member int, l Load) (Times, error)
	stamp(ctx context.Context, member int, s Stamps) error
	receive(ctx context.Context, member, watchers, prefixes int) error
	received(member int) (Times, error)
	probe(ctx context.Context, member int, d time.Duration) ([]Success, error)
	count(ctx context.Context, member int, prefix string) (int64, error)
}

var (
	_ side = (*ours)(nil)
	_ side = (*etcd)(nil)
)

type bench struct {
	dir    string
	dur    time.Duration
	rounds int
	keys   int
	idle   time.Duration
	only   string
	alone  bool
	out    *json.Encoder
	peer   string // etcd's version; "": it is not measured
	goals  []goal
}

// wants says whether a case is to be run.
func (b *bench) wants(name string) bool {
	for part := range strings.SplitSeq(b.only, ",") {
		if strings.Contains(name, part) {
			return true
		}
	}
	return false
}

func (b *bench) run(ctx context.Context) (err error) {
	if b.dir == "" {
		if b.dir, err = os.MkdirTemp("", "bench-store-"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	}
	if version, err := exec.Command("etcd", "--version").Output(); err == nil && !b.alone {
		line, _, _ := strings.Cut(string(version), "\n")
		b.peer = "etcd " + strings.TrimPrefix(line, "etcd Version: ")
	}
	if err := b.machine("begin"); err != nil {
		return err
	}
	if err := b.withSides(ctx, "speed", b.speed); err != nil {
		return err
	}
	if err := b.withSides(ctx, "state", b.state); err != nil {
		return err
	}
	for _, g := range b.goals {
		if err := b.out.Encode(g); err != nil {
			return err
		}
	}
	return b.machine("end")
}

// machine says where and when this was measured.
func (b *bench) machine(when string) error {
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return err
	}
	return b.out.Encode(map[string]any{
		"bench": "store", "machine": when, "cpus": runtime.NumCPU(), "loadavg": strings.TrimSpace(string(load)),
		"peer": b.peer, "go": runtime.Version(), "round_s": b.dur.Seconds(), "rounds": b.rounds,
	})
}

// withSides runs f with fresh members of both sides, ours first.
func (b *bench) withSides(ctx context.Context, name string, f func(context.Context, []side) error) error {
	dir := filepath.Join(b.dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	o, err := newOurs(dir)
	if err != nil {
		return err
	}
	sides := []side{o}
	defer o.close()
	if b.peer != "" {
		e, err := newEtcd(dir)
		if err != nil {
			return err
		}
		defer e.close()
		sides = append(sides, e)
	}
	for _, s := range sides {
		if err := s.start(ctx); err != nil {
			return fmt.Errorf("start %s: %w", s.name(), err)
		}
	}
	return f(ctx, sides)
}
