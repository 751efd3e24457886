package servers

import (
	"cmp"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/transport"
)

// When a connection to the API is given up.
//
// A connection on which nothing comes for pingAfter is asked with a ping of HTTP/2
// (by net/http). One limit for the answer cannot be right. Within 2 s a machine that is
// gone should be noticed; but a server, or an agent, that waits for a processor for
// that long is alive, and to leave it costs it a handshake more, the requests on the way,
// and the watches that are begun again: a remedy that makes the fault. So two faults are
// told apart by what the kernel knows (transport.Link):
//
//   - The other kernel acknowledges nothing of what was sent for silentAfter. The way is
//     cut or the machine is gone, however busy any program is: kernels answer for
//     themselves. The connection is given up.
//   - The other kernel acknowledges, and its program does not answer: it is slow, or
//     stopped. That is given up after slowFirst, which is twice as long with each
//     connection that was given up for it, up to slowLast: where all servers are slow,
//     to go from one to the next helps none. It is slowFirst again when none was given
//     up for calmAfter. Several connections to one server that are given up for one fault
//     of it count as one.
//
// What counts is when data has come to this kernel, not when this program has got to
// read it; and where its own timer comes late, this program could not have asked in time
// either, so that time does not count.
const (
	silentAfter = 2 * time.Second
	slowFirst   = 3 * time.Second
	slowLast    = 24 * time.Second
	calmAfter   = 5 * time.Minute
	// kernelGrain is how far the kernel's times may be off: it counts in ticks of its clock.
	kernelGrain = 10 * time.Millisecond
)

// slowness is how long a server's program may take. List.mu guards it.
type slowness struct {
	limit time.Duration // 0: slowFirst
	last  time.Time     // when it became that, as a connection was given up for it
	of    string        // the server of that connection
}

// slowLimit is the limit of now.
func (l *List) slowLimit() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.slow.limit == 0 || l.now().Sub(l.slow.last) > calmAfter {
		l.slow.limit = slowFirst
	}
	return l.slow.limit
}

// gaveUp notes that a connection to a server was given up: another one is tried first.
func (l *List) gaveUp(s join.ServerAddr, slow bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed[key(s)] = l.now()
	if slow && (l.slow.of != key(s) || l.now().Sub(l.slow.last) > l.slow.limit) {
		l.slow = slowness{min(2*max(l.slow.limit, slowFirst), slowLast), l.now(), key(s)}
	}
}

// watch is a connection below TLS that is given up by the rules above.
func (l *List) watch(c net.Conn, s join.ServerAddr) *watched {
	return newWatched(c, cmp.Or(s.Name, s.Addr.String()), func() (transport.Link, error) { return transport.LinkOf(c) }, l.slowLimit,
		func(slow bool) { l.gaveUp(s, slow) })
}

type watched struct {
	net.Conn
	server    string
	link      func() (transport.Link, error)
	slowLimit func() time.Duration
	gaveUp    func(slow bool)

	mu    sync.Mutex
	asked time.Time // when the first was written since something was read, without what look was late; zero: nothing is waited for
	since time.Time // when the first was written, or a later moment with something unacknowledged: the kernel's times are compared with it
	due   time.Time // of timer
	timer *time.Timer
	lost  error // why it was given up
}

func newWatched(c net.Conn, server string, link func() (transport.Link, error), slowLimit func() time.Duration, gaveUp func(slow bool)) *watched {
	w := &watched{Conn: c, server: server, link: link, slowLimit: slowLimit, gaveUp: gaveUp}
	w.timer = time.AfterFunc(time.Hour, w.look)
	w.timer.Stop()
	return w
}

// Read implements net.Conn.
func (w *watched) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	w.mu.Lock()
	defer w.mu.Unlock()
	if n > 0 {
		w.asked = time.Time{}
		w.timer.Stop()
	}
	if err != nil && w.lost != nil {
		err = w.lost
	}
	return n, err
}

// Write implements net.Conn.
func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	if w.asked.IsZero() && w.lost == nil {
		w.begin(time.Now())
	}
	w.mu.Unlock()
	return w.Conn.Write(p)
}

// Close implements net.Conn.
func (w *watched) Close() error {
	w.mu.Lock()
	w.asked = time.Time{}
	w.timer.Stop()
	w.mu.Unlock()
	return w.Conn.Close()
}

// begin waits for something to be read. mu is held.
func (w *watched) begin(now time.Time) {
	w.asked, w.since = now, now
	w.wait(silentAfter)
}

// wait has look called. mu is held.
func (w *watched) wait(d time.Duration) {
	w.due = time.Now().Add(d)
	w.timer.Reset(d)
}

// look judges a connection on which nothing was read since something was written.
func (w *watched) look() {
	link, err := w.link()
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	if w.asked.IsZero() || now.Before(w.due) { // read or closed since; or begun again
		return
	}
	if late := now.Sub(w.due); late > silentAfter/4 {
		w.asked = w.asked.Add(late)
	}
	// The kernel was not late: its times are compared with when it was given the data.
	waited, since := now.Sub(w.asked), now.Sub(w.since)
	slow := pingAfter + w.slowLimit() // the ping is sent at the end of pingAfter, if something else came before
	switch {
	case err != nil: // closed, most likely
		return
	case link.Received < since+kernelGrain: // and is to be read
		w.begin(now)
	case waited < silentAfter:
		w.wait(silentAfter - waited)
	case link.Unacked && link.Acked >= since+kernelGrain && since >= silentAfter:
		w.giveUp(fmt.Errorf("http2: client connection lost: the machine of %s has not acknowledged anything for %s", w.server, since.Round(time.Millisecond)), false)
	case waited >= slow:
		w.giveUp(fmt.Errorf("http2: client connection lost: %s has not answered for %s, and its machine is there", w.server, waited.Round(time.Millisecond)), true)
	case link.Unacked && link.Acked >= since-kernelGrain && since >= silentAfter:
		// Acknowledged just before the first was written, or just after. If it was before, none
		// of what is unacknowledged now will be.
		w.since = now
		w.wait(min(silentAfter, slow-waited))
	default:
		w.wait(min(silentAfter/2, slow-waited))
	}
}

// giveUp closes the connection. mu is held. (The words are net/http's for a ping that
// was not answered, by which client-go knows that the request may be sent again.)
func (w *watched) giveUp(why error, slow bool) {
	w.lost, w.asked = why, time.Time{}
	go func() { // the List's lock is taken beside this one nowhere else
		w.gaveUp(slow)
		_ = w.Conn.Close()
	}()
}
