package transport

import (
	"net"
	"sync"
)

// live holds the open connections from nodes, by the peer's id. Its zero value
// is ready.
type live struct {
	mu    sync.Mutex
	conns map[string]map[*liveConn]struct{}
}

// liveConn is the connection below TLS, forgotten when it is closed.
type liveConn struct {
	net.Conn
	all  *live
	peer string // "": not known yet, or not a node; guarded by all.mu
}

// Close implements net.Conn.
func (c *liveConn) Close() error {
	c.all.mu.Lock()
	delete(c.all.conns[c.peer], c)
	if len(c.all.conns[c.peer]) == 0 {
		delete(c.all.conns, c.peer)
	}
	c.all.mu.Unlock()
	return c.Conn.Close()
}

// add notes whose connection it is.
func (l *live) add(peer string, c *liveConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns == nil {
		l.conns = map[string]map[*liveConn]struct{}{}
	}
	if l.conns[peer] == nil {
		l.conns[peer] = map[*liveConn]struct{}{}
	}
	c.peer = peer
	l.conns[peer][c] = struct{}{}
}

func (l *live) cut(peer string) {
	l.mu.Lock()
	conns := l.conns[peer]
	delete(l.conns, peer)
	l.mu.Unlock()
	for c := range conns {
		// Its user sees the error and closes it, too.
		c.Conn.Close()
	}
}
