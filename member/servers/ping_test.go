package servers

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/transport"
)

// far is the other end of a watched connection: what its kernel does.
type far struct {
	mu              sync.Mutex
	received, acked time.Time
	unacked         bool
}

func (f *far) link() (transport.Link, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return transport.Link{Received: time.Since(f.received), Acked: time.Since(f.acked), Unacked: f.unacked}, nil
}

func (f *far) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// watching is a watched connection, what its other end is, and whether it was given
// up: for silence, for slowness.
func watching(t *testing.T, limit time.Duration) (w *watched, f *far, other net.Conn, gaveUp func() (silent, slow bool)) {
	ours, theirs := net.Pipe()
	f = &far{received: time.Now(), acked: time.Now()}
	var mu sync.Mutex
	var silent, slow bool
	w = newWatched(ours, "n1", f.link, func() time.Duration { return limit }, func(s bool) {
		mu.Lock()
		defer mu.Unlock()
		silent, slow = silent || !s, slow || s
	})
	go io.Copy(io.Discard, theirs)
	t.Cleanup(func() { w.Close(); theirs.Close() })
	return w, f, theirs, func() (bool, bool) {
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		return silent, slow
	}
}

// A way that is cut, or a machine that is gone, acknowledges nothing.
func TestSilentLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, f, _, gaveUp := watching(t, time.Hour)
		time.Sleep(time.Minute) // nothing to say
		f.set(func() { f.unacked = true })
		w.Write([]byte("ping"))
		time.Sleep(silentAfter - time.Millisecond)
		if silent, slow := gaveUp(); silent || slow {
			t.Fatal("given up too early")
		}
		time.Sleep(2 * time.Millisecond)
		if silent, slow := gaveUp(); !silent || slow {
			t.Fatalf("silent %t, slow %t", silent, slow)
		}
		if _, err := w.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "n1 has not acknowledged") {
			t.Errorf("a reader is told: %v", err)
		}
	})
}

// A program that is slow, or stopped, is left after its limit and not before.
func TestSlowProgram(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, f, _, gaveUp := watching(t, 7*time.Second)
		time.Sleep(time.Second)
		w.Write([]byte("request"))
		for range 8 { // its kernel answers
			time.Sleep(time.Second)
			f.set(func() { f.acked = time.Now() })
			w.Write([]byte("more"))
		}
		if silent, slow := gaveUp(); silent || slow {
			t.Fatalf("given up too early: silent %t, slow %t", silent, slow)
		}
		time.Sleep(pingAfter)
		if silent, slow := gaveUp(); silent || !slow {
			t.Fatalf("silent %t, slow %t", silent, slow)
		}
		if _, err := w.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "http2: client connection lost: n1 has not answered for") {
			t.Errorf("a reader is told: %v", err)
		}
	})
}

// A slow program whose limit ends while its way is cut: that is noticed then.
func TestSlowThenSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, f, _, gaveUp := watching(t, time.Hour)
		w.Write([]byte("ping"))
		time.Sleep(time.Minute)
		f.set(func() { f.acked = time.Now() })
		time.Sleep(time.Minute)
		if silent, slow := gaveUp(); silent || slow {
			t.Fatalf("silent %t, slow %t", silent, slow)
		}
		f.set(func() { f.unacked, f.acked = true, time.Now().Add(-time.Hour) })
		time.Sleep(silentAfter)
		if silent, _ := gaveUp(); !silent {
			t.Fatal("it is not noticed")
		}
	})
}

// An answer that this program has not read yet is one, and one that was read ends the
// wait.
func TestAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, f, other, gaveUp := watching(t, slowFirst)
		f.set(func() { f.unacked = true })
		w.Write([]byte("ping"))
		time.Sleep(silentAfter / 2)
		f.set(func() { f.received, f.acked, f.unacked = time.Now(), time.Now(), false })
		time.Sleep(silentAfter)
		if silent, slow := gaveUp(); silent || slow {
			t.Fatal("given up while its answer was there to be read")
		}
		go other.Write([]byte("pong"))
		if _, err := w.Read(make([]byte, 4)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if silent, slow := gaveUp(); silent || slow {
			t.Fatal("given up while nothing was asked")
		}
	})
}

// Time in which this program did not run counts for no other.
func TestOwnLateness(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, f, _, gaveUp := watching(t, slowFirst)
		w.Write([]byte("ping"))
		// The timer is due, and comes 20 s late.
		time.Sleep(silentAfter - time.Millisecond)
		w.mu.Lock()
		w.timer.Stop()
		w.mu.Unlock()
		time.Sleep(20 * time.Second)
		f.set(func() { f.acked = time.Now() })
		w.look()
		if silent, slow := gaveUp(); silent || slow {
			t.Fatal("given up for what this program was late with")
		}
		time.Sleep(pingAfter + slowFirst)
		if _, slow := gaveUp(); !slow {
			t.Fatal("never given up")
		}
	})
}

// Nor does it while the other kernel acknowledges and more is on its way.
func TestOwnLatenessUnacked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, f, _, gaveUp := watching(t, time.Hour)
		time.Sleep(time.Second)
		w.Write([]byte("ping"))
		time.Sleep(50 * time.Millisecond)
		f.set(func() { f.acked, f.unacked = time.Now(), true })
		time.Sleep(silentAfter - 51*time.Millisecond)
		w.mu.Lock()
		w.timer.Stop()
		w.mu.Unlock()
		time.Sleep(20 * time.Second)
		w.look()
		if silent, slow := gaveUp(); silent || slow {
			t.Fatal("given up though its kernel has acknowledged what was written")
		}
	})
}

// The kernel's times are off by some milliseconds: what was acknowledged as it was written
// says nothing, and that nothing is acknowledged from then on does.
func TestAcknowledgedAtOnce(t *testing.T) {
	for _, off := range []time.Duration{-5 * time.Millisecond, 0, 5 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			w, f, _, gaveUp := watching(t, time.Hour)
			time.Sleep(time.Second)
			w.Write([]byte("ping"))
			f.set(func() { f.acked, f.unacked = time.Now().Add(off), true })
			time.Sleep(silentAfter + silentAfter/2)
			if silent, slow := gaveUp(); silent || slow {
				t.Fatalf("%s: given up too early", off)
			}
			time.Sleep(silentAfter)
			if silent, slow := gaveUp(); !silent || slow {
				t.Fatalf("%s: silent %t, slow %t", off, silent, slow)
			}
		})
	}
}

// Where all are slow the limit grows, and ends when it is calm.
func TestSlowLimit(t *testing.T) {
	now := time.Now()
	l := &List{failed: map[string]time.Time{}, now: func() time.Time { return now }}
	s := join.ServerAddr{ID: "1"}
	if got := l.slowLimit(); got != slowFirst {
		t.Errorf("at first %s", got)
	}
	for i, want := range []time.Duration{6 * time.Second, 12 * time.Second, 24 * time.Second, 24 * time.Second} {
		hung := join.ServerAddr{ID: fmt.Sprint(i % 2)}
		for range 3 { // connections to one that hangs
			l.gaveUp(hung, true)
			now = now.Add(time.Second)
			if got := l.slowLimit(); got != want {
				t.Errorf("%s, want %s", got, want)
			}
		}
	}
	now = now.Add(calmAfter)
	if got := l.slowLimit(); got != slowFirst {
		t.Errorf("after a while %s", got)
	}
	l.gaveUp(s, true)
	now = now.Add(l.slowLimit() + time.Second) // and goes on to
	l.gaveUp(s, true)
	if got := l.slowLimit(); got != 4*slowFirst {
		t.Errorf("one that hangs again: %s", got)
	}
	for range 2 {
		now = now.Add(l.slowLimit() + time.Second)
		l.gaveUp(s, true)
	}
	l.gaveUp(s, false)
	now = now.Add(calmAfter - time.Second)
	if got := l.slowLimit(); got != slowLast {
		t.Errorf("before it is calm %s", got)
	}
	now = now.Add(2 * time.Second)
	if got := l.slowLimit(); got != slowFirst {
		t.Errorf("when it is calm %s", got)
	}
	if l.failed["1"].IsZero() {
		t.Error("the server is tried first again")
	}
	if pingTimeout <= slowLast {
		t.Error("net/http gives up before")
	}
}
