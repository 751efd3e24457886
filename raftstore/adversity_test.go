package raftstore_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// another waits until a member other than that one leads.
func another(c *raftstoretest.Cluster, than string) (leader string) {
	c.Wait("another leader than "+than, func() bool {
		for id, s := range c.Running() {
			if id != than && s.IsLeader() {
				leader = id
				return true
			}
		}
		return false
	})
	return leader
}

// A leader that can only hear, or only speak, is replaced, and no client gets a
// wrong answer meanwhile.
func TestMultiOneWayPartition(t *testing.T) {
	for name, fault := range map[string]func(c *raftstoretest.Cluster, id string, on bool){
		"mute": (*raftstoretest.Cluster).Mute,
		"deaf": (*raftstoretest.Cluster).Deafen,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := raftstoretest.New(t, 3, nil)
			h := startHistory(t, c)
			h.more(100)
			victim := c.LeaderID()
			fault(c, victim, true)
			another(c, victim)
			h.more(100)
			fault(c, victim, false)
			h.more(100)
			h.check()
		})
	}
}

// Clocks that are set do no harm: nothing expires for it, nothing is reordered.
func TestMultiClockJumps(t *testing.T) {
	t.Parallel()
	offsets := map[string]*atomic.Int64{"n0": {}, "n1": {}, "n2": {}}
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		offset := offsets[cfg.ID]
		cfg.Inject(raftstore.Faults{Wall: func() time.Time { return time.Now().Add(time.Duration(offset.Load())) }})
	})
	if _, err := c.Leader().Txn(testContext(t), mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/lease", Value: []byte("x"), TTL: 1800}}}); err != nil {
		t.Fatal(err)
	}
	h := startHistory(t, c)
	for i, jump := range []time.Duration{time.Hour, -time.Hour, time.Hour, -2 * time.Hour} {
		h.more(60)
		leader := c.LeaderID()
		for id, offset := range offsets {
			if i%2 == 0 || id == leader {
				offset.Add(int64(jump))
			}
		}
		h.more(60)
		if i%2 == 0 {
			c.Wait("leadership to be handed over", func() bool { return c.Leader().TransferLeadership(testContext(t)) == nil })
		}
	}
	h.check()
	if got := get(t, c.Leader(), "/lease"); got != "x" {
		t.Error("a key of half an hour has expired within seconds")
	}
}

// faultyLog is a log whose writes hang or fail on request.
type faultyLog struct {
	raft.LogStore
	mu   sync.Mutex
	hang chan struct{} // writes wait until it is closed; nil: they do not
	err  error
}

func (l *faultyLog) set(hang chan struct{}, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hang, l.err = hang, err
}

func (l *faultyLog) StoreLogs(es []*raft.Log) error {
	l.mu.Lock()
	hang, err := l.hang, l.err
	l.mu.Unlock()
	if hang != nil {
		<-hang
	}
	if err != nil {
		return err
	}
	return l.LogStore.StoreLogs(es)
}

func (l *faultyLog) StoreLog(e *raft.Log) error { return l.StoreLogs([]*raft.Log{e}) }

// IsMonotonic keeps what the log below says.
func (l *faultyLog) IsMonotonic() bool { return l.LogStore.(raft.MonotonicLogStore).IsMonotonic() }

// faultyDisks gives each member a faulty log and a figure for its free space.
type faultyDisks struct {
	mu   sync.Mutex
	logs map[string]*faultyLog
	free map[string]*atomic.Int64
}

func newFaultyDisks() *faultyDisks {
	d := &faultyDisks{logs: map[string]*faultyLog{}, free: map[string]*atomic.Int64{}}
	for _, id := range []string{"n0", "n1", "n2"} {
		d.free[id] = &atomic.Int64{}
		d.free[id].Store(1 << 40)
	}
	return d
}

func (d *faultyDisks) config(cfg *raftstore.Config) {
	id := cfg.ID
	cfg.Inject(raftstore.Faults{
		Log: func(l raft.LogStore) raft.LogStore {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.logs[id] = &faultyLog{LogStore: l}
			return d.logs[id]
		},
		Free: func(string) (int64, error) { return d.free[id].Load(), nil },
	})
}

func (d *faultyDisks) log(id string) *faultyLog {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.logs[id]
}

// A leader whose disk hangs loses its leadership, though it could go on sending
// heartbeats; reads and writes go on.
func TestMultiSlowDisk(t *testing.T) {
	t.Parallel()
	disks := newFaultyDisks()
	c := raftstoretest.New(t, 3, disks.config)
	h := startHistory(t, c)
	h.more(100)
	slow := c.LeaderID()
	hang := make(chan struct{})
	disks.log(slow).set(hang, nil)
	release := sync.OnceFunc(func() {
		disks.log(slow).set(nil, nil)
		close(hang)
	})
	t.Cleanup(release) // before the members are closed, whatever happens
	leader := another(c, slow)
	mustPut(t, c.Store(leader), "/meanwhile", "x")
	for id, s := range c.Running() {
		if id == slow {
			continue
		}
		if got := get(t, s, "/meanwhile"); got != "x" {
			t.Errorf("%s reads %q", id, got)
		}
	}
	h.more(100)
	release()
	h.more(100)
	h.check()
}

// A member that cannot keep up sends its readers elsewhere, instead of letting
// them wait for as long as they would.
func TestMultiStuckFollowerTellsReaders(t *testing.T) {
	t.Parallel()
	disks := newFaultyDisks()
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		raftstoretest.Steady(cfg)
		disks.config(cfg)
		cfg.LeaderWait = time.Second
	})
	s := c.Follower()
	id := s.Status().ID
	hang := make(chan struct{})
	disks.log(id).set(hang, nil)
	release := sync.OnceFunc(func() {
		disks.log(id).set(nil, nil)
		close(hang)
	})
	t.Cleanup(release)
	mustPut(t, c.Leader(), "/k", "x")
	if kv, _, err := s.Get(testContext(t), "/k", raftstore.ReadOptions{}); !errors.Is(err, raftstore.ErrNoLeader) {
		t.Errorf("%+v, %v", kv, err)
	}
	release()
	c.Wait("it to catch up", func() bool {
		kv, _, err := s.Get(testContext(t), "/k", raftstore.ReadOptions{})
		return err == nil && string(kv.Value) == "x"
	})
}

// Writes through a follower whose callers give up leave nothing behind there: the
// leader does not answer those that get through.
func TestMultiGivenUpWritesAreForgotten(t *testing.T) {
	t.Parallel()
	disks := newFaultyDisks()
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		raftstoretest.Steady(cfg)
		disks.config(cfg)
	})
	leader, s := c.LeaderID(), c.Follower()
	mustPut(t, s, "/k", "x")
	hang := make(chan struct{})
	disks.log(leader).set(hang, nil)
	release := sync.OnceFunc(func() {
		disks.log(leader).set(nil, nil)
		close(hang)
	})
	t.Cleanup(release)
	for i := range 10 {
		ctx, cancel := context.WithTimeout(testContext(t), 20*time.Millisecond)
		if _, err := s.Txn(ctx, put(fmt.Sprint("/k/", i), "x")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("write %d, while the leader's log hangs: %v", i, err)
		}
		cancel()
	}
	c.Wait("nothing to wait for the leader any more", func() bool { return s.PendingCalls() == 0 })
	release()
	mustPut(t, s, "/k", "y")
}

// A leader short of room hands over to one that has some. Nothing is refused.
func TestMultiLeaderWithoutRoom(t *testing.T) {
	t.Parallel()
	disks := newFaultyDisks()
	c := raftstoretest.New(t, 3, disks.config)
	poor := c.LeaderID()
	disks.free[poor].Store(1 << 20)
	rich := another(c, poor)
	if _, err := c.Store(poor).Txn(testContext(t), put("/through/the/poor", "x")); err != nil {
		t.Error(err)
	}
	if rich == poor {
		t.Error("it leads still")
	}
}

// refusal waits until a new key is refused for want of room, and certainly not
// written.
func refusal(c *raftstoretest.Cluster, s *raftstore.Store) (err error) {
	n := 0
	c.Wait("a new key to be refused", func() bool {
		n++                                                                   // another key each time: an earlier one may have been taken
		ctx, cancel := context.WithTimeout(context.Background(), time.Second) // one that was taken hangs
		defer cancel()
		_, err = s.Txn(ctx, put(fmt.Sprintf("/new/%s/%d", s.Status().ID, n), "x"))
		return errors.Is(err, raftstore.ErrNoSpace) && !errors.Is(err, raftstore.ErrUnknownOutcome)
	})
	return err
}

// With no room anywhere the store can be read and cleaned up, says what is
// wrong at once, and takes writes again when there is room.
func TestMultiNoRoom(t *testing.T) {
	t.Parallel()
	disks := newFaultyDisks()
	c := raftstoretest.New(t, 3, disks.config)
	mustPut(t, c.Leader(), "/k/old", "x")
	mustPut(t, c.Leader(), "/k/other", "x")
	for _, free := range disks.free {
		free.Store(1 << 20)
	}
	for _, id := range c.IDs() {
		s := c.Store(id)
		err := refusal(c, s)
		if !strings.Contains(err.Error(), "disk") {
			t.Errorf("%s: %v", id, err)
		}
		if got := get(t, s, "/k/old"); got != "x" {
			t.Errorf("%s reads %q", id, got)
		}
		if _, err := s.Txn(testContext(t), put("/k/old", "x"+id)); err != nil {
			t.Errorf("%s: a small update: %v", id, err)
		}
		mustPut(t, s, "/k/old", "x")
	}
	if _, err := c.Follower().Txn(testContext(t), mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpDelete, Key: "/k/other"}}}); err != nil {
		t.Errorf("delete: %v", err)
	}
	for _, free := range disks.free {
		free.Store(1 << 40)
	}
	c.Wait("writes to be taken again", func() bool {
		_, err := c.Follower().Txn(testContext(t), put("/k/new", "x"))
		return err == nil
	})
}

// When even the log cannot be written, the member waits: it serves reads, does
// not exit, and does what it was asked to when there is room.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	disks := newFaultyDisks()
	c := raftstoretest.New(t, 1, disks.config)
	s := c.Leader()
	mustPut(t, s, "/k", "before")
	disks.free["n0"].Store(0)
	disks.log("n0").set(nil, fmt.Errorf("append: %w", syscall.ENOSPC))
	pending := make(chan error, 1)
	go func() {
		_, err := s.Txn(testContext(t), put("/k", "after"))
		pending <- err
	}()
	if err := refusal(c, s); !strings.Contains(err.Error(), "disk") {
		t.Error(err)
	}
	for range 3 {
		if got := get(t, s, "/k"); got != "before" {
			t.Errorf("reads %q", got)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := s.Txn(ctx, put("/k", "late")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a small update whose caller's deadline has passed: %v", err)
	}
	disks.free["n0"].Store(1 << 40)
	disks.log("n0").set(nil, nil)
	if err := <-pending; err != nil {
		t.Error(err)
	}
	c.Wait("all writes to be taken again", func() bool {
		_, err := s.Txn(testContext(t), put("/new", "x"))
		return err == nil
	})
}
