package raftstore

import (
	"testing"
	"testing/synctest"
	"time"
)

// Proposals that may wait go together, with the next that may not, or when the
// first of them has waited for long enough.
func TestProposalsThatMayWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProposals(time.Second)
		some := func(n int, add func(proposal)) {
			for range n {
				add(proposal{raw: make([]byte, 10)})
			}
		}
		waiting := func() bool {
			synctest.Wait()
			select {
			case <-p.wake:
				return true
			default:
				return false
			}
		}
		some(3, p.addLate)
		time.Sleep(700 * time.Millisecond)
		some(2, p.addLate)
		if waiting() || len(p.take(100, 1000)) != 0 {
			t.Fatal("they did not wait")
		}
		time.Sleep(400 * time.Millisecond)
		if !waiting() || len(p.take(100, 1000)) != 5 {
			t.Fatal("they did not go together after a second")
		}

		some(3, p.addLate)
		some(1, func(one proposal) { p.add(one) })
		if !waiting() || len(p.take(100, 1000)) != 4 {
			t.Fatal("they did not go with one that may not wait")
		}
		time.Sleep(900 * time.Millisecond)
		some(1, p.addLate) // the timer of those before is none of its own
		time.Sleep(900 * time.Millisecond)
		if waiting() || len(p.take(100, 1000)) != 0 {
			t.Fatal("the last one did not wait")
		}
		p.add() // the end
		if len(p.take(100, 1000)) != 1 {
			t.Fatal("the last one is lost")
		}
		time.Sleep(time.Minute)
		if len(p.take(100, 1000)) != 0 {
			t.Fatal("more came out than went in")
		}
	})
}
