package transport

import (
	"crypto/tls"
	"sync"
)

// live holds the open connections from other nodes, by the peer's id. Its zero
// value is ready.
type live struct {
	mu    sync.Mutex
	conns map[string]map[*liveConn]struct{}
}

// liveConn is a connection that is forgotten when it is closed.
type liveConn struct {
	*tls.Conn
	all  *live
	peer string
}

func (c *liveConn) Close() error {
	c.all.mu.Lock()
	delete(c.all.conns[c.peer], c)
	if len(c.all.conns[c.peer]) == 0 {
		delete(c.all.conns, c.peer)
	}
	c.all.mu.Unlock()
	return c.Conn.Close()
}

func (l *live) add(peer string, c *tls.Conn) *liveConn {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns == nil {
		l.conns = map[string]map[*liveConn]struct{}{}
	}
	if l.conns[peer] == nil {
		l.conns[peer] = map[*liveConn]struct{}{}
	}
	conn := &liveConn{c, l, peer}
	l.conns[peer][conn] = struct{}{}
	return conn
}

func (l *live) cut(peer string) {
	l.mu.Lock()
	conns := l.conns[peer]
	delete(l.conns, peer)
	l.mu.Unlock()
	for c := range conns {
		// Its user sees the error and closes it, too.
		c.NetConn().Close()
	}
}
