package dns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// listen binds to addr for both protocols. A new process may bind before the
// old one has gone.
func listen(ctx context.Context, addr netip.AddrPort) (*net.UDPConn, *net.TCPListener, error) {
	c := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var opt error
		err := raw.Control(func(fd uintptr) { opt = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		return errors.Join(err, opt)
	}}
	p, err := c.ListenPacket(ctx, "udp", addr.String())
	if err != nil {
		return nil, nil, err
	}
	l, err := c.Listen(ctx, "tcp", addr.String())
	if err != nil {
		return nil, nil, errors.Join(err, p.Close())
	}
	udp := p.(*net.UDPConn)
	_ = udp.SetReadBuffer(4 << 20) // a burst is worth some memory; less is no fault
	return udp, l.(*net.TCPListener), nil
}

// servePackets answers datagrams until ctx ends. What is known is answered at
// once; what has to be asked waits beside, as many as the bounds permit.
func (s *Server) servePackets(ctx context.Context, conn *net.UDPConn) error {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	var mu sync.Mutex
	var fault error
	for range max(2, runtime.GOMAXPROCS(0)) {
		wg.Go(func() {
			buf := make([]byte, dns.MaxMsgSize)
			out := make([]byte, dns.MaxMsgSize)
			for {
				n, from, err := conn.ReadFromUDPAddrPort(buf)
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err != nil {
					if isTransient(err) { // an ICMP error of a former answer
						continue
					}
					mu.Lock()
					fault = err
					mu.Unlock()
					conn.Close()
					return
				}
				send := func(m *dns.Msg, into []byte) {
					if b, err := m.PackBuffer(into); err == nil {
						_, _ = conn.WriteToUDPAddrPort(b, from) // who has gone asks again
					}
				}
				s.packet(ctx, buf[:n], from.Addr(), func(m *dns.Msg) { send(m, out) }, func(later func() *dns.Msg) {
					wg.Go(func() {
						if m := later(); m != nil && ctx.Err() == nil {
							send(m, nil)
						}
					})
				})
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("read questions: %w", fault)
}

func isTransient(err error) bool {
	return errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EMSGSIZE) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EINTR)
}

// packet answers one datagram: by reply at once, by spawn later, or not at all.
func (s *Server) packet(ctx context.Context, b []byte, client netip.Addr, reply func(*dns.Msg), spawn func(func() *dns.Msg)) {
	began := time.Now()
	q, refusal := s.read(b, client, false)
	if q == nil {
		if refusal != nil {
			reply(refusal)
		}
		return
	}
	m, done := s.immediate(q)
	if done {
		s.tell(q, m, began)
		reply(m)
		return
	}
	if !s.clients.enter(client) {
		s.metrics.rejects.Inc()
		m := s.failure(q)
		s.tell(q, m, began)
		reply(m)
		return
	}
	spawn(func() *dns.Msg {
		defer s.clients.leave(client)
		m := s.eventual(ctx, q)
		s.tell(q, m, began)
		return m
	})
}

// read unpacks a message and looks at it.
func (s *Server) read(b []byte, client netip.Addr, stream bool) (*question, *dns.Msg) {
	msg := new(dns.Msg)
	if err := msg.Unpack(b); err != nil {
		if len(b) < 12 || b[2]&0x80 != 0 {
			return nil, nil
		}
		m := new(dns.Msg)
		m.Id, m.Response, m.Rcode = binary.BigEndian.Uint16(b), true, dns.RcodeFormatError
		m.Opcode = int(b[2]>>3) & 0xf
		return nil, m
	}
	q, refusal := s.accept(msg, client.Unmap(), stream)
	if refusal != nil {
		size := dns.MaxMsgSize
		if !stream {
			size = dns.MinMsgSize
		}
		if opt := msg.IsEdns0(); opt != nil {
			rcode := refusal.Rcode
			refusal.SetEdns0(udpPayload, opt.Do())
			refusal.Rcode = rcode
		}
		refusal.Truncate(size)
	}
	return q, refusal
}

// immediate is now, made fit to send. A fault of this program costs one answer.
func (s *Server) immediate(q *question) (m *dns.Msg, done bool) {
	defer func() {
		if p := recover(); p != nil {
			s.panicked(p)
			m, done = s.failure(q), true
		}
	}()
	if m, done = s.now(q); done {
		finish(q, m)
	}
	return m, done
}

// eventual is wait, made fit to send.
func (s *Server) eventual(ctx context.Context, q *question) (m *dns.Msg) {
	defer func() {
		if p := recover(); p != nil {
			s.panicked(p)
			m = s.failure(q)
		}
	}()
	return finish(q, s.wait(ctx, q))
}

func (s *Server) panicked(p any) {
	s.metrics.panics.Inc()
	klog.Background().Error(fmt.Errorf("%v", p), "Cluster DNS could not answer a question")
}

func (s *Server) failure(q *question) *dns.Msg {
	m := new(dns.Msg).SetRcode(q.msg, dns.RcodeServerFailure)
	m.RecursionAvailable = true
	return finish(q, m)
}

func (s *Server) tell(q *question, m *dns.Msg, began time.Time) {
	zone := "."
	if q.name == s.zone.name || strings.HasSuffix(q.name, "."+s.zone.name) {
		zone = s.zone.name
	}
	s.metrics.answered(q, zone, m, began)
}

// Times of a stream (RFC 7766, section 6.2.3).
const (
	streamIdle  = 10 * time.Second
	streamWrite = 5 * time.Second
)

// serveStreams answers TCP connections until ctx ends.
func (s *Server) serveStreams(ctx context.Context, ln *net.TCPListener) error {
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	conns := newClients(maxStreams, maxStreamsPerClient)
	for {
		c, err := ln.AcceptTCP()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ECONNABORTED) {
				select {
				case <-ctx.Done():
				case <-time.After(50 * time.Millisecond):
				}
				continue
			}
			return fmt.Errorf("accept connections: %w", err)
		}
		client := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
		if !conns.enter(client) {
			s.metrics.rejects.Inc()
			c.Close()
			continue
		}
		wg.Go(func() {
			defer conns.leave(client)
			defer c.Close()
			stop := context.AfterFunc(ctx, func() { c.Close() })
			defer stop()
			s.stream(ctx, c, client)
		})
	}
}

// stream answers the questions of one connection, one after the other.
func (s *Server) stream(ctx context.Context, c net.Conn, client netip.Addr) {
	var length [2]byte
	for range maxStreamQueries {
		_ = c.SetReadDeadline(time.Now().Add(streamIdle))
		if _, err := io.ReadFull(c, length[:]); err != nil {
			return
		}
		b := make([]byte, binary.BigEndian.Uint16(length[:]))
		if _, err := io.ReadFull(c, b); err != nil {
			return
		}
		began := time.Now()
		q, m := s.read(b, client, true)
		if q != nil {
			var done bool
			if m, done = s.immediate(q); !done {
				if s.clients.enter(client) {
					m = s.eventual(ctx, q)
					s.clients.leave(client)
				} else {
					s.metrics.rejects.Inc()
					m = s.failure(q)
				}
			}
			s.tell(q, m, began)
		}
		if m == nil {
			return
		}
		out, err := m.Pack()
		if err != nil || len(out) > dns.MaxMsgSize {
			return
		}
		_ = c.SetWriteDeadline(time.Now().Add(streamWrite))
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(out))), out...)); err != nil {
			return
		}
	}
}

// clients bounds what is under way, in all and for each client, so that one
// cannot take what all others need. Safe for concurrent use.
type clients struct {
	max, each int

	mu     sync.Mutex // guards all below
	all    int
	active map[netip.Addr]int
}

func newClients(max, each int) *clients {
	return &clients{max: max, each: each, active: map[netip.Addr]int{}}
}

func (c *clients) enter(a netip.Addr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.all >= c.max || c.active[a] >= c.each {
		return false
	}
	c.all++
	c.active[a]++
	return true
}

func (c *clients) leave(a netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all--
	if c.active[a]--; c.active[a] <= 0 {
		delete(c.active, a)
	}
}
