package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

const (
	folder  = "/registry/core/configmaps/default/"
	deletes = 10_000
	// settle is how long a store that is done may take to write a last snapshot
	// and give memory back.
	settle  = 30 * time.Second
	timeout = 10 * time.Minute
)

func key(i int) string { return fmt.Sprintf("%sobject-%07d", folder, i) }

// work does one phase, prints its figure and ends.
func work(o options, phase string) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	f := figure{Bench: "store-scale", Case: phase, Nodes: 1, Size: o.size, Objects: o.objects, Values: o.values}
	stop, err := profile(o, phase)
	if err != nil {
		return err
	}
	began := time.Now()
	s, err := open(o)
	if err != nil {
		return err
	}
	f.Open = time.Since(began).Seconds()
	if phase == "load" {
		if err := s.Bootstrap(); err != nil {
			return err
		}
	}
	if err := serves(ctx, s); err != nil {
		return err
	}
	f.Seconds, f.CPU = time.Since(began).Seconds(), processor()
	switch phase {
	case "load", "overwrite":
		f.Open, f.Clients = 0, o.clients
		began = time.Now()
		if err := fill(ctx, s, o, phase); err != nil {
			return err
		}
		f.Seconds, f.CPU = time.Since(began).Seconds(), processor()-f.CPU
		f.PerS = float64(o.objects) / f.Seconds
	case "delete":
		f.Open, f.Clients = 0, o.clients
		if f.Seconds, err = remove(ctx, s, o); err != nil {
			return err
		}
		f.CPU = processor() - f.CPU
		f.PerS = float64(min(deletes, o.objects)) / f.Seconds
	}
	stop()
	live := float64(s.Status().Keyspace.Bytes)
	f.measure(o, live)
	if err := heap(o, phase); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(f)
}

func open(o options) (*raftstore.Store, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	return raftstore.Open(raftstore.Config{
		ID: "n0", Dir: filepath.Join(o.dir, "n0"), Listener: l,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		Dial:   func(context.Context, string) (net.Conn, error) { return nil, errors.New("there is no other member") },
	})
}

// serves returns when a linearizable read is answered.
func serves(ctx context.Context, s *raftstore.Store) error {
	for {
		_, _, err := s.Get(ctx, key(0), raftstore.ReadOptions{})
		if err == nil || ctx.Err() != nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

// fill writes every object once.
func fill(ctx context.Context, s *raftstore.Store, o options, phase string) error {
	var (
		next  atomic.Int64
		wg    sync.WaitGroup
		errs  = make([]error, o.clients)
		salt  = uint64(len(phase))
		total = int64(o.objects)
	)
	for c := range o.clients {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < total; i = next.Add(1) - 1 {
				t := mvcc.Txn{Origin: "bench", Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: key(int(i)), Value: value(o, uint64(i), salt)}}}
				if _, err := s.Txn(ctx, t); err != nil {
					errs[c] = err
					return
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// value is an object of o.size bytes: the same for the same numbers.
func value(o options, i, salt uint64) []byte {
	r := rand.New(rand.NewPCG(i, salt))
	b := make([]byte, 0, o.size+64)
	if o.values == "object" {
		b = fmt.Appendf(b, `{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"object-%07d","namespace":"default","uid":"%08x-%04x-4%03x-8%03x-%012x",`+
			`"creationTimestamp":"2026-01-%02dT%02d:%02d:%02dZ","labels":{"app.kubernetes.io/name":"shop","app.kubernetes.io/instance":"shop-%d"},`+
			`"managedFields":[{"manager":"clusterctl","operation":"Update","apiVersion":"v1","time":"2026-01-01T00:00:00Z","fieldsType":"FieldsV1","fieldsV1":{"f:data":{".":{},"f:settings":{}},"f:metadata":{"f:labels":{".":{},"f:app.kubernetes.io/name":{}}}}}]},"data":{"settings":"`,
			i, r.Uint32(), r.IntN(1<<16), r.IntN(1<<12), r.IntN(1<<12), r.Int64N(1<<48), 1+r.IntN(28), r.IntN(24), r.IntN(60), r.IntN(60), r.IntN(100))
		for n := 0; len(b) < o.size-4; n++ {
			b = fmt.Appendf(b, `setting-%d=%x\n`, n, r.Uint64())
		}
		b = append(b[:o.size-4], `"}}`+"\n"...)
		return b
	}
	for len(b) < o.size {
		b = append(b, byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32()))
	}
	return b[:o.size]
}

// measure waits until the process's memory and its directory get no smaller, and
// notes them.
func (f *figure) measure(o options, live float64) {
	quiet, last := 0, 0.0
	for end := time.Now().Add(settle); time.Now().Before(end) && quiet < 5; {
		time.Sleep(time.Second)
		rss, _ := memory()
		disk := folderSize(o.dir)
		if now := rss + disk; now == last || (last-now)*(last-now) < 1 {
			quiet++
		} else {
			quiet, last = 0, now
		}
	}
	f.RSS, f.Peak = memory()
	f.PerObject = f.RSS * 1024 / float64(o.objects)
	f.Disk = folderSize(filepath.Join(o.dir, "n0"))
	f.Snapshots = folderSize(filepath.Join(o.dir, "n0", "snapshots"))
	f.DiskRatio = f.Disk * (1 << 20) / live
}

// processor is the time that this process has had of the processors, in
// seconds.
func processor() float64 {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// memory is the process's resident memory now, and the most it ever was, in
// MiB.
func memory() (rss, peak float64) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, 0
	}
	for line := range strings.Lines(string(b)) {
		name, rest, _ := strings.Cut(line, ":")
		fields := strings.Fields(rest)
		if len(fields) == 0 {
			continue
		}
		kib, _ := strconv.ParseFloat(fields[0], 64)
		switch name {
		case "VmRSS":
			rss = kib / 1024
		case "VmHWM":
			peak = kib / 1024
		}
	}
	return rss, peak
}

// folderSize is what a directory's files take on disk, in MiB.
func folderSize(dir string) float64 {
	var blocks int64
	_ = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return nil // it is gone
		}
		if info, err := e.Info(); err == nil {
			blocks += info.Sys().(*syscall.Stat_t).Blocks
		}
		return nil
	})
	return float64(blocks) * 512 / (1 << 20)
}

// profile begins a processor profile of the phase, if one was asked for.
func profile(o options, phase string) (stop func(), err error) {
	if o.profile == "" {
		return func() {}, nil
	}
	f, err := os.Create(filepath.Join(o.profile, phase+".cpu"))
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() {
		pprof.StopCPUProfile()
		_ = f.Close()
	}, nil
}

func heap(o options, phase string) error {
	if o.profile == "" {
		return nil
	}
	f, err := os.Create(filepath.Join(o.profile, phase+".heap"))
	if err != nil {
		return err
	}
	return errors.Join(pprof.WriteHeapProfile(f), f.Close())
}
