package raftside

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// TestVoteIsAskedForAgain: dead and silent connections do not cost an election.
func TestVoteIsAskedForAgain(t *testing.T) {
	dead := errors.New("use of closed network connection")
	gone := fmt.Errorf("dial: %w", &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)})
	type try struct {
		after time.Duration
		err   error
	}
	for _, tc := range []struct {
		name  string
		tries []try // what becomes of each; the last goes for the rest
		want  error
		took  time.Duration
		asked int
	}{
		{"answered", []try{{0, nil}}, nil, 0, 1},
		{"a pool of dead connections", []try{{0, dead}, {0, dead}, {0, dead}, {0, dead}, {0, nil}}, nil, 0, 5},
		{"one that is silent", []try{{10 * time.Second, dead}, {time.Millisecond, nil}}, nil, askVoteAgain + time.Millisecond, 2},
		{"a slow voter", []try{{200 * time.Millisecond, nil}, {time.Second, nil}}, nil, 200 * time.Millisecond, 2},
		{"connection refused", []try{{0, gone}}, gone, 0, 1},
		{"out of reach", []try{{0, dead}}, dead, 0, voteTries},
		{"all silent", []try{{10 * time.Second, dead}}, dead, 10*time.Second + (voteTries-1)*askVoteAgain, voteTries},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := &Transport{cfg: Config{Done: make(chan struct{})}}
			asked := make(chan int, voteTries)
			for i := range voteTries {
				asked <- i
			}
			var n atomic.Int32
			began := time.Now()
			var got int
			err := untilAnswered(p, &got, func(resp *int) error {
				i := <-asked
				n.Add(1)
				do := tc.tries[min(i, len(tc.tries)-1)]
				time.Sleep(do.after)
				*resp = i + 1
				return do.err
			})
			took := time.Since(began)
			p.votes.Wait()
			if !errors.Is(err, tc.want) || took != tc.took || int(n.Load()) != tc.asked || err == nil && got == 0 {
				t.Errorf("%s: %v after %v and %d tries, answer %d", tc.name, err, took, n.Load(), got)
			}
		})
	}
}

// TestVoteEndsWithTheMember: who stops does not wait for votes.
func TestVoteEndsWithTheMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		done := make(chan struct{})
		p := &Transport{cfg: Config{Done: done}}
		go func() { time.Sleep(time.Second); close(done) }()
		began := time.Now()
		err := untilAnswered(p, new(int), func(*int) error { time.Sleep(time.Minute); return nil })
		if !errors.Is(err, errStopped) || time.Since(began) != time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		p.votes.Wait()
	})
}
