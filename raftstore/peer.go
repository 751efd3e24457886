package raftstore

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// peers are the streams of calls that this member has opened to others, one
// each, opened when needed.
type peers struct {
	ctx  context.Context // ends with the store
	dial func(ctx context.Context, id string) (net.Conn, error)
	// dialTimeout bounds one attempt.
	dialTimeout time.Duration
	wg          sync.WaitGroup

	mu     sync.Mutex
	closed bool // no stream is opened any more
	byID   map[string]*peer
	last   uint64 // call number
}

// replyFunc takes the reply to a call, or errStreamLost, or the error of the
// dial. sent: the frame may have reached the peer. It is called once, from a
// goroutine of peers, and must not block.
type replyFunc func(f frame, sent bool, err error)

// peer is one stream.
//
//	dialing ──▶ open ──▶ (lost: removed from byID)
type peer struct {
	id      string
	silent  atomic.Int32 // watchdog ticks since a frame came
	w       *frameWriter // nil while dialing
	backlog []frame      // to be sent when the dial succeeds
	pending map[uint64]replyFunc
}

// call sends one frame to a member and returns its number. It does not block.
func (p *peers) call(id string, kind byte, body []byte, reply replyFunc) uint64 {
	p.mu.Lock()
	p.last++
	n := p.last
	pr := p.byID[id]
	if pr == nil && p.closed {
		p.mu.Unlock()
		reply(frame{}, false, errStreamLost)
		return n
	}
	if pr == nil {
		pr = &peer{id: id, pending: make(map[uint64]replyFunc)}
		p.byID[id] = pr
		p.wg.Add(1)
		go func() {
			defer p.wg.Done()
			p.run(pr)
		}()
	}
	f := frame{kind: kind, call: n, body: body}
	pr.pending[n] = reply
	ok := true
	if pr.w == nil {
		pr.backlog = append(pr.backlog, f)
	} else if ok = pr.w.send(f); !ok {
		delete(pr.pending, n)
	}
	p.mu.Unlock()
	if !ok {
		reply(frame{}, false, errStreamLost)
	}
	return n
}

// forget drops a call whose reply nobody waits for any more.
func (p *peers) forget(id string, call uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pr := p.byID[id]; pr != nil {
		delete(pr.pending, call)
	}
}

// run dials, serves the replies until the stream ends, and then fails what is
// still pending.
func (p *peers) run(pr *peer) {
	ctx, cancel := context.WithTimeout(p.ctx, p.dialTimeout)
	conn, err := p.dial(ctx, pr.id)
	cancel()
	if err != nil {
		p.lost(pr, false, err)
		return
	}
	w := newFrameWriter(conn)
	var helpers sync.WaitGroup
	stop := make(chan struct{})
	helpers.Add(2)
	go func() {
		defer helpers.Done()
		w.run()
	}()
	go func() {
		defer helpers.Done()
		p.watchdog(pr, w, stop)
	}()
	p.mu.Lock()
	pr.w = w
	for _, f := range pr.backlog {
		w.send(f)
	}
	pr.backlog = nil
	p.mu.Unlock()

	_ = readFrames(conn, func(f frame) error {
		pr.silent.Store(0)
		p.mu.Lock()
		reply := pr.pending[f.call]
		delete(pr.pending, f.call)
		p.mu.Unlock()
		if reply != nil {
			reply(f, true, nil)
		}
		return nil
	})
	close(stop)
	w.close()
	helpers.Wait()
	p.lost(pr, true, errStreamLost)
}

// maxSilence is how many seconds a stream may stay silent while calls are
// pending. A host that vanished, or a network that swallows, closes nothing.
const maxSilence = 4

// watchdog gives the stream up when the peer no longer answers. A submitted
// command has no reply, so it asks for one of its own.
func (p *peers) watchdog(pr *peer, w *frameWriter, stop <-chan struct{}) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-stop:
			return
		}
		p.mu.Lock()
		waiting := len(pr.pending) > 0
		p.mu.Unlock()
		switch {
		case !waiting:
			pr.silent.Store(0)
		case pr.silent.Add(1) > maxSilence:
			w.close()
			return
		default:
			w.send(frame{kind: frameTerm}) // call 0: nobody waits for the reply
		}
	}
}

func (p *peers) lost(pr *peer, sent bool, err error) {
	p.mu.Lock()
	pending := pr.pending
	pr.pending = make(map[uint64]replyFunc)
	if p.byID[pr.id] == pr {
		delete(p.byID, pr.id)
	}
	p.mu.Unlock()
	for _, reply := range pending {
		reply(frame{}, sent, err)
	}
}

// close lets no further stream be opened.
func (p *peers) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
}

// wait returns when every stream has ended; the caller has closed them.
func (p *peers) wait() { p.wg.Wait() }
