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
)

// network knows where members listen, and who may reach whom.
type network struct {
	mu    sync.Mutex
	addr  map[string]string      // member → listening address; absent: down
	cut   map[[2]string]bool     // from, to
	conns map[net.Conn][2]string // open, dialed
}

func newNetwork() *network {
	return &network{addr: map[string]string{}, cut: map[[2]string]bool{}, conns: map[net.Conn][2]string{}}
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

// dialer is a member's Config.Dial.
func (n *network) dialer(from string) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, to string) (net.Conn, error) {
		n.mu.Lock()
		addr, ok := n.addr[to]
		ok = ok && !n.cut[[2]string{from, to}]
		n.mu.Unlock()
		if !ok {
			return nil, errUnreachable
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
		lc := &link{Conn: c, n: n}
		n.conns[lc] = [2]string{from, to}
		return lc, nil
	}
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

type link struct {
	net.Conn
	n *network
}

func (l *link) Close() error {
	l.n.mu.Lock()
	delete(l.n.conns, l)
	l.n.mu.Unlock()
	return l.Conn.Close()
}
