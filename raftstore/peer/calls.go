package peer

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Calls are the streams of calls that this member has opened to others, one
// each, opened when needed. Its methods may be called concurrently.
type Calls struct {
	ctx  context.Context // bounds the dials
	dial func(ctx context.Context, id string) (net.Conn, error)
	// dialTimeout bounds one attempt.
	dialTimeout time.Duration
	wg          sync.WaitGroup

	mu     sync.Mutex
	closed bool // no stream is opened any more
	byID   map[string]*callStream
	last   uint64 // call number
}

// NewCalls makes none yet. Each attempt of dial is bounded by dialTimeout, all of
// them by ctx.
func NewCalls(ctx context.Context, dialTimeout time.Duration, dial func(ctx context.Context, id string) (net.Conn, error)) *Calls {
	return &Calls{ctx: ctx, dial: dial, dialTimeout: dialTimeout, byID: make(map[string]*callStream)}
}

// ReplyFunc takes the reply to a call, or ErrStreamLost, or the error of the
// dial. sent: the frame may have reached the peer. It is called once, from a
// goroutine of Calls, and must not block.
type ReplyFunc func(f Frame, sent bool, err error)

// callStream is one stream.
//
//	dialing ──▶ open ──▶ (lost: removed from byID)
type callStream struct {
	id      string
	silent  atomic.Int32 // watchdog ticks since a frame came
	w       *Writer      // nil while dialing
	backlog []Frame      // to be sent when the dial succeeds
	pending map[uint64]ReplyFunc
}

// Call sends one frame to a member and returns its number. It does not block;
// reply is called once, unless Forget comes first.
func (c *Calls) Call(id string, kind byte, body []byte, reply ReplyFunc) uint64 {
	c.mu.Lock()
	c.last++
	n := c.last
	pr := c.byID[id]
	if pr == nil && c.closed {
		c.mu.Unlock()
		reply(Frame{}, false, ErrStreamLost)
		return n
	}
	if pr == nil {
		pr = &callStream{id: id, pending: make(map[uint64]ReplyFunc)}
		c.byID[id] = pr
		c.wg.Add(1)
		go func() {
			defer c.wg.Done()
			c.run(pr)
		}()
	}
	f := Frame{Kind: kind, Call: n, Body: body}
	pr.pending[n] = reply
	ok := true
	if pr.w == nil {
		pr.backlog = append(pr.backlog, f)
	} else if ok = pr.w.Send(f); !ok {
		delete(pr.pending, n)
	}
	c.mu.Unlock()
	if !ok {
		reply(Frame{}, false, ErrStreamLost)
	}
	return n
}

// Forget drops a call whose caller has stopped waiting for the reply.
func (c *Calls) Forget(id string, call uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if pr := c.byID[id]; pr != nil {
		delete(pr.pending, call)
	}
}

// Pending is how many calls wait for a reply.
func (c *Calls) Pending() (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, pr := range c.byID {
		n += len(pr.pending)
	}
	return n
}

// run dials, serves the replies until the stream ends, and then fails what is
// still pending.
func (c *Calls) run(pr *callStream) {
	ctx, cancel := context.WithTimeout(c.ctx, c.dialTimeout)
	conn, err := c.dial(ctx, pr.id)
	cancel()
	if err != nil {
		c.lost(pr, false, err)
		return
	}
	w := NewWriter(conn)
	var helpers sync.WaitGroup
	stop := make(chan struct{})
	helpers.Add(2)
	go func() {
		defer helpers.Done()
		w.Run()
	}()
	go func() {
		defer helpers.Done()
		c.watchdog(pr, w, stop)
	}()
	c.mu.Lock()
	pr.w = w
	for _, f := range pr.backlog {
		w.Send(f)
	}
	pr.backlog = nil
	c.mu.Unlock()

	_ = ReadFrames(conn, func(f Frame) error {
		pr.silent.Store(0)
		c.mu.Lock()
		reply := pr.pending[f.Call]
		delete(pr.pending, f.Call)
		c.mu.Unlock()
		if reply != nil {
			reply(f, true, nil)
		}
		return nil
	})
	close(stop)
	w.Close()
	helpers.Wait()
	c.lost(pr, true, ErrStreamLost)
}

// maxSilence is how many seconds a stream may stay silent while calls are
// pending. A host that vanished, or a network that swallows, closes nothing.
const maxSilence = 4

// watchdog gives the stream up when the peer no longer answers. A submitted
// command has no reply, so it asks for one of its own.
func (c *Calls) watchdog(pr *callStream, w *Writer, stop <-chan struct{}) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-stop:
			return
		}
		c.mu.Lock()
		waiting := len(pr.pending) > 0
		c.mu.Unlock()
		switch {
		case !waiting:
			pr.silent.Store(0)
		case pr.silent.Add(1) > maxSilence:
			w.Close()
			return
		default:
			w.Send(Frame{Kind: KindTerm}) // call 0: no caller waits for the reply
		}
	}
}

func (c *Calls) lost(pr *callStream, sent bool, err error) {
	c.mu.Lock()
	pending := pr.pending
	pr.pending = make(map[uint64]ReplyFunc)
	if c.byID[pr.id] == pr {
		delete(c.byID, pr.id)
	}
	c.mu.Unlock()
	for _, reply := range pending {
		reply(Frame{}, sent, err)
	}
}

// Close lets no further stream be opened. Those that are open end when Streams
// is closed.
func (c *Calls) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
}

// Wait returns when every stream has ended; Close and Streams.Close come first.
func (c *Calls) Wait() { c.wg.Wait() }
