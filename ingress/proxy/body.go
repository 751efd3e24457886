package proxy

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/clusterd/clusterd/ingress/route"
)

// errBodyIdle is returned to who reads the body of a client that sends nothing.
var errBodyIdle = errors.New("the client sends nothing of the request's body")

// clientBody is the body of a request, which ends with errBodyIdle if the client
// sends nothing for too long while somebody waits for it: it would hold its
// connection, and one to a backend, for as long as it likes.
type clientBody struct {
	under  io.ReadCloser
	limit  time.Duration
	client *http.ResponseController

	mu      sync.Mutex
	timer   *time.Timer
	pending int  // how many wait for the client
	idle    bool // it took too long
	closed  bool // the client is not read any more
}

func newClientBody(under io.ReadCloser, limit time.Duration, client *http.ResponseController) *clientBody {
	b := &clientBody{under: under, limit: limit, client: client}
	b.timer = time.AfterFunc(limit, b.late)
	b.timer.Stop()
	return b
}

// rests reports whether a client may be silent in the midst of its request: the
// streams of gRPC are, by both sides, and there are backends for them alone.
func rests(r *http.Request, to *route.Backend) bool {
	return r.ProtoMajor == 2 && to.Protocol != route.HTTP && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc")
}

// late ends what waits for the client. The server is not asked after Close, when the
// request may be over: its connection may carry the next one.
func (b *clientBody) late() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pending == 0 || b.closed {
		return
	}
	b.idle = true
	_ = b.client.SetReadDeadline(time.Unix(1, 0)) // a server that cannot ends the connection some time
}

func (b *clientBody) begin() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return false
	}
	b.pending++
	b.timer.Reset(b.limit)
	return true
}

func (b *clientBody) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pending--; b.pending == 0 {
		b.timer.Stop()
	}
}

// wasIdle reports whether the client took too long.
func (b *clientBody) wasIdle() bool {
	if b == nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.idle
}

// Read implements io.Reader.
func (b *clientBody) Read(p []byte) (int, error) {
	if !b.begin() {
		return 0, http.ErrBodyReadAfterClose
	}
	defer b.end()
	n, err := b.under.Read(p)
	if err != nil && err != io.EOF && b.wasIdle() {
		err = errBodyIdle
	}
	return n, err
}

// Close implements io.Closer. The server reads on for a while, so that the
// connection can be used again.
func (b *clientBody) Close() error {
	if !b.begin() {
		return nil
	}
	err := b.under.Close()
	b.end()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	return err
}
