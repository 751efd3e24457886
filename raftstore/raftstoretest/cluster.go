package raftstoretest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/clusterd/clusterd/raftstore"
)

// Timeout is how long a wait may take on a busy machine before it fails.
const Timeout = 3 * time.Minute

// steadyTimeout is longer than a member's process is ever kept from running by
// a busy machine.
const steadyTimeout = 30 * time.Second

// Steady is a configuration whose leader stays one while its process runs and
// reaches a majority, however busy the machine is: for tests that count on who
// leads. A leader whose process has ended is replaced at once all the same.
func Steady(c *raftstore.Config) {
	c.HeartbeatTimeout, c.ElectionTimeout, c.LeaderLease = steadyTimeout, steadyTimeout, steadyTimeout
	c.SlowDisk = steadyTimeout
}

// Cluster is N members, voters all, named n0, n1 ….
type Cluster struct {
	t      testing.TB
	net    *network
	dir    string
	Config func(*raftstore.Config) // changes a member's configuration before it is opened; may be nil

	mu     sync.Mutex
	stores map[string]*raftstore.Store // those running
	ids    []string
}

// EngineEnv names the engine of all members' logs; without it they differ.
const EngineEnv = "RAFTSTORE_TEST_LOG"

// LogEngine is what keeps a member's log in a test: every second member's
// another one, so that each test runs over all of them, unless EngineEnv says
// which.
func LogEngine(id string) raftstore.LogEngine {
	if e := os.Getenv(EngineEnv); e != "" {
		return raftstore.LogEngine(e)
	}
	return raftstore.LogEngines[int(id[len(id)-1])%len(raftstore.LogEngines)]
}

// New starts n members and waits until all are voters and know a leader. At
// the end of the test it checks the invariants of those still running and
// closes them.
func New(t testing.TB, n int, config func(*raftstore.Config)) *Cluster {
	t.Helper()
	c := &Cluster{t: t, net: newNetwork(), dir: t.TempDir(), Config: config, stores: map[string]*raftstore.Store{}}
	t.Cleanup(c.finish)
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	for i := range n {
		id := fmt.Sprintf("n%d", i)
		c.ids = append(c.ids, id)
		s := c.Start(id)
		if i == 0 {
			if err := s.Bootstrap(); err != nil {
				t.Fatalf("bootstrap: %v", err)
			}
			continue
		}
		// A change can be repeated, and a short LeaderWait is shorter than a busy machine.
		c.Wait(id+" to be added", func() bool {
			err := c.Store("n0").AddVoter(ctx, id)
			if err != nil && !errors.Is(err, raftstore.ErrNoLeader) {
				t.Fatalf("add %s: %v", id, err)
			}
			return err == nil
		})
	}
	for _, id := range c.ids {
		c.Wait(id+" knows a leader and all members", func() bool {
			ms, err := c.Store(id).Members()
			return err == nil && len(ms) == n && c.Store(id).Leader() != ""
		})
	}
	c.Leader()
	return c
}

// Start opens a member, for the first time or again.
func (c *Cluster) Start(id string) *raftstore.Store {
	c.t.Helper()
	s, err := c.TryStart(id)
	if err != nil {
		c.t.Fatalf("open %s: %v", id, err)
	}
	return s
}

// TryStart is Start for a member that may refuse to be opened.
func (c *Cluster) TryStart(id string) (*raftstore.Store, error) {
	c.t.Helper()
	l, err := c.net.listen(id)
	if err != nil {
		c.t.Fatal(err)
	}
	cfg := raftstore.Config{
		ID: id, Dir: c.Dir(id), Listener: l, Dial: c.net.dialer(id), PeerID: c.net.peerID, Known: c.known, LogEngine: LogEngine(id),
		Logger:     slog.New(slog.NewTextHandler(testWriter{c.t}, &slog.HandlerOptions{Level: slog.LevelInfo})).With("node", id),
		LeaderWait: time.Minute, // several elections on a busy machine
	}
	if c.Config != nil {
		c.Config(&cfg)
	}
	s, err := raftstore.Open(cfg)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stores[id] = s
	return s, nil
}

// Dir is a member's data directory.
func (c *Cluster) Dir(id string) string { return filepath.Join(c.dir, id) }

// IDs are all members ever started by New.
func (c *Cluster) IDs() []string { return c.ids }

// Store is a running member; nil if it is not running.
func (c *Cluster) Store(id string) *raftstore.Store {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stores[id]
}

// Running are the members that run.
func (c *Cluster) Running() map[string]*raftstore.Store {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := make(map[string]*raftstore.Store, len(c.stores))
	for id, s := range c.stores {
		m[id] = s
	}
	return m
}

// Leader waits for a member that leads and is ready.
func (c *Cluster) Leader() *raftstore.Store {
	c.t.Helper()
	var leader *raftstore.Store
	c.Wait("a leader", func() bool {
		for _, s := range c.Running() {
			if s.IsLeader() {
				leader = s
				return true
			}
		}
		return false
	})
	return leader
}

// LeaderID waits for a leader and names it.
func (c *Cluster) LeaderID() string { return c.Leader().Status().ID }

// Follower is a running member that does not lead.
func (c *Cluster) Follower() *raftstore.Store {
	c.t.Helper()
	leader := c.LeaderID()
	for _, id := range c.ids {
		if s := c.Store(id); s != nil && id != leader {
			return s
		}
	}
	c.t.Fatal("no follower is running")
	return nil
}

// Kill stops a member as a crash does: nothing is handed over or finished.
func (c *Cluster) Kill(id string) { c.take(id).Kill() }

// Stop closes a member.
func (c *Cluster) Stop(id string) {
	if err := c.take(id).Close(); err != nil {
		c.t.Errorf("close %s: %v", id, err)
	}
}

func (c *Cluster) take(id string) *raftstore.Store {
	c.net.down(id)
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.stores[id]
	delete(c.stores, id)
	return s
}

// Isolate cuts a member off from all others, both ways.
func (c *Cluster) Isolate(id string) { c.each(id, true) }

// Rejoin undoes Isolate.
func (c *Cluster) Rejoin(id string) { c.each(id, false) }

// Sever cuts (or restores) the link between two members, both ways.
func (c *Cluster) Sever(a, b string, cut bool) { c.net.sever(a, b, cut) }

// known is every member's Config.Known.
func (c *Cluster) known(id string) bool { return slices.Contains(c.ids, id) || id == Lost }

// Lost is the id of one that every member knows, though it is not in the
// configuration.
const Lost = "lost"

// DialAs opens a connection to a member as a node with that id, which need not
// be a member. What it sends is up to the caller.
func (c *Cluster) DialAs(ctx context.Context, from, to string) (net.Conn, error) {
	return c.net.dialer(from)(ctx, to)
}

// Mute makes what a member sends vanish; what is sent to it arrives.
func (c *Cluster) Mute(id string, on bool) {
	for _, other := range c.ids {
		if other != id {
			c.net.swallow(id, other, on)
		}
	}
}

// Deafen makes what is sent to a member vanish; what it sends arrives.
func (c *Cluster) Deafen(id string, on bool) {
	for _, other := range c.ids {
		if other != id {
			c.net.swallow(other, id, on)
		}
	}
}

func (c *Cluster) each(id string, cut bool) {
	for _, other := range c.ids {
		if other != id {
			c.net.sever(id, other, cut)
		}
	}
}

// Wait fails the test if ok does not come true.
func (c *Cluster) Wait(what string, ok func() bool) {
	c.t.Helper()
	Wait(c.t, what, ok)
}

// Wait fails the test if ok does not come true.
func Wait(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(Timeout)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("waited %v for: %s", Timeout, what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// Agree waits until all running members have applied the same index, and fails
// the test if they then differ.
func (c *Cluster) Agree() {
	c.t.Helper()
	c.Leader()
	var digests map[string]raftstore.Status
	c.Wait("members to have applied the same", func() bool {
		digests = map[string]raftstore.Status{}
		indexes := map[uint64]bool{}
		for id, s := range c.Running() {
			st := s.Status()
			digests[id] = st
			indexes[st.Keyspace.Index] = true
		}
		return len(indexes) == 1
	})
	var first *raftstore.Status
	for id, st := range digests {
		if first == nil {
			first = &st
		}
		if st.Keyspace != first.Keyspace {
			c.t.Errorf("%s and %s have applied the same log and differ:\n%+v\n%+v", first.ID, id, first.Keyspace, st.Keyspace)
		}
	}
}

func (c *Cluster) finish() {
	if !c.t.Failed() && len(c.Running()) > len(c.ids)/2 {
		c.Agree()
	}
	var wg sync.WaitGroup
	for id := range c.Running() {
		wg.Add(1)
		go func() {
			defer wg.Done()
			c.Stop(id)
		}()
	}
	wg.Wait()
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s", p[:max(len(p)-1, 0)])
	return len(p), nil
}
