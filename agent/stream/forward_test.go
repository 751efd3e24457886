package stream

import (
	"bytes"
	"context"
	"io"
	"net"
	"testing"
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
	case <-time.After(time.Minute):
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

// TestForwardWaitsForTheAnswer: a client that has said all it had to say still gets the
// answer, as long as something of it comes.
func TestForwardWaitsForTheAnswer(t *testing.T) {
	slow := listen(t, func(c net.Conn) {
		_, _ = io.Copy(io.Discard, c)
		for range 10 {
			if _, err := io.WriteString(c, "x"); err != nil {
				return
			}
		}
	})
	s := &clientSide{Reader: bytes.NewReader([]byte("hello")), closed: func() {}}
	forward(t, &forwarder{slow, false, t.Context(), 20 * time.Second}, s)
	if got := s.String(); got != "xxxxxxxxxx" {
		t.Errorf("the client got %q", got)
	}
}
