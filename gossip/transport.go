package gossip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/clusterd/clusterd/loglimit"
)

// transport carries packets over UDP on the node's port number and streams
// over the TLS port of the same number, so that a node needs one hole in a
// firewall, and memberlist's own unauthenticated TCP listener never exists.
type transport struct {
	// ctx ends with Run. memberlist dials and reads with timeouts of its own and
	// can not be interrupted, so that one silent peer would hold up the end.
	ctx     context.Context
	udp     packetConn
	stream  Stream
	packets chan *memberlist.Packet
	streams chan net.Conn
	done    chan struct{}
	log     *loglimit.Logger
	wg      sync.WaitGroup
	once    sync.Once
}

var _ memberlist.Transport = (*transport)(nil)

// packetConn is what a transport needs of a *net.UDPConn.
type packetConn interface {
	ReadFrom(b []byte) (int, net.Addr, error)
	WriteToUDPAddrPort(b []byte, to netip.AddrPort) (int, error)
	Close() error
}

const maxPacket = 65536

func newTransport(ctx context.Context, addr netip.AddrPort, s Stream, log *loglimit.Logger) (*transport, error) {
	udp, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(addr))
	if err != nil {
		return nil, fmt.Errorf("listen for gossip: %w", err)
	}
	return serve(ctx, udp, s, log), nil
}

// serve reads from both until Shutdown.
func serve(ctx context.Context, udp packetConn, s Stream, log *loglimit.Logger) *transport {
	t := &transport{
		ctx:     ctx,
		udp:     udp,
		stream:  s,
		packets: make(chan *memberlist.Packet),
		streams: make(chan net.Conn),
		done:    make(chan struct{}),
		log:     log,
	}
	t.wg.Add(2)
	go t.readPackets()
	go t.acceptStreams()
	return t
}

func (t *transport) readPackets() {
	defer t.wg.Done()
	buf := make([]byte, maxPacket)
	var pause backoff
	for {
		n, from, err := t.udp.ReadFrom(buf)
		now := time.Now()
		if err != nil {
			// ICMP errors of earlier sends arrive here too, one each.
			if !t.retry(&pause, "gossip's packets cannot be read, trying again", err) {
				return
			}
			continue
		}
		pause.reset()
		// memberlist keeps the packet: it gets a copy of just its size.
		p := &memberlist.Packet{Buf: append([]byte(nil), buf[:n]...), From: from, Timestamp: now}
		select {
		case t.packets <- p:
		case <-t.done:
			return
		}
	}
}

// acceptStreams goes on after an error (too many open files, say) for as long
// as the transport is not shut down.
func (t *transport) acceptStreams() {
	defer t.wg.Done()
	var pause backoff
	for {
		c, err := t.stream.Listener.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) || !t.retry(&pause, "gossip's streams cannot be accepted, trying again", err) {
				return
			}
			continue
		}
		pause.reset()
		select {
		case t.streams <- c:
		case <-t.done:
			c.Close()
			return
		}
	}
}

// retry pauses after an error, and logs one that lasts. It returns false when the
// transport is shut down.
func (t *transport) retry(pause *backoff, msg string, err error) bool {
	select {
	case <-t.done: // the error is that of a socket we closed
		return false
	default:
	}
	if pause.failed {
		t.log.Log(t.ctx, slog.LevelWarn, msg, msg, "err", err)
	}
	return pause.wait(t.done)
}

// backoff is the pause between tries that keep failing: none after the first
// failure, then 5 ms, doubled up to a second.
type backoff struct {
	failed bool
	next   time.Duration
}

func (b *backoff) reset() { *b = backoff{} }

// wait pauses; it returns false when done was closed.
func (b *backoff) wait(done <-chan struct{}) bool {
	if !b.failed {
		b.failed, b.next = true, 5*time.Millisecond
		select {
		case <-done:
			return false
		default:
			return true
		}
	}
	timer := time.NewTimer(b.next)
	defer timer.Stop()
	b.next = min(2*b.next, time.Second)
	select {
	case <-done:
		return false
	case <-timer.C:
		return true
	}
}

// FinalAdvertiseAddr returns the configured address: it was chosen with care
// before gossip started.
func (t *transport) FinalAdvertiseAddr(ip string, port int) (net.IP, int, error) {
	addr, err := netip.ParseAddr(ip)
	if err != nil {
		return nil, 0, fmt.Errorf("advertised address: %w", err)
	}
	return addr.AsSlice(), port, nil
}

func (t *transport) WriteTo(b []byte, addr string) (time.Time, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return time.Time{}, err
	}
	_, err = t.udp.WriteToUDPAddrPort(b, to)
	return time.Now(), err
}

func (t *transport) PacketCh() <-chan *memberlist.Packet { return t.packets }
func (t *transport) StreamCh() <-chan net.Conn           { return t.streams }

func (t *transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(t.ctx, timeout)
	defer cancel()
	c, err := t.stream.Dial(ctx, to)
	if err != nil {
		return nil, err
	}
	return &boundConn{Conn: c, unbind: context.AfterFunc(t.ctx, func() { c.Close() })}, nil
}

// boundConn is closed when the transport's context ends.
type boundConn struct {
	net.Conn
	unbind func() bool
}

func (c *boundConn) Close() error {
	c.unbind()
	return c.Conn.Close()
}

// Shutdown closes the UDP socket and the stream listener, and waits for both
// loops.
func (t *transport) Shutdown() error {
	t.once.Do(func() {
		close(t.done)
		t.udp.Close()
		t.stream.Listener.Close()
	})
	t.wg.Wait()
	return nil
}
