package gossip

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// flakyListener fails the given number of times before it accepts.
type flakyListener struct {
	net.Listener
	failures atomic.Int32
}

func (l *flakyListener) Accept() (net.Conn, error) {
	if l.failures.Add(-1) >= 0 {
		return nil, errors.New("too many open files")
	}
	return l.Listener.Accept()
}

// The bug of issue 9: one error of Accept ended gossip's streams permanently.
func TestStreamsAreAcceptedAfterAnError(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &flakyListener{Listener: inner}
	l.failures.Store(3)
	tr, err := newTransport(context.Background(), netip.MustParseAddrPort("127.0.0.1:0"), Stream{Listener: l})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Shutdown()
	c, err := net.Dial("tcp", inner.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	select {
	case got := <-tr.StreamCh():
		got.Close()
	case <-time.After(time.Minute):
		t.Fatal("the stream was not accepted")
	}
}

// The bug of issue 9: an error that lasts was retried without pause.
func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		done := make(chan struct{})
		var b backoff
		began := time.Now()
		for range 12 {
			if !b.wait(done) {
				t.Fatal("it gave up")
			}
		}
		// 0, 5, 10 … 640 ms, then a second each.
		if took := time.Since(began); took != 1275*time.Millisecond+3*time.Second {
			t.Errorf("12 failures took %v", took)
		}
		b.reset()
		began = time.Now()
		if b.wait(done); time.Since(began) != 0 {
			t.Error("a single failure is waited for")
		}
		close(done)
		if b.wait(done) {
			t.Error("it goes on after the end")
		}
	})
}
