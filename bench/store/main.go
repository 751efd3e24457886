// Command store measures raftstore, and etcd's server module beside it: three
// members each, in processes of their own that speak TLS with each other over
// loopback, on real files with fsync. Rounds of the two alternate. It prints one
// JSON object per line: figures, then the goals that need both.
//
// Speed is compared in three ways, and the case says which one it is of:
//
//	in-process/  Go calls in the member's process on both sides; etcd's by its
//	             v3client. What the stores themselves can do.
//	grpc/        one driver, clientv3 in another process, calls etcd's gRPC services
//	             of both; over raftstore they are a thin layer of this benchmark.
//	api-server/  what an API server sees: ours in its own process, etcd through
//	             clientv3. The other cases are of this kind, too.
//
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
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"go.etcd.io/etcd/api/v3/version"
)

const (
	nodes     = 3
	valueSize = 1024
	// timeout is how long anything may take on a busy machine.
	timeout = time.Minute
)

func main() {
	b := bench{out: json.NewEncoder(os.Stdout)}
	var member memberFlags
	flag.StringVar(&b.dir, "dir", "", "folder for the members' data, on the disk to be measured; default: a temporary one")
	flag.DurationVar(&b.dur, "for", 3*time.Second, "how long each round of a case runs")
	flag.IntVar(&b.rounds, "rounds", 3, "rounds of each case; the medians are printed")
	flag.IntVar(&b.keys, "keys", 100000, "keys for the cases of memory and restart")
	flag.IntVar(&b.silent, "silent", 20, "rounds of each case of a leader that falls silent")
	flag.DurationVar(&b.idle, "idle", 60*time.Second, "how long idle members are looked at")
	flag.StringVar(&b.only, "run", "", "run only the cases whose name contains one of these, separated by commas")
	flag.BoolVar(&b.alone, "alone", false, "do not measure etcd")
	flag.StringVar(&member.kind, "member", "", "internal: be a member of this store, ours or etcd")
	flag.StringVar(&member.name, "name", "", "internal: the member's name")
	flag.StringVar(&member.peers, "peers", "", "internal: the members' addresses")
	flag.StringVar(&member.client, "client", "", "internal: the address of the member's gRPC services")
	flag.Parse()
	var err error
	if member.kind != "" {
		member.dir = b.dir
		err = serveMember(member)
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

type bench struct {
	dir    string
	dur    time.Duration
	rounds int
	keys   int
	silent int
	idle   time.Duration
	only   string
	alone  bool
	out    *json.Encoder
	peer   string // etcd and its version; "": it is not measured
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
	if !b.alone {
		b.peer = "etcd " + version.Version
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
	if err := b.silentLeader(ctx); err != nil {
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

// newSides makes fresh members of both sides, ours first. They are to be closed,
// also after an error.
func (b *bench) newSides(name string, apart bool) (sides []*side, err error) {
	kinds := []string{"ours", "etcd"}
	if b.peer == "" {
		kinds = kinds[:1]
	}
	for _, kind := range kinds {
		s, err := newSide(kind, filepath.Join(b.dir, name), apart)
		if s != nil {
			sides = append(sides, s)
		}
		if err != nil {
			return sides, err
		}
	}
	return sides, nil
}

// withSides runs f with them.
func (b *bench) withSides(ctx context.Context, name string, f func(context.Context, []*side) error) error {
	sides, err := b.newSides(name, false)
	defer closeAll(sides)
	if err != nil {
		return err
	}
	for _, s := range sides {
		if err := s.start(ctx); err != nil {
			return fmt.Errorf("start %s: %w", s.kind, err)
		}
	}
	return f(ctx, sides)
}
