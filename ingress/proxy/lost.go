package proxy

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync/atomic"
	"time"
)

// A connection of HTTP/2 carries all requests to its endpoint, and one whose other
// end is gone without a word would hold up every one of them until the kernel gives
// up, a quarter of an hour later. So it is pinged.
const (
	pingAfter = 15 * time.Second // without a frame on it
	pingFor   = 10 * time.Second // for the answer; then it is closed
)

// heardConn knows when its other end last said something.
type heardConn struct {
	net.Conn
	heard atomic.Int64 // Unix nanoseconds
}

// Read implements net.Conn.
func (c *heardConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.heard.Store(time.Now().UnixNano())
	}
	return n, err
}

// heardDialer makes such connections.
func heardDialer(d *net.Dialer) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := d.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		h := &heardConn{Conn: c}
		h.heard.Store(time.Now().UnixNano())
		return h, nil
	}
}

// lostWatch remembers the connection of HTTP/2 that a request is sent on.
type lostWatch struct{ conn atomic.Pointer[heardConn] }

// watch is the request with the watch on it.
func (w *lostWatch) watch(req *http.Request) *http.Request {
	return req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
		c := i.Conn
		if t, ok := c.(*tls.Conn); ok {
			if t.ConnectionState().NegotiatedProtocol != "h2" {
				return
			}
			c = t.NetConn()
		}
		if h, ok := c.(*heardConn); ok {
			w.conn.Store(h)
		}
	}}))
}

// lost reports whether the request's connection was silent for as long as it takes
// to be given up: it was not the request's end that ended it.
func (w *lostWatch) lost(silence time.Duration) bool {
	c := w.conn.Load()
	return c != nil && time.Since(time.Unix(0, c.heard.Load())) >= silence
}
