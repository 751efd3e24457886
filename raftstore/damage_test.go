package raftstore_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftlog"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// finds collects what members report as damaged.
type finds struct {
	mu   sync.Mutex
	errs []error
}

func (f *finds) listen(cfg *raftstore.Config) {
	cfg.Events.Damaged = func(err error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.errs = append(f.errs, err)
	}
}

// has fails the test unless damage was reported in that file at or before that
// offset, and no further before it than one record or chunk reaches.
func (f *finds) has(t *testing.T, file string, offset int64) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, err := range f.errs {
		if d := new(raftstore.DamageError); errors.As(err, &d) && d.File == file && (offset < 0 || d.Offset <= offset && offset-d.Offset < 128<<10) {
			return
		}
	}
	t.Errorf("damage of %s at offset %d was not reported, only %v", file, offset, f.errs)
}

// flip changes one byte in the middle of what the file holds, zeros at its end
// left out, and returns where.
func flip(t *testing.T, file string) int64 {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	used := len(strings.TrimRight(string(b), "\x00"))
	return flipAt(t, file, int64(used/2))
}

func flipAt(t *testing.T, file string, at int64) int64 {
	t.Helper()
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 0x40
	if _, err := f.WriteAt(b, at); err != nil {
		t.Fatal(err)
	}
	return at
}

// spoilLog damages an entry of the log, whichever engine keeps it. It returns
// where.
func spoilLog(t *testing.T, dir string) (file string, at int64) {
	t.Helper()
	if segments, _ := filepath.Glob(filepath.Join(dir, "log*", "*.seg")); len(segments) > 0 {
		file = newest(t, filepath.Join(dir, "log*", "*.seg"))
		return file, flipAt(t, file, 200) // behind its end may lie what it held before
	}
	file = newest(t, filepath.Join(dir, "log*", "raft.db"))
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	// Old pages lie about: every one that is or was of the log is spoiled, in
	// its last entry, before the time zone at the end.
	for page := 2 * 4096; page+4096 <= len(b); page += 4096 {
		used := bytes.TrimRight(b[page:page+4096], "\x00")
		if len(used) > 64 && used[8] == 2 {
			flipAt(t, file, int64(page+len(used)-30))
		}
	}
	return file, -1
}

// spoilVote damages every record in a file of term and vote, old ones included.
func spoilVote(t *testing.T, dir, name string) (file string, at int64) {
	t.Helper()
	file = filepath.Join(dir, name)
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for from := 0; ; {
		i := bytes.Index(b[from:], []byte("CLDRVOTE"))
		if i < 0 {
			return file, 0
		}
		flipAt(t, file, int64(from+i+20))
		from += i + 1
	}
}

func newest(t *testing.T, pattern string) string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	if err != nil || len(found) == 0 {
		t.Fatalf("%s: %v, %v", pattern, found, err)
	}
	return slices.MaxFunc(found, func(a, b string) int { return infoOf(t, a).ModTime().Compare(infoOf(t, b).ModTime()) })
}

func infoOf(t *testing.T, path string) os.FileInfo {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info
}

func isVoter(t *testing.T, s *raftstore.Store, id string) (member, voter bool) {
	t.Helper()
	ms, err := s.Members()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range ms {
		if m.ID == id {
			return true, m.Voter
		}
	}
	return false, false
}

// knowsMembers waits until each member has written the membership down.
func knowsMembers(c *raftstoretest.Cluster) {
	for _, id := range c.IDs() {
		c.Wait(id+" has noted its membership", func() bool {
			b, err := os.ReadFile(filepath.Join(c.Dir(id), "members.json"))
			return err == nil && strings.Count(string(b), `"voter": true`) == len(c.IDs())
		})
	}
}

// A voter whose state is damaged comes back from the others' copies, and not as
// the voter that it was: what it had promised is gone.
func TestMultiDamageHealedByOthers(t *testing.T) {
	for name, damage := range map[string]func(t *testing.T, dir string) (file string, at int64){
		"a byte of the log": func(t *testing.T, dir string) (string, int64) {
			return spoilLog(t, dir)
		},
		"both copies of the vote": func(t *testing.T, dir string) (string, int64) {
			spoilVote(t, dir, "vote-1.db")
			return spoilVote(t, dir, "vote-2.db")
		},
		"every snapshot": func(t *testing.T, dir string) (file string, at int64) {
			files, _ := filepath.Glob(filepath.Join(dir, "snapshots", "*", "state.bin"))
			if len(files) != 2 {
				t.Fatalf("%v", files)
			}
			for _, file = range files {
				at = flip(t, file)
			}
			return file, at
		},
		"the log is gone": func(t *testing.T, dir string) (string, int64) {
			if err := os.RemoveAll(filepath.Join(dir, "log")); err != nil {
				t.Fatal(err)
			}
			return filepath.Join(dir, "log"), -1
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var found finds
			c := raftstoretest.New(t, 3, found.listen)
			victim := c.Follower()
			id := victim.Status().ID
			for round := range 3 { // two snapshots, and entries after them
				for i := range 20 {
					mustPut(t, victim, fmt.Sprintf("/k/%d", i), strings.Repeat(fmt.Sprint(round), 100))
				}
				for range 7 { // more than a file of the log holds
					mustPut(t, victim, "/large", strings.Repeat("x", 5<<19))
				}
				if round < 2 {
					if err := victim.Snapshot(testContext(t)); err != nil {
						t.Fatal(err)
					}
				}
			}
			knowsMembers(c)
			c.Stop(id)
			file, at := damage(t, c.Dir(id))
			s := c.Start(id)
			found.has(t, file, at)
			c.Wait("it is a member again, without a vote", func() bool {
				member, voter := isVoter(t, c.Leader(), id)
				return member && !voter && !s.LostState()
			})
			c.Wait("it reads what it had lost", func() bool {
				kv, _, err := s.Get(testContext(t), "/k/3", raftstore.ReadOptions{})
				return err == nil && kv != nil && string(kv.Value) == strings.Repeat("2", 100)
			})
			if err := c.Leader().AddVoter(testContext(t), id); err != nil {
				t.Fatal(err)
			}
			c.Agree()
			// It stays healed.
			c.Stop(id)
			s = c.Start(id)
			mustPut(t, c.Leader(), "/after", "1")
			c.Wait("it follows", func() bool { return s.Leader() != "" })
			if _, voter := isVoter(t, s, id); !voter {
				t.Error("it lost its vote again")
			}
			if kept, _ := filepath.Glob(filepath.Join(c.Dir(id), "damaged", "*")); len(kept) == 0 {
				t.Error("the damaged files were not kept")
			}
		})
	}
}

// A voter that lost what it had acknowledged must not help to elect one that
// never had it.
func TestMultiLostStateDoesNotVote(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) { cfg.LeaderWait = raftstoretest.Timeout })
	knowsMembers(c)
	leader := c.LeaderID()
	var forgetful, behind string
	for _, id := range c.IDs() {
		switch {
		case id == leader:
		case forgetful == "":
			forgetful = id
		default:
			behind = id
		}
	}
	c.Isolate(behind)
	mustPut(t, c.Store(leader), "/acknowledged", "yes") // by leader and forgetful
	c.Kill(leader)
	c.Kill(forgetful)
	c.Rejoin(behind)
	spoilLog(t, c.Dir(forgetful))
	s := c.Start(forgetful)
	if !s.LostState() {
		t.Fatal("it trusts what is left of its log")
	}
	c.Wait("the one that is behind to ask for its vote, again and again", func() bool { return s.Refused() >= 5 })
	if st := c.Store(behind).Status(); st.State == "Leader" {
		t.Fatalf("%+v", st)
	}
	c.Start(leader)
	for _, id := range c.IDs() {
		c.Wait(id+" reads what was acknowledged", func() bool {
			kv, _, err := c.Store(id).Get(testContext(t), "/acknowledged", raftstore.ReadOptions{})
			return err == nil && kv != nil && string(kv.Value) == "yes"
		})
	}
	c.Wait("the forgetful one is a member without a vote", func() bool {
		member, voter := isVoter(t, c.Leader(), forgetful)
		return member && !voter
	})
}

// What one member can repair alone, it does: nothing is lost, and it keeps its
// vote.
func TestDamageRepairedAlone(t *testing.T) {
	for name, damage := range map[string]func(t *testing.T, dir string) (file string, at int64){
		"the newest snapshot": func(t *testing.T, dir string) (string, int64) {
			file := newest(t, filepath.Join(dir, "snapshots", "*", "state.bin"))
			return file, flip(t, file)
		},
		"the newest snapshot's description": func(t *testing.T, dir string) (string, int64) {
			file := newest(t, filepath.Join(dir, "snapshots", "*", "meta.json"))
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			return file, flipAt(t, file, int64(strings.Index(string(b), "ConfigurationIndex")+3))
		},
		"a cut-off snapshot": func(t *testing.T, dir string) (string, int64) {
			file := newest(t, filepath.Join(dir, "snapshots", "*", "state.bin"))
			size := infoOf(t, file).Size() - 5
			if err := os.Truncate(file, size); err != nil {
				t.Fatal(err)
			}
			return file, size
		},
		"every snapshot, the log being whole": func(t *testing.T, dir string) (file string, at int64) {
			files, _ := filepath.Glob(filepath.Join(dir, "snapshots", "*", "state.bin"))
			for _, file = range files {
				at = flip(t, file)
			}
			return file, at
		},
		"a copy of the vote": func(t *testing.T, dir string) (string, int64) {
			return spoilVote(t, dir, "vote-2.db")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var found finds
			c := raftstoretest.New(t, 1, func(cfg *raftstore.Config) {
				found.listen(cfg)
				if name == "every snapshot, the log being whole" {
					cfg.LogEngine = raftlog.Segments // bolt's begins behind the older snapshot
				}
			})
			s := c.Leader()
			for i := range 90 {
				mustPut(t, s, fmt.Sprintf("/k/%d", i), "v")
				if i%30 == 29 && i < 80 {
					if err := s.Snapshot(testContext(t)); err != nil {
						t.Fatal(err)
					}
				}
			}
			want := s.Status().Keyspace
			c.Stop("n0")
			file, at := damage(t, c.Dir("n0"))
			s = c.Start("n0")
			c.Leader()
			found.has(t, file, at)
			if got := s.Status().Keyspace; got.Keys != want.Keys || got.Revision != want.Revision {
				t.Errorf("it has %+v, had %+v", got, want)
			}
		})
	}
}

// Without others, damage is named, and nothing is served or thrown away.
func TestDamageWithoutOthers(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 1, nil)
	for i := range 50 {
		mustPut(t, c.Leader(), fmt.Sprintf("/k/%d", i), "v")
	}
	knowsMembers(c)
	c.Stop("n0")
	whole := map[string][]byte{}
	for _, pattern := range []string{"*.seg", "raft.db"} {
		files, _ := filepath.Glob(filepath.Join(c.Dir("n0"), "log*", pattern))
		for _, file := range files {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			whole[file] = b
		}
	}
	file, at := spoilLog(t, c.Dir("n0"))
	for range 2 {
		_, err := c.TryStart("n0")
		damage := new(raftstore.DamageError)
		if !errors.As(err, &damage) || damage.File != file || at >= 0 && (damage.Offset > at || at-damage.Offset > 1024) {
			t.Fatalf("flipped byte %d of %s: %v", at, file, err)
		}
	}
	if err := os.WriteFile(file, whole[file], 0o600); err != nil {
		t.Fatal(err)
	}
	if got := get(t, c.Start("n0"), "/k/7"); got != "v" {
		t.Errorf("reads %q", got)
	}
}

// A member whose keyspace comes out different stops, and is healed when it is
// started again.
func TestMultiDivergence(t *testing.T) {
	t.Parallel()
	var victim atomic.Pointer[string]
	var ids sync.Map
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		raftstoretest.Steady(cfg)
		id := cfg.ID
		cfg.Inject(raftstore.Faults{Mangle: func(b *mvcc.Batch) {
			for i := range b.Commands {
				if ops := b.Commands[i].Txn.Ops; len(ops) > 0 && ops[0].Key == "/k" && victim.CompareAndSwap(&id, nil) {
					ops[0].Value = []byte("wrong")
				}
			}
		}})
		ids.Store(id, &id)
	})
	knowsMembers(c)
	s := c.Follower()
	wrong := s.Status().ID
	p, _ := ids.Load(wrong)
	victim.Store(p.(*string))
	ctx, cancel := context.WithTimeout(context.Background(), raftstoretest.Timeout)
	defer cancel()
	mustPut(t, c.Leader(), "/k", "right")
	select {
	case <-s.Failed():
	case <-ctx.Done():
		t.Fatal("it goes on")
	}
	if err := s.Err(); !errors.Is(err, raftstore.ErrDiverged) {
		t.Error(err)
	}
	for id, other := range c.Running() {
		if id != wrong && other.Err() != nil {
			t.Errorf("%s: %v", id, other.Err())
		}
	}
	c.Kill(wrong)
	s = c.Start(wrong)
	c.Wait("it reads what the others do", func() bool {
		kv, _, err := s.Get(testContext(t), "/k", raftstore.ReadOptions{})
		return err == nil && kv != nil && string(kv.Value) == "right"
	})
	c.Agree()
}

// A member that cannot write down its vote stops, with a sentence that says so:
// raft itself would end the process with a stack trace.
func TestMultiVoteCannotBeWritten(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, nil)
	s := c.Follower()
	id := s.Status().ID
	raftstore.BreakVote(s)
	c.Wait("the leader, another one, to be killed", func() bool {
		leader := c.LeaderID()
		if leader == id { // by an election just before
			_ = s.TransferLeadership(testContext(t))
			return false
		}
		c.Kill(leader)
		return true
	})
	ctx, cancel := context.WithTimeout(context.Background(), raftstoretest.Timeout)
	defer cancel()
	select {
	case <-s.Failed():
	case <-ctx.Done():
		t.Fatal("it goes on")
	}
	if err := s.Err(); err == nil || !strings.Contains(err.Error(), "term and vote cannot be written down: "+filepath.Join(c.Dir(id), "vote-1.db")) {
		t.Error(err)
	}
	c.Kill(id)
	c.Start(id)
	mustPut(t, c.Leader(), "/after", "1")
}
