package pathprobe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/clusterd/clusterd/slack"
)

// A stream is streamLen random bytes to the peer and the same ones back. Single
// packets may pass where streams do not: network cards that cut segments or
// compute checksums wrongly show with TCP alone.
const (
	streamLen     = 64 << 10
	streamTime    = 5 * time.Second
	streamsAtOnce = 16 // answered
)

// stream tries the peer that is due the longest, one at a time.
func (p *Prober) stream(ctx context.Context) {
	for {
		p.mu.Lock()
		o := p.streamDue(time.Now())
		p.mu.Unlock()
		if o != nil {
			err := p.streamTo(ctx, o.Addr)
			if ctx.Err() != nil {
				return
			}
			p.mu.Lock()
			o.stream, o.streamed = err, time.Now()
			p.mu.Unlock()
		}
		select {
		case <-ctx.Done():
			return
		case <-slack.After(streamPause):
		}
	}
}

// streamDue is the peer to try now, or nil; p.mu is held.
func (p *Prober) streamDue(now time.Time) *peer {
	var next *peer
	var nextDue time.Time
	for _, o := range p.peers {
		due := o.streamed.Add(streamPeriod)
		if o.stream != nil {
			due = o.streamed.Add(streamRetry)
		}
		if !due.After(now) && (next == nil || due.Before(nextDue)) {
			next, nextDue = o, due
		}
	}
	return next
}

// streamTo sends bytes to a peer and compares what comes back.
func (p *Prober) streamTo(ctx context.Context, addr netip.Addr) error {
	ctx, cancel := context.WithTimeout(ctx, streamTime)
	defer cancel()
	var d net.Dialer
	for _, own := range p.ownAddrs() {
		if own.Is4() == addr.Is4() {
			d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(own, 0))
		}
	}
	conn, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(addr, uint16(p.cfg.Port)).String())
	if err != nil {
		return plain(err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	sent := make([]byte, streamLen)
	for i := range sent {
		sent[i] = byte(rand.Uint32())
	}
	wrote := make(chan error, 1)
	go func() { // ends with conn
		_, err := conn.Write(sent)
		wrote <- err
	}()
	got := make([]byte, streamLen)
	n, err := io.ReadFull(conn, got)
	conn.Close()
	if werr := <-wrote; err == nil {
		err = werr
	}
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%d of %d bytes came back in %s", n, streamLen, streamTime)
	case err != nil:
		return fmt.Errorf("%d of %d bytes came back: %w", n, streamLen, plain(err))
	case !bytes.Equal(sent, got):
		return errors.New("other bytes came back than were sent")
	}
	return nil
}

// plain takes the addresses off a network's error: who reads it knows them.
func plain(err error) error {
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		if op.Timeout() || errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("no connection in %s", streamTime)
		}
		return op.Err
	}
	return err
}

func (p *Prober) ownAddrs() []netip.Addr {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.own
}

// accept sends peers their bytes back, until l is closed.
func (p *Prober) accept(ctx context.Context, l *net.TCPListener) {
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, streamsAtOnce)
	for {
		conn, err := l.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no descriptors, for instance
			select {
			case <-ctx.Done():
				return
			case <-time.After(bindRetry):
			}
			continue
		}
		from, _ := netip.ParseAddrPort(conn.RemoteAddr().String())
		select {
		case slots <- struct{}{}:
		default:
			conn.Close()
			continue
		}
		if !p.knows(from.Addr().Unmap()) {
			conn.Close()
			<-slots
			continue
		}
		wg.Go(func() {
			defer func() { <-slots }()
			defer conn.Close()
			defer context.AfterFunc(ctx, func() { conn.Close() })()
			_ = conn.SetDeadline(time.Now().Add(streamTime)) // a connection that is open has one
			_, _ = io.CopyN(conn, conn, streamLen)           // the other end says what is missing
		})
	}
}

func (p *Prober) knows(addr netip.Addr) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.peers[addr] != nil
}
