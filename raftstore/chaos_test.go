package raftstore_test

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

var (
	chaosFor  = flag.Duration("chaos", 0, "how long TestChaos injects faults into the store; 0: not at all (make chaos-store: 30m)")
	chaosSeed = flag.Uint64("chaos-seed", 1, "what its faults and their order are drawn from")
)

// chaosRound is how long one history is recorded for: operations
// of unknown outcome make its check more expensive the longer it gets.
const chaosRound = 30 * time.Second

// TestChaos injects faults into three members in processes of their own, in an
// order drawn from the seed, while clients work: kill -9 of one or of all,
// SIGSTOP, and bytes flipped in the files of a member that was killed. After
// each round the history is checked and the keyspaces are compared.
func TestChaos(t *testing.T) {
	if *chaosFor == 0 {
		t.Skip("runs as make chaos-store")
	}
	p := startProcesses(t)
	r := rand.New(rand.NewPCG(*chaosSeed, 0))
	count := map[string]int{}
	for round, end := 0, time.Now().Add(*chaosFor); time.Now().Before(end); round++ {
		h := startHistoryOf(t, *chaosSeed+uint64(round)<<32, fmt.Sprintf("/r/%d/", round), p.try)
		for over := time.Now().Add(chaosRound); time.Now().Before(over); {
			h.more(r.IntN(60))
			name := p.befall(r)
			count[name]++
			h.more(20)
		}
		h.check()
		p.agree()
		if t.Failed() {
			break
		}
	}
	total := 0
	for _, n := range count {
		total += n
	}
	t.Logf("seed %d for %v: %d faults: %v", *chaosSeed, *chaosFor, total, count)
}

// TestChaosLinks injects faults into three members in one process, whose links
// and disks the test holds, in an order drawn from the seed: links that are
// cut, silent or deaf one way, a disk that hangs, a member that is killed again
// while it comes back from the last time. Every second member has the other
// log engine, unless RAFTSTORE_TEST_LOG says which.
func TestChaosLinks(t *testing.T) {
	if *chaosFor == 0 {
		t.Skip("runs as make chaos-store")
	}
	disks := newFaultyDisks()
	c := raftstoretest.New(t, 3, disks.config)
	r := rand.New(rand.NewPCG(*chaosSeed, 1))
	count := map[string]int{}
	for round, end := 0, time.Now().Add(*chaosFor); time.Now().Before(end) && !t.Failed(); round++ {
		h := startHistoryOf(t, *chaosSeed+uint64(round)<<32, fmt.Sprintf("/r/%d/", round), func(r *rand.Rand, in registerInput) (registerOutput, bool) {
			s := c.Store(c.IDs()[r.IntN(len(c.IDs()))])
			if s == nil {
				return registerOutput{}, false
			}
			return do(s, in)
		})
		for over := time.Now().Add(chaosRound); time.Now().Before(over); {
			h.more(r.IntN(60))
			count[befallLinks(c, disks, r)]++
			h.more(20)
		}
		h.check()
		c.Agree()
	}
	t.Logf("seed %d for %v: %v", *chaosSeed, *chaosFor, count)
}

// befallLinks does one thing to a member or a link and undoes it.
func befallLinks(c *raftstoretest.Cluster, disks *faultyDisks, r *rand.Rand) string {
	victim := c.IDs()[r.IntN(len(c.IDs()))]
	if r.IntN(2) == 0 {
		victim = c.LeaderID()
	}
	spell := func() { time.Sleep(time.Duration(r.Int64N(int64(4 * time.Second)))) } // how long the fault lasts
	switch r.IntN(6) {
	case 0:
		c.Isolate(victim)
		spell()
		c.Rejoin(victim)
		return "cut off"
	case 1: // what it sends and what is sent to it vanishes, no stream ends
		c.Mute(victim, true)
		c.Deafen(victim, true)
		spell()
		c.Mute(victim, false)
		c.Deafen(victim, false)
		return "silent"
	case 2:
		way := (*raftstoretest.Cluster).Mute
		if r.IntN(2) == 0 {
			way = (*raftstoretest.Cluster).Deafen
		}
		way(c, victim, true)
		spell()
		way(c, victim, false)
		return "one way"
	case 3:
		other := c.Follower().Status().ID
		if other == victim {
			other = c.LeaderID()
		}
		if other != victim {
			c.Sever(victim, other, true)
			spell()
			c.Sever(victim, other, false)
		}
		return "one link"
	case 4:
		hang := make(chan struct{})
		log := disks.log(victim)
		log.set(hang, nil)
		spell()
		log.set(nil, nil)
		close(hang)
		return "hanging disk"
	default:
		for range 1 + r.IntN(3) { // killed again before it has caught up
			c.Kill(victim)
			c.Start(victim)
		}
		return "killed, again and again"
	}
}

// befall does one thing to the members and undoes it.
func (p *processes) befall(r *rand.Rand) string {
	p.t.Helper()
	victim := p.ids[r.IntN(len(p.ids))]
	if r.IntN(2) == 0 {
		victim = p.leader("")
	}
	spell := func(most time.Duration) { time.Sleep(time.Duration(r.Int64N(int64(most)))) } // how long the fault lasts
	switch n := r.IntN(10); {
	case n < 4:
		p.kill(victim)
		spell(2 * time.Second)
		p.start(victim)
		return "kill -9"
	case n < 6:
		p.signal(victim, syscall.SIGSTOP)
		spell(6 * time.Second)
		p.signal(victim, syscall.SIGCONT)
		return "frozen"
	case n < 7:
		for _, id := range p.ids {
			p.kill(id)
		}
		for _, id := range p.ids {
			p.start(id)
		}
		return "kill -9 of all"
	default:
		p.kill(victim)
		what := p.spoil(r, victim)
		p.start(victim)
		p.restoreVote(victim)
		return what
	}
}

// spoil flips a byte in a file of a member that does not run.
func (p *processes) spoil(r *rand.Rand, id string) string {
	p.t.Helper()
	patterns := []string{"log*/*.seg", "log*/raft.db", "vote-*.db", "snapshots/*/state.bin", "snapshots/*/meta.json"}
	pattern := patterns[r.IntN(len(patterns))]
	files, err := filepath.Glob(filepath.Join(p.dir, id, pattern))
	if err != nil || len(files) == 0 {
		return "kill -9" // there is none yet
	}
	file := files[r.IntN(len(files))]
	info, err := os.Stat(file)
	if err != nil {
		p.t.Fatal(err)
	}
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		p.t.Fatal(err)
	}
	b := make([]byte, 1)
	at := r.Int64N(min(info.Size(), 64<<10))
	if _, err := f.ReadAt(b, at); err != nil {
		p.t.Fatal(err)
	}
	b[0] ^= 1 << r.IntN(8)
	_, err = f.WriteAt(b, at)
	if err := errors.Join(err, f.Close()); err != nil {
		p.t.Fatal(err)
	}
	return "kill -9, then a flipped byte in " + pattern
}

// restoreVote makes a member that came back without a vote a voter again.
func (p *processes) restoreVote(id string) {
	p.t.Helper()
	raftstoretest.Wait(p.t, id+" to be a voter that knows it", func() bool {
		leader := p.leader("")
		st, err := p.status(leader)
		if err != nil {
			return false
		}
		for _, m := range st.Members {
			if m.ID == id && !m.Voter {
				_ = p.post(leader, "/add?id="+id) // looked at again below
			}
		}
		st, err = p.status(id)
		if err != nil || st.Leader == "" {
			return false
		}
		for _, m := range st.Members {
			if m.ID == id && m.Voter {
				return true
			}
		}
		return false
	})
}
