package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"github.com/miekg/dns"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

// flows are sockets of the client: as many resolvers that ask.
const flows = 16

// result is what a load brought.
type result struct {
	sent   int
	took   []time.Duration // from when a question was due to its answer
	server []time.Duration // from when it was sent; none if both are the same
	length time.Duration
}

// flow is one socket, with what is under way.
type flow struct {
	conn *net.UDPConn
	pc   *ipv4.PacketConn
	due  [1 << 16]int64 // by the question's number: nanoseconds of the clock on the wall
	sent [1 << 16]int64
	next uint16
}

func dial(addr string, n int) ([]*flow, error) {
	var out []*flow
	for range n {
		c, err := net.Dial("udp4", addr)
		if err != nil {
			return nil, err
		}
		conn := c.(*net.UDPConn)
		_ = conn.SetReadBuffer(4 << 20)
		raw, err := conn.SyscallConn()
		if err != nil {
			return nil, err
		}
		var opt error
		if err := raw.Control(func(fd uintptr) { opt = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1) }); err != nil || opt != nil {
			return nil, errors.Join(err, opt)
		}
		out = append(out, &flow{conn: conn, pc: ipv4.NewPacketConn(conn)})
	}
	return out, nil
}

func closeAll(list []*flow) {
	for _, f := range list {
		f.conn.Close()
	}
}

// pack is the questions for names, by A, as most resolvers ask: with EDNS0.
func pack(names []string) ([][]byte, error) {
	var out [][]byte
	for _, n := range names {
		b, err := new(dns.Msg).SetQuestion(n, dns.TypeA).SetEdns0(1232, false).Pack()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", n, err)
		}
		out = append(out, b)
	}
	return out, nil
}

// drain takes the answers that are there, each with the time at which the kernel had
// it, in nanoseconds of the clock on the wall.
func (f *flow) drain(take func(b []byte, at int64)) error {
	raw, err := f.conn.SyscallConn()
	if err != nil {
		return err
	}
	var fault error
	err = raw.Control(func(fd uintptr) {
		b, oob := make([]byte, 1500), make([]byte, 64)
		for fault == nil {
			n, more, _, _, err := unix.Recvmsg(int(fd), b, oob, unix.MSG_DONTWAIT)
			if errors.Is(err, unix.EAGAIN) {
				return
			}
			var at int64
			if err == nil {
				at, err = arrived(oob[:more])
			}
			if fault = errors.Join(err, check(b[:max(0, n)])); fault == nil {
				take(b[:n], at)
			}
		}
	})
	return errors.Join(err, fault)
}

// arrived reads the time that comes with a datagram.
func arrived(oob []byte) (int64, error) {
	list, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return 0, err
	}
	for _, c := range list {
		if c.Header.Level == unix.SOL_SOCKET && c.Header.Type == unix.SCM_TIMESTAMPNS && len(c.Data) >= int(unsafe.Sizeof(unix.Timespec{})) {
			t := *(*unix.Timespec)(unsafe.Pointer(&c.Data[0]))
			return t.Nano(), nil
		}
	}
	return 0, errors.New("the kernel gave no time with a datagram")
}

// check says whether b is an answer with a code that is one.
func check(b []byte) error {
	if len(b) < 12 || b[2]&0x80 == 0 || b[3]&0xf != dns.RcodeSuccess && b[3]&0xf != dns.RcodeNameError || b[3]&0xf == dns.RcodeSuccess && b[7] == 0 {
		return fmt.Errorf("the answer is % x", b)
	}
	return nil
}

// offer sends rate questions a second for that long, in the order of chance that
// independent clients have (exponential gaps), whatever is answered, and takes the
// answers from the sockets now and then: when they came, the kernel has noted.
func offer(ctx context.Context, addr string, names []string, rate float64, length time.Duration) (r result, err error) {
	questions, err := pack(names)
	if err != nil {
		return r, err
	}
	list, err := dial(addr, flows)
	if err != nil {
		return r, err
	}
	defer closeAll(list)
	var mu sync.Mutex // guards due and sent of the flows
	ended := make(chan struct{})
	var taken error
	var wg sync.WaitGroup
	wg.Go(func() {
		for last := false; ; {
			select {
			case <-ended:
				last = true
			case <-time.After(2 * time.Millisecond):
			}
			for _, f := range list {
				err := f.drain(func(b []byte, at int64) {
					id := binary.BigEndian.Uint16(b)
					mu.Lock()
					due, sent := f.due[id], f.sent[id]
					mu.Unlock()
					r.took, r.server = append(r.took, time.Duration(at-due)), append(r.server, time.Duration(at-sent))
				})
				if err != nil {
					taken = err
					return
				}
			}
			if last {
				return
			}
		}
	})
	runtime.LockOSThread()
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	began := time.Now()
	buf := make([]byte, 512)
	for due := 0.0; ctx.Err() == nil; r.sent++ { // due is in nanoseconds since began
		if due += rand.ExpFloat64() * 1e9 / rate; due > float64(length) {
			break
		}
		if wait := time.Duration(due) - time.Since(began); wait > 0 {
			ts := unix.NsecToTimespec(int64(wait))
			_ = unix.Nanosleep(&ts, nil)
		}
		f := list[rand.IntN(len(list))]
		f.next++
		b := buf[:copy(buf, questions[rand.IntN(len(questions))])]
		binary.BigEndian.PutUint16(b, f.next)
		now := time.Now()
		mu.Lock()
		f.due[f.next], f.sent[f.next] = began.UnixNano()+int64(due), now.UnixNano()
		mu.Unlock()
		if _, err := f.conn.Write(b); err != nil {
			taken = errors.Join(taken, err)
			break
		}
	}
	r.length = time.Since(began)
	runtime.UnlockOSThread()
	select { // what is still under way
	case <-ctx.Done():
	case <-time.After(500 * time.Millisecond):
	}
	close(ended)
	wg.Wait()
	return r, errors.Join(taken, ctx.Err())
}

// saturate keeps window questions under way for that long.
func saturate(ctx context.Context, addr string, names []string, window int, length time.Duration) (r result, err error) {
	questions, err := pack(names)
	if err != nil {
		return r, err
	}
	n := min(flows, window)
	list, err := dial(addr, n)
	if err != nil {
		return r, err
	}
	defer closeAll(list)
	var mu sync.Mutex // guards r and fault
	var fault error
	var wg sync.WaitGroup
	began := time.Now()
	for _, f := range list {
		wg.Go(func() {
			var took []time.Duration
			sent := 0
			err := f.keep(ctx, questions, window/n, began.Add(length), func(d time.Duration) { took = append(took, d) }, &sent)
			mu.Lock()
			defer mu.Unlock()
			r.took, r.sent, fault = append(r.took, took...), r.sent+sent, errors.Join(fault, err)
		})
	}
	wg.Wait()
	r.length = time.Since(began)
	return r, errors.Join(fault, ctx.Err())
}

func (f *flow) keep(ctx context.Context, questions [][]byte, window int, until time.Time, took func(time.Duration), sent *int) error {
	in, out := make([]ipv4.Message, window), make([]ipv4.Message, window)
	bufs := make([][]byte, window)
	for i := range out {
		in[i].Buffers, bufs[i], out[i].Buffers = [][]byte{make([]byte, 1500)}, make([]byte, 512), make([][]byte, 1)
	}
	ask := func(n int) error {
		now := time.Now().UnixNano()
		for i := range n {
			f.next++
			b := bufs[i][:copy(bufs[i], questions[rand.IntN(len(questions))])]
			binary.BigEndian.PutUint16(b, f.next)
			f.due[f.next], out[i].Buffers[0] = now, b
		}
		for rest := out[:n]; len(rest) > 0; {
			done, err := f.pc.WriteBatch(rest, 0)
			if err != nil {
				return err
			}
			rest = rest[done:]
		}
		*sent += n
		return nil
	}
	if err := ask(window); err != nil {
		return err
	}
	for under := window; under > 0; {
		_ = f.conn.SetReadDeadline(time.Now().Add(2 * time.Second))
		n, err := f.pc.ReadBatch(in, 0)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil // lost: they count
		}
		if err != nil {
			return err
		}
		now := time.Now().UnixNano()
		for i := range in[:n] {
			b := in[i].Buffers[0][:in[i].N]
			if err := check(b); err != nil {
				return err
			}
			took(time.Duration(now - f.due[binary.BigEndian.Uint16(b)]))
		}
		if time.Now().After(until) || ctx.Err() != nil {
			under -= n
			continue
		}
		if err := ask(n); err != nil {
			return err
		}
	}
	return nil
}
