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
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// Bounds of what reads datagrams. The kernel spreads clients over the sockets; each
// is read by one goroutine, as several would wait for each other.
const (
	maxSockets   = 4
	batch        = 16   // datagrams that one call to the kernel reads or writes
	longestInput = 4096 // bytes of a question; of a longer one the rest is not looked at
)

// listen binds to addr for both protocols; port 0: to one that is free. A new process
// may bind before the old one has gone.
func listen(ctx context.Context, addr netip.AddrPort) (udp []*net.UDPConn, tcp *net.TCPListener, err error) {
	defer func() {
		if err != nil {
			for _, c := range udp {
				c.Close()
			}
		}
	}()
	c := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var opt error
		err := raw.Control(func(fd uintptr) { opt = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		return errors.Join(err, opt)
	}}
	for range min(maxSockets, runtime.GOMAXPROCS(0)) {
		p, err := c.ListenPacket(ctx, "udp", addr.String())
		if err != nil {
			return udp, nil, err
		}
		conn := p.(*net.UDPConn)
		udp = append(udp, conn)
		addr = conn.LocalAddr().(*net.UDPAddr).AddrPort()
		_ = conn.SetReadBuffer(4 << 20) // a burst is worth some memory; less is no fault
		_ = conn.SetWriteBuffer(1 << 20)
	}
	l, err := c.Listen(ctx, "tcp", addr.String())
	if err != nil {
		return udp, nil, err
	}
	return udp, l.(*net.TCPListener), nil
}

// batches reads and writes several datagrams by one call: ipv4.PacketConn or
// ipv6.PacketConn.
type batches interface {
	ReadBatch([]ipv4.Message, int) (int, error)
	WriteBatch([]ipv4.Message, int) (int, error)
}

func batchesOf(conn *net.UDPConn) batches {
	if conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Is4() {
		return ipv4.NewPacketConn(conn)
	}
	return ipv6.NewPacketConn(conn)
}

// servePackets answers datagrams until ctx ends. What is known is answered at
// once; what has to be asked waits beside, as many as the bounds permit.
func (s *Server) servePackets(ctx context.Context, conn *net.UDPConn) error {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	pc := batchesOf(conn)
	in, out := make([]ipv4.Message, batch), make([]ipv4.Message, batch)
	buffers := make([][]byte, batch) // of answers
	for i := range batch {
		in[i].Buffers, out[i].Buffers = [][]byte{make([]byte, longestInput)}, make([][]byte, 1)
		buffers[i] = make([]byte, 0, udpPayload)
	}
	for {
		n, err := pc.ReadBatch(in, 0)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && isTransient(err): // an ICMP error of a former answer
			continue
		case err != nil:
			return fmt.Errorf("read questions: %w", errors.Join(err, conn.Close()))
		}
		answers := 0
		for _, m := range in[:n] {
			from := m.Addr
			client := from.(*net.UDPAddr).AddrPort().Addr().Unmap()
			b := s.packet(ctx, m.Buffers[0][:m.N], client, buffers[answers], func(later func() []byte) {
				wg.Go(func() {
					if b := later(); b != nil && ctx.Err() == nil {
						_, _ = conn.WriteTo(b, from) // who has gone asks again
					}
				})
			})
			if b != nil {
				out[answers].Buffers[0], out[answers].Addr = b, from
				answers++
			}
		}
		writeAll(pc, out[:answers])
	}
}

// writeAll sends what can be sent at once: answers to pods that their neighbours do not
// find fill the socket for seconds, and who waited for room would answer none meanwhile.
// What is dropped is asked for again.
func writeAll(pc batches, rest []ipv4.Message) {
	for len(rest) > 0 {
		n, err := pc.WriteBatch(rest, unix.MSG_DONTWAIT)
		if errors.Is(err, net.ErrClosed) || errors.Is(err, unix.EAGAIN) {
			return
		}
		rest = rest[max(1, n):] // an error is the first one's alone
	}
}

func isTransient(err error) bool {
	return errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EMSGSIZE) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EINTR)
}

// packet answers one datagram: at once, where out has room for it, or later by what
// is given to spawn, or not at all.
func (s *Server) packet(ctx context.Context, b []byte, client netip.Addr, out []byte, spawn func(func() []byte)) []byte {
	began := time.Now()
	if reply, done := s.plainAnswer(out, b, client, began); done {
		return reply
	}
	q, refusal := s.read(b, client, false)
	if q == nil {
		if refusal == nil {
			return nil
		}
		return s.refuse(refusal, out, client, len(b), false, began)
	}
	m, done := s.immediate(q)
	if !done && s.clients.acquire(client) {
		spawn(func() []byte {
			defer s.clients.release(client)
			return s.pack(q, s.eventual(ctx, q), nil, began)
		})
		return nil
	}
	if !done {
		s.metrics.rejects.Inc()
		m = s.failure(q)
	}
	return s.pack(q, m, out, began)
}

// refuse is a refusal on the wire.
func (s *Server) refuse(m *dns.Msg, out []byte, client netip.Addr, size int, stream bool, began time.Time) []byte {
	reply, err := m.PackBuffer(out[:cap(out)])
	if err != nil {
		return nil
	}
	x := exchanged{zone: droppedZone, stream: stream, client: client.Unmap(), rcode: m.Rcode, asked: size, reply: len(reply), began: began}
	if len(m.Question) > 0 {
		x.kind = m.Question[0].Qtype
	}
	s.metrics.answered(x)
	return reply
}

// pack is the answer on the wire; one that cannot be sent, as a server outside sent
// something odd, is a failure.
func (s *Server) pack(q *question, m *dns.Msg, out []byte, began time.Time) []byte {
	b, err := m.PackBuffer(out[:cap(out)])
	if err == nil && len(b) > dns.MaxMsgSize {
		err = dns.ErrBuf
	}
	if err != nil {
		m = s.failure(q)
		b, _ = m.PackBuffer(out[:cap(out)])
	}
	opt := q.msg.IsEdns0()
	s.metrics.answered(exchanged{
		zone: s.zoneLabel(s.zone.holds(q.name)), stream: q.stream, client: q.client, kind: q.msg.Question[0].Qtype,
		signed: opt != nil && opt.Do(), rcode: m.Rcode, asked: q.size, reply: len(b), began: began,
	})
	return b
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
	if q != nil {
		q.size = len(b)
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

func (s *Server) panicked(p any) { s.metrics.panicked(p) }

func (m *metrics) panicked(p any) {
	m.panics.Inc()
	klog.Background().Error(fmt.Errorf("%v", p), "Cluster DNS could not answer a question")
}

func (s *Server) failure(q *question) *dns.Msg {
	m := new(dns.Msg).SetRcode(q.msg, dns.RcodeServerFailure)
	m.RecursionAvailable = true
	return finish(q, m)
}

// zoneLabel is what metrics say of a name.
func (s *Server) zoneLabel(ours bool) string {
	if ours {
		return s.zone.name
	}
	return otherZones
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
	conns := newLimiter(maxStreams, maxStreamsPerClient)
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
		if !conns.acquire(client) {
			s.metrics.rejects.Inc()
			c.Close()
			continue
		}
		wg.Go(func() {
			defer conns.release(client)
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
		var out []byte
		switch {
		case q != nil:
			var done bool
			if m, done = s.immediate(q); !done {
				if s.clients.acquire(client) {
					m = s.eventual(ctx, q)
					s.clients.release(client)
				} else {
					s.metrics.rejects.Inc()
					m = s.failure(q)
				}
			}
			out = s.pack(q, m, nil, began)
		case m != nil:
			out = s.refuse(m, nil, client, len(b), true, began)
		}
		if out == nil {
			return
		}
		_ = c.SetWriteDeadline(time.Now().Add(streamWrite))
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(out))), out...)); err != nil {
			return
		}
	}
}

// limiter bounds what is under way, in all and for each client, so that one
// cannot take what all others need. Safe for concurrent use.
type limiter struct {
	max, each int

	mu     sync.Mutex // guards all below
	all    int
	active map[netip.Addr]int
}

func newLimiter(max, each int) *limiter {
	return &limiter{max: max, each: each, active: map[netip.Addr]int{}}
}

func (c *limiter) acquire(a netip.Addr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.all >= c.max || c.active[a] >= c.each {
		return false
	}
	c.all++
	c.active[a]++
	return true
}

func (c *limiter) release(a netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all--
	if c.active[a]--; c.active[a] <= 0 {
		delete(c.active, a)
	}
}
