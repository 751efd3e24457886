// Package inproc lets parts of this process be clients of the API server in
// this process: requests go straight to its handler, with no TCP, no TLS and
// no credential that could leak. The identity of the client rides in the
// request's context, which nothing outside the process can set.
package inproc

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"sync"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/klog/v2"
)

// HandlerTransport leads to a handler for clients of the same process.
type HandlerTransport struct {
	handler http.Handler

	mu     sync.Mutex
	closed bool
	inside map[*response]context.CancelFunc
	// running counts the goroutines of requests.
	running sync.WaitGroup
}

// NewHandlerTransport returns the transport to handler.
func NewHandlerTransport(handler http.Handler) *HandlerTransport {
	return &HandlerTransport{handler: handler, inside: map[*response]context.CancelFunc{}}
}

// ErrClosed is returned by requests after Close.
var ErrClosed = errors.New("the server in this process has stopped")

// Close cancels all requests, waits until their handlers have returned, and
// refuses later ones.
func (d *HandlerTransport) Close() {
	d.mu.Lock()
	d.closed = true
	for _, cancel := range d.inside {
		cancel()
	}
	d.mu.Unlock()
	d.running.Wait()
}

// enter counts a request in; it reports false after Close.
func (d *HandlerTransport) enter(w *response, cancel context.CancelFunc) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return false
	}
	d.inside[w] = cancel
	d.running.Add(1)
	return true
}

func (d *HandlerTransport) leave(w *response) {
	d.mu.Lock()
	delete(d.inside, w)
	d.mu.Unlock()
	d.running.Done()
}

// As is the transport of clients that are u.
func (d *HandlerTransport) As(u user.Info) *Transport { return &Transport{transport: d, user: u} }

// Transport is an http.RoundTripper that hands requests to a handler of the
// same process as one user. It cannot upgrade connections (exec, attach,
// port-forward): those need a socket.
type Transport struct {
	transport *HandlerTransport
	user      user.Info
}

var _ http.RoundTripper = &Transport{}

// RoundTrip returns as soon as the handler has written its status code; the
// body then streams, so a watch works. Cancelling the request's context or
// closing the response's body ends the handler's context.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(callerContext{req.Context(), t.user})
	in := req.Clone(ctx)
	if in.Body == nil {
		in.Body = http.NoBody
	}
	in.Proto, in.ProtoMajor, in.ProtoMinor = "HTTP/2.0", 2, 0
	in.RemoteAddr = "127.0.0.1:0"
	in.RequestURI = req.URL.RequestURI()
	if in.Host == "" {
		in.Host = req.URL.Host
	}
	// What the handler sees of the URL is what a server parses from the
	// request line.
	in.URL.Scheme, in.URL.Host = "", ""

	w := newResponse(cancel)
	if !t.transport.enter(w, cancel) {
		cancel()
		in.Body.Close()
		return nil, fmt.Errorf("%s %s: %w", req.Method, req.URL.Path, ErrClosed)
	}
	stop := context.AfterFunc(req.Context(), func() { w.interrupt(context.Cause(req.Context())) })
	go func() {
		defer t.transport.leave(w)
		defer cancel()
		defer in.Body.Close()
		defer stop()
		defer w.finish()
		defer func() {
			// As net/http's server: a panic ends the request, not the process.
			if fault := recover(); fault != nil {
				w.abort(fmt.Errorf("handler panicked: %v", fault))
				if err, ok := fault.(error); !ok || !errors.Is(err, http.ErrAbortHandler) {
					klog.FromContext(ctx).Error(nil, "Panic in an in-process request", "path", req.URL.Path, "panic", fault, "stack", string(debug.Stack()))
				}
			}
		}()
		t.transport.handler.ServeHTTP(w, in)
	}()

	select {
	case <-w.started:
		return w.response(req)
	case <-req.Context().Done():
		cancel()
		return nil, context.Cause(req.Context())
	}
}

type userKey struct{}

// callerContext carries the caller's cancellation and deadline into the
// handler and of its values only the identity: a handler that is itself a
// client must not lend its own request's user, audit event or namespace to the
// next request.
type callerContext struct {
	context.Context
	user user.Info
}

func (c callerContext) Value(key any) any {
	if key == (userKey{}) {
		return c.user
	}
	return nil
}

// AfterFunc spares package context a goroutine per request: without it a
// foreign context type has to be watched.
func (c callerContext) AfterFunc(f func()) (stop func() bool) {
	return context.AfterFunc(c.Context, f)
}

// Inside reports whether a request with this context came through a Transport.
func Inside(ctx context.Context) bool {
	_, ok := ctx.Value(userKey{}).(user.Info)
	return ok
}

// Authenticator recognises requests that came through a Transport. It has no
// opinion about any other.
func Authenticator() authenticator.Request {
	return authenticator.RequestFunc(func(req *http.Request) (*authenticator.Response, bool, error) {
		u, ok := req.Context().Value(userKey{}).(user.Info)
		if !ok {
			return nil, false, nil
		}
		return &authenticator.Response{User: u}, true, nil
	})
}
