package raftstore_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// heldLog is a log whose next write can be made to wait, and then to fail.
type heldLog struct {
	raft.LogStore

	mu      sync.Mutex
	outcome chan error // nil: the next write passes
}

func (l *heldLog) StoreLogs(es []*raft.Log) error {
	l.mu.Lock()
	outcome := l.outcome
	l.outcome = nil
	l.mu.Unlock()
	if outcome != nil {
		if err := <-outcome; err != nil {
			return err
		}
	}
	return l.LogStore.StoreLogs(es)
}

func (l *heldLog) hold(outcome chan error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.outcome = outcome
}

// TestMultiAhead: while the leader's own log writes an entry the followers
// have it on disk, and it is not committed; whether that write succeeds or is
// lost, the entry takes effect once.
func TestMultiAhead(t *testing.T) {
	for name, outcome := range map[string]error{"written": nil, "lost": errors.New("the disk is gone")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var mu sync.Mutex
			held := map[string]*heldLog{}
			c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
				// No follower gives the leader up while its log waits, but the lost
				// entry's leader soon enough.
				raftstoretest.Steady(cfg)
				cfg.HeartbeatTimeout, cfg.ElectionTimeout, cfg.LeaderLease = 5*time.Second, 5*time.Second, 5*time.Second
				id := cfg.ID
				cfg.Inject(raftstore.Faults{Log: func(l raft.LogStore) raft.LogStore {
					mu.Lock()
					defer mu.Unlock()
					held[id] = &heldLog{LogStore: l}
					return held[id]
				}})
			})
			leader := c.Leader()
			id := c.LeaderID()
			mustPut(t, leader, "/before", "1")
			c.Agree()
			lasts := func() (own, least uint64) {
				for other, l := range held {
					last, err := l.LastIndex()
					if err != nil {
						t.Fatal(err)
					}
					switch {
					case other == id:
						own = last
					case least == 0 || last < least:
						least = last
					}
				}
				return own, least
			}
			type answer struct {
				res mvcc.TxnResult
				err error
			}
			var (
				let      = make(chan error)
				done     = make(chan answer, 1)
				key      string
				revision int64
			)
			// Until it is let go the leader cannot be closed.
			t.Cleanup(func() { close(let) })
			// Sending ahead is a try: a member that has not answered the message
			// before is left out. Then the write is let go, and another one held.
			ahead := func(try int) bool {
				c.Agree()
				before, least := lasts()
				if before != least {
					t.Fatalf("the leader's log ends at %d, a follower's at %d", before, least)
				}
				revision, key = leader.Revision(), fmt.Sprint("/ahead/", try)
				held[id].hold(let)
				go func() {
					res, err := leader.Txn(testContext(t), mvcc.Txn{
						Compares: []mvcc.Compare{{Key: key}},
						Ops:      []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: []byte("1")}},
					})
					done <- answer{res, err}
				}()
				for deadline := time.Now().Add(4 * time.Second); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
					if _, least := lasts(); least > before {
						if own, _ := lasts(); own != before {
							t.Errorf("the leader's own log went on to %d", own)
						}
						return true
					}
				}
				let <- nil
				if a := <-done; a.err != nil {
					t.Fatalf("a write that was not sent ahead: %v", a.err)
				}
				return false
			}
			for try := 1; !ahead(try); try++ {
				if try == 10 {
					t.Fatalf("of %d entries none was on the followers' disks before the leader had written it", try)
				}
			}
			for id, s := range c.Running() {
				if s.Revision() != revision {
					t.Errorf("%s has applied what the leader has not written", id)
				}
			}
			select {
			case a := <-done:
				t.Fatalf("acknowledged before the leader has written it: %+v", a)
			default:
			}
			let <- outcome

			a := <-done
			if a.err != nil || !a.res.Succeeded {
				t.Fatalf("the write: %+v", a)
			}
			c.Agree()
			for id, s := range c.Running() {
				kv, _, err := s.Get(testContext(t), key, raftstore.ReadOptions{})
				if err != nil || kv == nil || kv.ModRevision != a.res.Revision || kv.CreateRevision != kv.ModRevision || s.Revision() != revision+1 {
					t.Errorf("%s: %+v, %v, at revision %d after %d", id, kv, err, s.Revision(), revision)
				}
			}
		})
	}
}

// slowLog is a log on a disk whose syncs take so much longer.
type slowLog struct {
	raft.LogStore
	sync time.Duration
}

func (l slowLog) StoreLogs(es []*raft.Log) error {
	time.Sleep(l.sync)
	return l.LogStore.StoreLogs(es)
}

// BenchmarkSlowDisk is one client's write of 1 KiB on three members, by how
// much longer syncs take, with entries sent while the leader writes them and
// after that.
func BenchmarkSlowDisk(b *testing.B) {
	for _, sync := range []time.Duration{0, time.Millisecond, 4 * time.Millisecond} {
		for _, ahead := range []bool{true, false} {
			b.Run(fmt.Sprintf("sync+%v/ahead=%t", sync, ahead), func(b *testing.B) {
				raftstore.SendAhead(b, ahead)
				c := raftstoretest.New(b, 3, func(cfg *raftstore.Config) {
					cfg.Inject(raftstore.Faults{Log: func(l raft.LogStore) raft.LogStore { return slowLog{l, sync} }})
				})
				leader := c.Leader()
				for i := range b.N {
					put := put(fmt.Sprint("/k/", i%100), strings.Repeat("x", 1024))
					if _, err := leader.Txn(b.Context(), put); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
