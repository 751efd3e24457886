// Package raftstoretest runs several raftstore members in one process, over
// loopback, with faults: partitions, kills, restarts. A cluster ends with
// checks that hold whatever happened.
package raftstoretest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
)

// network knows where members listen, and who may reach whom.
type network struct {
	mu    sync.Mutex
	addr  map[string]string      // member → listening address; absent: down
	cut   map[[2]string]bool     // from, to
	lost  map[[2]string]bool     // from, to: what is sent that way vanishes
	conns map[net.Conn][2]string // open, dialed
	peers map[string]string      // who dialed from that local address
}

func newNetwork() *network {
	return &network{addr: map[string]string{}, cut: map[[2]string]bool{}, lost: map[[2]string]bool{}, conns: map[net.Conn][2]string{}, peers: map[string]string{}}
}

func (n *network) listen(id string) (net.Listener, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.addr[id] = l.Addr().String()
	return l, nil
}

func (n *network) down(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.addr, id)
}

var errUnreachable = errors.New("unreachable")

// errDown is what a host says of a process that does not run.
var errDown = fmt.Errorf("the member is down: %w", syscall.ECONNREFUSED)

// dialer is a member's Config.Dial.
func (n *network) dialer(from string) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, to string) (net.Conn, error) {
		n.mu.Lock()
		addr, up := n.addr[to]
		cut := n.cut[[2]string{from, to}]
		silent := n.lost[[2]string{from, to}] || n.lost[[2]string{to, from}]
		n.mu.Unlock()
		switch {
		case silent: // no handshake without both ways
			<-ctx.Done()
			return nil, ctx.Err()
		case cut:
			return nil, errUnreachable
		case !up:
			return nil, errDown
		}
		var d net.Dialer
		c, err := d.DialContext(ctx, "tcp", addr)
		if err != nil {
			return nil, err
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.cut[[2]string{from, to}] {
			_ = c.Close()
			return nil, errUnreachable
		}
		lc := &link{Conn: c, n: n, from: from, to: to}
		n.conns[lc] = [2]string{from, to}
		n.peers[c.LocalAddr().String()] = from
		return lc, nil
	}
}

// peerID is every member's Config.PeerID. A stream's first bytes are sent after
// its dialer was noted.
func (n *network) peerID(c net.Conn) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.peers[c.RemoteAddr().String()]
}

// sever closes what is open between two members and refuses new streams.
func (n *network) sever(a, b string, cut bool) {
	n.mu.Lock()
	var closing []net.Conn
	for _, pair := range [][2]string{{a, b}, {b, a}} {
		n.cut[pair] = cut
		for c, p := range n.conns {
			if cut && p == pair {
				closing = append(closing, c)
			}
		}
	}
	n.mu.Unlock()
	for _, c := range closing {
		_ = c.Close()
	}
}

// swallow makes what is sent from one member to another vanish. When it ends,
// the streams on which something is missing break.
func (n *network) swallow(from, to string, on bool) {
	n.mu.Lock()
	var closing []net.Conn
	if n.lost[[2]string{from, to}] = on; !on {
		for c, p := range n.conns {
			if p == [2]string{from, to} || p == [2]string{to, from} {
				closing = append(closing, c)
			}
		}
	}
	n.mu.Unlock()
	for _, c := range closing {
		_ = c.Close()
	}
}

func (n *network) swallows(from, to string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lost[[2]string{from, to}]
}

// link is a dialed stream. Both ways pass through it.
type link struct {
	net.Conn
	n        *network
	from, to string
}

func (l *link) Write(p []byte) (int, error) {
	if l.n.swallows(l.from, l.to) {
		return len(p), nil
	}
	return l.Conn.Write(p)
}

func (l *link) Read(p []byte) (int, error) {
	for {
		n, err := l.Conn.Read(p)
		if err != nil || !l.n.swallows(l.to, l.from) {
			return n, err
		}
	}
}

func (l *link) Close() error {
	l.n.mu.Lock()
	delete(l.n.conns, l)
	l.n.mu.Unlock()
	return l.Conn.Close()
}
