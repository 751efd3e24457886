package proxy

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// keptBody is how much of a request's body is kept to send it again: a longer
	// one is sent once.
	keptBody = 64 << 10
	// longestWait bounds what a route's backoff grows to.
	longestWait = 10 * time.Second
)

// retry sends the request again as the route's rule says: after a connection that
// failed, a time that was over, and an answer with one of its codes.
func (b *balancer) retry(req *http.Request, c *call) (*http.Response, error) {
	rule := c.rule.Do.Retry
	kept := &keeper{under: req.Body}
	for n := 0; ; n++ {
		resp, err := b.once(req, c, kept.next(req.Body))
		again := n < rule.Attempts && !kept.over.Load() && req.Context().Err() == nil
		switch {
		case err != nil && (!again || errors.Is(err, errNone)):
			return nil, err
		case err == nil && (!again || !slices.Contains(rule.Codes, resp.StatusCode)):
			return resp, nil
		case err == nil: // read to its end, if it is short, the connection is used again
			_, _ = io.CopyN(io.Discard, resp.Body, 4<<10)
			_ = resp.Body.Close()
		}
		if err := wait(req.Context(), rule.Backoff, n); err != nil {
			return nil, err
		}
		b.metrics.retries.Inc()
	}
}

// wait is for at least the backoff, doubled for each attempt before, and up to half
// of it more by chance.
func wait(ctx context.Context, backoff time.Duration, attempt int) error {
	if backoff <= 0 {
		return ctx.Err()
	}
	for range attempt {
		backoff = max(backoff, min(2*backoff, longestWait))
	}
	t := time.NewTimer(backoff + rand.N(backoff/2+1))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// keeper keeps what was read of a body. A transport may still read for an attempt
// that has ended; what it gets then is kept for the next one.
type keeper struct {
	under   io.ReadCloser
	over    atomic.Bool // more was read than is kept
	current atomic.Pointer[keptReader]

	mu   sync.Mutex // held while under is read, which may take as long as the client likes
	held []byte
	err  error // that under ended with
}

// next is the body of the next attempt; the one before gets nothing more.
func (k *keeper) next(body io.ReadCloser) io.ReadCloser {
	if body == nil || body == http.NoBody {
		return body
	}
	r := &keptReader{k: k}
	k.current.Store(r)
	return r
}

type keptReader struct {
	k  *keeper
	at int // in k.held
}

var errAttemptOver = errors.New("the attempt is over")

// Read implements io.Reader.
func (r *keptReader) Read(p []byte) (int, error) {
	k := r.k
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current.Load() != r {
		return 0, errAttemptOver
	}
	if r.at < len(k.held) {
		n := copy(p, k.held[r.at:])
		r.at += n
		return n, nil
	}
	if k.err != nil {
		return 0, k.err
	}
	n, err := k.under.Read(p)
	k.err = err
	if k.over.Load() || len(k.held)+n > keptBody {
		k.over.Store(true)
		return n, err
	}
	k.held = append(k.held, p[:n]...)
	r.at += n
	return n, err
}

// Close implements io.Closer. ReverseProxy closes what is under it.
func (r *keptReader) Close() error { return nil }
