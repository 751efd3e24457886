package transport

import (
	"crypto/x509"
	"net"
	"sync"
)

// live holds the open connections of those who showed a certificate, by the id of
// its key. Its zero value is ready.
type live struct {
	mu    sync.Mutex
	conns map[string]map[*liveConn]struct{}
}

// liveConn is the connection below TLS, forgotten when it is closed.
type liveConn struct {
	net.Conn
	all  *live
	peer string // "": not known yet; guarded by all.mu, as leaf
	leaf *x509.Certificate
	// leave ends its being counted as a stranger's.
	leave func()
}

// Close implements net.Conn.
func (c *liveConn) Close() error {
	c.all.mu.Lock()
	delete(c.all.conns[c.peer], c)
	if len(c.all.conns[c.peer]) == 0 {
		delete(c.all.conns, c.peer)
	}
	c.all.mu.Unlock()
	c.leave()
	return c.Conn.Close()
}

// add notes whose connection it is.
func (l *live) add(peer string, leaf *x509.Certificate, c *liveConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns == nil {
		l.conns = map[string]map[*liveConn]struct{}{}
	}
	if l.conns[peer] == nil {
		l.conns[peer] = map[*liveConn]struct{}{}
	}
	c.peer, c.leaf = peer, leaf
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

// cutIf cuts those that judge says so of.
func (l *live) cutIf(judge func(peer string, leaf *x509.Certificate) bool) {
	type one struct {
		conn *liveConn
		leaf *x509.Certificate
	}
	all := map[string][]one{}
	l.mu.Lock()
	for peer, conns := range l.conns {
		for c := range conns {
			all[peer] = append(all[peer], one{c, c.leaf})
		}
	}
	l.mu.Unlock()
	for peer, conns := range all {
		for _, o := range conns {
			if judge(peer, o.leaf) {
				o.conn.Conn.Close()
			}
		}
	}
}
