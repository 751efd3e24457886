package gossip

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/clusterd/clusterd/loglimit"
)

// fakeUDP gives packets of 100 bytes as long as there are some, then errors.
type fakeUDP struct {
	packets, reads int
	net.UDPConn    // for WriteToUDPAddrPort, which is not called
}

func (u *fakeUDP) ReadFrom(b []byte) (int, net.Addr, error) {
	if u.reads++; u.reads <= u.packets {
		return copy(b, bytes.Repeat([]byte{byte(u.reads)}, 100)), &net.UDPAddr{}, nil
	}
	return 0, nil, errors.New("no buffer space available")
}

func (u *fakeUDP) Close() error { return nil }

// silentListener accepts nothing, or fails.
type silentListener struct {
	err    error
	closed chan struct{}
}

func (l silentListener) Accept() (net.Conn, error) {
	if l.err != nil {
		return nil, l.err
	}
	<-l.closed
	return nil, net.ErrClosed
}
func (l silentListener) Close() error   { close(l.closed); return nil }
func (l silentListener) Addr() net.Addr { return nil }

// Bugs of issue 9: an error of the UDP socket that lasts was retried without a pause,
// errors of both were logged nowhere, and each packet held 64 KiB.
func TestErrorsThatLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		udp := &fakeUDP{packets: 2}
		tr := serve(t.Context(), udp, Stream{Listener: silentListener{errors.New("too many open files"), make(chan struct{})}},
			loglimit.New(slog.New(slog.NewTextHandler(&log, nil)), linesEvery))
		for i := range 2 {
			p := <-tr.PacketCh()
			if len(p.Buf) != 100 || p.Buf[0] != byte(i+1) || cap(p.Buf) > 1000 {
				t.Errorf("packet %d: %d bytes of %d, that begin with %v", i, len(p.Buf), cap(p.Buf), p.Buf[:1])
			}
		}
		time.Sleep(10 * time.Second) // of the bubble
		synctest.Wait()
		if err := tr.Shutdown(); err != nil {
			t.Error(err)
		}
		if failed := udp.reads - 2; failed < 5 || failed > 25 {
			t.Errorf("%d reads of a socket that fails, in 10 s", failed)
		}
		for _, want := range []string{"no buffer space available", "too many open files"} {
			if n := strings.Count(log.String(), want); n != 1 {
				t.Errorf("%d lines say %q:\n%s", n, want, log.String())
			}
		}
	})
}

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
	tr, err := newTransport(context.Background(), netip.MustParseAddrPort("127.0.0.1:0"), Stream{Listener: l}, loglimit.New(slog.New(slog.DiscardHandler), linesEvery))
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
