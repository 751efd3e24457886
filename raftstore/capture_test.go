package raftstore_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// TestMultiCapture: a capture, taken on any member, holds what was acknowledged
// before it and does not change.
func TestMultiCapture(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, nil)
	for i := range 30 {
		rev := mustPut(t, c.Leader(), fmt.Sprint("/k/", i), "x").Revision
		if i%10 != 9 {
			continue
		}
		snap, err := c.Follower().Capture(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		mustPut(t, c.Leader(), fmt.Sprint("/k/", i), "changed")
		keys := map[string]string{}
		err = snap.Changes(func(ch mvcc.Change) error {
			keys[ch.KV.Key] = string(ch.KV.Value)
			return nil
		})
		if err != nil || snap.Header().Digest.Revision < rev || keys[fmt.Sprint("/k/", i)] != "x" {
			t.Errorf("after %d writes: revision %d of %d, %v, %v", i+1, snap.Header().Digest.Revision, rev, keys, err)
		}
	}
}

// TestSnapshotLeavesRoom: a snapshot that would take the room which has to stay free
// is given up and leaves nothing behind, and none is begun without room. What it was
// taken for by a backup is had all the same.
func TestSnapshotLeavesRoom(t *testing.T) {
	t.Parallel()
	const least = 64 << 20
	var dir string
	var enough, little atomic.Bool
	c := raftstoretest.New(t, 1, func(cfg *raftstore.Config) {
		cfg.MinFreeBytes = least
		dir = filepath.Join(cfg.Dir, "snapshots")
		cfg.Inject(raftstore.Faults{Free: func(string) (int64, error) {
			var taken int64
			parts, _ := filepath.Glob(filepath.Join(dir, "*.tmp", "state.bin"))
			for _, part := range parts {
				if info, err := os.Stat(part); err == nil { // it may have gone meanwhile
					taken += info.Size()
				}
			}
			switch {
			case little.Load():
				return 1 << 20, nil
			case taken >= 1<<20 && !enough.Load():
				return least - 1, nil
			default:
				return 2 * least, nil
			}
		}})
	})
	s := c.Leader()
	fillIncompressible(t, s, 5)
	for _, short := range []bool{false, true} {
		little.Store(short)
		if short {
			_ = refusal(c, s) // the disk was looked at
		}
		snap, err := s.Capture(testContext(t))
		if err != nil || snap.Header().Digest.Keys < 5 {
			t.Errorf("short %v: capture: %v", short, err)
		}
		if err := s.Snapshot(testContext(t)); err == nil || !strings.Contains(err.Error(), "have to stay free") {
			t.Errorf("short %v: snapshot: %v", short, err)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 {
			t.Errorf("short %v: %v is left", short, left)
		}
	}
	enough.Store(true)
	little.Store(false)
	c.Wait("a snapshot, with room again", func() bool { return s.Snapshot(testContext(t)) == nil })
	if files, _ := filepath.Glob(filepath.Join(dir, "*", "state.bin")); len(files) != 1 {
		t.Errorf("with room: %v", files)
	}
}

// fillIncompressible puts so many MiB that a snapshot takes as much of the disk for.
func fillIncompressible(t *testing.T, s *raftstore.Store, n int) {
	t.Helper()
	rng := rand.NewChaCha8([32]byte{})
	for i := range n {
		value := make([]byte, 1<<20)
		_, _ = rng.Read(value)
		mustPut(t, s, fmt.Sprint("/k/", i), string(value))
	}
}

// TestCloseEndsSnapshot: a store that is closed does not finish the snapshot that is
// being written.
func TestCloseEndsSnapshot(t *testing.T) {
	t.Parallel()
	begun, goOn := make(chan struct{}), make(chan struct{})
	signal := sync.OnceFunc(func() { close(begun) })
	var dir string
	c := raftstoretest.New(t, 1, func(cfg *raftstore.Config) {
		dir = filepath.Join(cfg.Dir, "snapshots")
		cfg.Inject(raftstore.Faults{Free: func(string) (int64, error) {
			if parts, _ := filepath.Glob(filepath.Join(dir, "*.tmp", "state.bin")); len(parts) > 0 { // a slow disk
				signal()
				<-goOn
			}
			return 1 << 40, nil
		}})
	})
	release := sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(release)
	s := c.Leader()
	fillIncompressible(t, s, 5)
	want := s.Status().Keyspace
	snapshot := make(chan error, 1)
	go func() { snapshot <- s.Snapshot(testContext(t)) }()
	select {
	case <-begun:
	case err := <-snapshot:
		t.Fatalf("the snapshot: %v", err)
	}
	closed := make(chan struct{})
	go func() { defer close(closed); c.Stop("n0") }()
	c.Wait("the store to be closing", func() bool {
		_, err := s.Txn(testContext(t), put("/new", "x"))
		return errors.Is(err, raftstore.ErrClosed)
	})
	release()
	<-closed
	if err := <-snapshot; !errors.Is(err, raftstore.ErrClosed) {
		t.Errorf("the snapshot: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 {
		t.Errorf("it was finished, or something of it is left: %v", left)
	}
	c.Start("n0")
	if got := c.Leader().Status().Keyspace; got.Keys < want.Keys {
		t.Errorf("%+v, was %+v", got, want)
	}
}
