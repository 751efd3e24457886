package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/apiserver/pkg/util/flowcontrol/fairqueuing"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"

	"github.com/clusterd/clusterd/apis"
)

// Bounds of the bodies of requests that have no seat yet.
const (
	// maxUnread is how many bodies of one user may be on their way.
	maxUnread = 100
	// maxHeld is how many bytes of bodies that arrived are kept for one user,
	// maxHeldByAll for all, while their requests wait.
	maxHeld      = 64 << 20
	maxHeldByAll = 256 << 20
)

// bodies reads what requests bring before they get a seat, so that clients that
// send slowly keep nobody else's request from one. It is the server's
// flow control, with the reading before it: there the user is known, and no seat
// is taken yet. What it refuses is answered by the innermost handler, so that
// audit and authorization see that request like any other. By HTTP/1.1 a body that
// does not arrive ends the connection, without an answer: net/http takes a read that
// failed for the end of the client.
type bodies struct {
	flowcontrol.Interface
	// limit is how long a body may be; the library refuses what is longer.
	limit int64
	// within is how long a body may take to arrive; wait how long a request may
	// wait for a seat then.
	within, wait time.Duration

	mu    sync.Mutex
	users map[string]*unread
	held  int64 // by all
}

// unread is what one user's requests bring.
type unread struct {
	bodies int
	held   int64
}

func newBodies(next flowcontrol.Interface, limit int64, timeout time.Duration) *bodies {
	return &bodies{Interface: next, limit: limit, within: timeout / 2, wait: timeout / 4, users: map[string]*unread{}}
}

// incoming is a request's body: first what was read of it, then the rest.
type incoming struct {
	body io.ReadCloser
	// ctx ends when the client goes.
	ctx context.Context
	// deadline ends reads of body at a time; zero: never.
	deadline    func(time.Time) error
	contentType string
	// data is the whole body, if that was read before the request got its seat.
	data []byte
	// rest is what has not been given to the handler.
	rest io.Reader
	// refusal is what the request is answered with; nil: it is worked on.
	refusal *apierrors.StatusError
}

// Read implements io.Reader.
func (in *incoming) Read(p []byte) (int, error) { return in.rest.Read(p) }

// Close implements io.Closer.
func (in *incoming) Close() error { return in.body.Close() }

type incomingKey struct{}

// withBodies lets flow control find the body of a request. It has to be the
// outermost handler: it sets deadlines of the connection.
func withBodies(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Body != nil && req.Body != http.NoBody { // of a client in this process the length may not be known
			in := &incoming{
				body: req.Body, rest: req.Body, ctx: req.Context(), contentType: req.Header.Get("Content-Type"),
				deadline: http.NewResponseController(w).SetReadDeadline,
			}
			req = req.WithContext(context.WithValue(req.Context(), incomingKey{}, in))
			req.Body = in
		}
		next.ServeHTTP(w, req)
	})
}

// answeringRefused answers requests whose body was refused. It has to be the
// innermost handler.
func answeringRefused(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		in, _ := req.Context().Value(incomingKey{}).(*incoming)
		if in == nil || in.refusal == nil {
			next.ServeHTTP(w, req)
			return
		}
		// What still comes is not waited for, as net/http would.
		_ = in.deadline(time.Now().Add(-time.Second))
		responsewriters.ErrorNegotiated(in.refusal, apis.Codecs, schema.GroupVersion{Version: "v1"}, w, req)
	})
}

// Handle implements flowcontrol.Interface.
func (b *bodies) Handle(ctx context.Context, digest flowcontrol.RequestDigest,
	note func(*flowcontrolv1.FlowSchema, *flowcontrolv1.PriorityLevelConfiguration, string),
	estimate func() flowcontrolrequest.WorkEstimate, queued fairqueuing.QueueNoteFn, execute func(),
) {
	in, _ := ctx.Value(incomingKey{}).(*incoming)
	if in == nil {
		b.Interface.Handle(ctx, digest, note, estimate, queued, execute)
		return
	}
	begin := time.Now()
	user := digest.User.GetName()
	held := b.take(in, user)
	var once sync.Once
	release := func() { once.Do(func() { b.release(user, held) }) }
	defer release()
	if in.refusal != nil {
		execute() // which answers, and needs no seat for that
		return
	}
	if time.Since(begin) > b.wait/4 {
		// ctx bounds how long a request waits for a seat; it has not begun to.
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), b.wait)
		defer cancel()
		defer context.AfterFunc(in.ctx, cancel)()
	}
	b.Interface.Handle(ctx, digest, note, estimate, queued, func() {
		release()
		execute()
	})
}

// take reads the body of a request of user, or says in it why not. It returns
// how many bytes are held from then on.
func (b *bodies) take(in *incoming, user string) (held int64) {
	if !b.begin(user) {
		in.refusal = apierrors.NewTooManyRequests(fmt.Sprintf("%d requests of %q are being received already: send fewer at once, and each at once", maxUnread, user), 1)
		return 0
	}
	defer b.end(user)
	until := time.Now().Add(b.within)
	if in.deadline(until) == nil {
		defer func() {
			if in.refusal == nil {
				_ = in.deadline(time.Time{}) // it worked a moment ago
			}
		}()
	} else {
		// A client in this process: what ends its reads is that the body is closed.
		defer time.AfterFunc(b.within, func() { _ = in.body.Close() }).Stop()
	}
	var data []byte
	for int64(len(data)) <= b.limit {
		if len(data) == cap(data) {
			data = append(data, make([]byte, max(512, min(len(data), 1<<20)))...)[:len(data)]
		}
		n, err := in.body.Read(data[len(data):cap(data)])
		data = data[:len(data)+n]
		if !b.hold(user, int64(n)) {
			in.refusal = apierrors.NewTooManyRequests(fmt.Sprintf("requests of %q, or of all, that wait to be worked on hold as much as they may: send fewer at once", user), 1)
			return held
		}
		held += int64(n)
		switch {
		case errors.Is(err, io.EOF):
			in.data, in.rest = data, bytes.NewReader(data)
			return held
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded) || !time.Now().Before(until):
			in.refusal = &apierrors.StatusError{ErrStatus: metav1.Status{
				Status: metav1.StatusFailure, Code: http.StatusRequestTimeout, Reason: metav1.StatusReasonTimeout,
				Message: fmt.Sprintf("the body of the request did not arrive within %v: %d bytes of it did", b.within, len(data)),
			}}
			return held
		default:
			in.refusal = apierrors.NewBadRequest(fmt.Sprintf("the body of the request could not be read: %v", err))
			return held
		}
	}
	// It is longer than the library takes, which says so. Others' APIs have bounds of their own.
	in.rest = io.MultiReader(bytes.NewReader(data), in.body)
	return held
}

func (b *bodies) begin(user string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	u := b.users[user]
	if u == nil {
		u = &unread{}
		b.users[user] = u
	}
	if u.bodies >= maxUnread {
		return false
	}
	u.bodies++
	return true
}

func (b *bodies) end(user string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.users[user].bodies--
	b.forget(user)
}

func (b *bodies) hold(user string, n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	u := b.users[user]
	if u.held+n > maxHeld || b.held+n > maxHeldByAll {
		return false
	}
	u.held += n
	b.held += n
	return true
}

func (b *bodies) release(user string, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if u := b.users[user]; u != nil {
		u.held -= n
		b.held -= n
		b.forget(user)
	}
}

// forget needs mu.
func (b *bodies) forget(user string) {
	if u := b.users[user]; u.bodies == 0 && u.held == 0 {
		delete(b.users, user)
	}
}
