package stream

import (
	"bytes"
	"context"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// server is a Dialer to a pod's server.
type server string

func (s server) Dial(ctx context.Context, _ string, _ bool, _ int32) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "tcp", string(s))
}

// listen has each connection served by serve.
func listen(t *testing.T, serve func(net.Conn)) server {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				serve(c)
			}()
		}
	}()
	return server(l.Addr().String())
}

// clientSide is a forwarded stream; Close ends what reads from it.
type clientSide struct {
	io.Reader
	bytes.Buffer
	closed func()
}

func (c *clientSide) Read(p []byte) (int, error) { return c.Reader.Read(p) }
func (c *clientSide) Close() error               { c.closed(); return nil }

func forward(t *testing.T, f *forwarder, s *clientSide) {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- f.PortForward(context.Background(), "", "u", 80, s) }()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(5 * time.Minute):
		t.Fatal("it does not end")
	}
}

// TestForwardEnds: what was opened in a pod for a client that is gone does not stay,
// also when the pod's server never ends a connection.
func TestForwardEnds(t *testing.T) {
	hold := make(chan struct{})
	defer close(hold)
	never := listen(t, func(net.Conn) { <-hold })
	t.Run("the client has said all", func(t *testing.T) {
		forward(t, &forwarder{never, false, t.Context(), 50 * time.Millisecond}, &clientSide{Reader: bytes.NewReader([]byte("hello")), closed: func() {}})
	})
	t.Run("the session is over", func(t *testing.T) {
		r, w := io.Pipe()
		session, over := context.WithCancel(t.Context())
		time.AfterFunc(50*time.Millisecond, over)
		forward(t, &forwarder{never, false, session, time.Hour}, &clientSide{Reader: r, closed: func() { _ = w.Close() }})
	})
}

// halfConn is a connection whose two directions end apart, as TCP's do.
type halfConn struct {
	net.Conn // of the answer
	said     net.Conn
}

func (c halfConn) Write(b []byte) (int, error) { return c.said.Write(b) }
func (c halfConn) CloseWrite() error           { return c.said.Close() }

func (c halfConn) Close() error {
	_ = c.said.Close()
	return c.Conn.Close()
}

// dialed gives the same connection to whoever dials.
type dialed struct{ net.Conn }

func (d dialed) Dial(context.Context, string, bool, int32) (net.Conn, error) { return d.Conn, nil }

// TestForwardWaitsForTheAnswer: a client that has said all it had to say still gets the
// answer, as long as something of it comes: also one that takes, in all, longer than
// the silence after which it would be given up. After such a silence it is.
func TestForwardWaitsForTheAnswer(t *testing.T) {
	const silence = 20 * time.Second
	for name, tc := range map[string]struct {
		pauses []time.Duration // before each byte
		want   string
	}{
		"slow":   {slices.Repeat([]time.Duration{silence - time.Second}, 10), "xxxxxxxxxx"},
		"silent": {[]time.Duration{silence - time.Second, silence + time.Second, 0}, "x"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				answer, pod := net.Pipe()
				said, hears := net.Pipe()
				var serving sync.WaitGroup
				defer serving.Wait()
				serving.Go(func() {
					defer func() { _ = pod.Close() }()
					_, _ = io.Copy(io.Discard, hears)
					for _, pause := range tc.pauses {
						time.Sleep(pause) // of the bubble
						if _, err := io.WriteString(pod, "x"); err != nil {
							return
						}
					}
				})
				s := &clientSide{Reader: bytes.NewReader([]byte("hello")), closed: func() {}}
				forward(t, &forwarder{dialed{halfConn{answer, said}}, false, t.Context(), silence}, s)
				if got := s.String(); got != tc.want {
					t.Errorf("the client got %q, want %q", got, tc.want)
				}
			})
		})
	}
}
