package inproc

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
)

// maxBuffered is how far a handler may write ahead of its reader, in bytes.
// Past it Write blocks, as a full socket would: a slow watcher is the API
// server's business, and it drops those that do not read.
const maxBuffered = 256 << 10

// response is the http.ResponseWriter of one in-process request and the body
// of the http.Response that the client reads.
type response struct {
	header  http.Header
	started chan struct{}
	cancel  context.CancelFunc

	mu          sync.Mutex
	changed     *sync.Cond
	code        int
	sent        http.Header // header as it was when the status was written
	body        bytes.Buffer
	finished    bool  // the handler is done: no more bytes come
	closed      bool  // the client is done: no more bytes are wanted
	interrupted bool  // the client's context ended
	err         error // why the handler ended early, or the client's context
}

func newResponse(cancel context.CancelFunc) *response {
	w := &response{header: http.Header{}, started: make(chan struct{}), cancel: cancel}
	w.changed = sync.NewCond(&w.mu)
	return w
}

func (w *response) Header() http.Header { return w.header }

func (w *response) WriteHeader(code int) {
	if code < 200 {
		return // informational: no client of ours wants them
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.start(code)
}

// start needs mu.
func (w *response) start(code int) {
	if w.code != 0 {
		return
	}
	w.code = code
	w.sent = w.header.Clone()
	close(w.started)
}

func (w *response) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.start(http.StatusOK)
	for w.body.Len() >= maxBuffered && !w.closed && !w.interrupted {
		w.changed.Wait()
	}
	if w.closed || w.interrupted {
		return 0, io.ErrClosedPipe
	}
	w.body.Write(p)
	w.changed.Broadcast()
	return len(p), nil
}

// Flush sends the status; bytes are never held back.
func (w *response) Flush() { w.WriteHeader(http.StatusOK) }

// CloseNotify is here because the library takes a writer without it for one
// that cannot stream. Nothing reads it: the request's context says the same.
func (w *response) CloseNotify() <-chan bool { return nil }

// finish ends the body.
func (w *response) finish() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.start(http.StatusOK)
	w.finished = true
	w.changed.Broadcast()
}

// abort makes the client see err: from RoundTrip, or from the body once the
// status is out.
func (w *response) abort(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = err
}

// interrupt frees both ends when the client's context ends: the handler from a
// full buffer, the client from an empty one.
func (w *response) interrupt(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = err
	w.interrupted = true
	w.changed.Broadcast()
}

func (w *response) response(req *http.Request) (*http.Response, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.finished && w.err != nil && w.body.Len() == 0 {
		return nil, fmt.Errorf("%s %s: %w", req.Method, req.URL.Path, w.err)
	}
	length := int64(-1)
	if w.finished {
		length = int64(w.body.Len())
	}
	return &http.Response{
		Status:     fmt.Sprintf("%d %s", w.code, http.StatusText(w.code)),
		StatusCode: w.code,
		Proto:      "HTTP/2.0", ProtoMajor: 2,
		Header:        w.sent,
		Body:          reader{w},
		ContentLength: length,
		Request:       req,
	}, nil
}

// reader is the client's end of a response.
type reader struct{ w *response }

func (r reader) Read(p []byte) (int, error) {
	w := r.w
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.body.Len() == 0 && !w.finished && !w.closed && !w.interrupted {
		w.changed.Wait()
	}
	switch {
	case w.closed:
		return 0, http.ErrBodyReadAfterClose
	case w.body.Len() > 0:
		n, err := w.body.Read(p)
		w.changed.Broadcast()
		return n, err
	case w.err != nil:
		return 0, w.err
	}
	return 0, io.EOF
}

// Close tells the handler that the client is gone.
func (r reader) Close() error {
	r.w.mu.Lock()
	r.w.closed = true
	r.w.body = bytes.Buffer{}
	r.w.changed.Broadcast()
	r.w.mu.Unlock()
	r.w.cancel()
	return nil
}
