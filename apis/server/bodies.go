package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/apiserver/pkg/util/flowcontrol/fairqueuing"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/server/inproc"
)

// Bounds of the bodies of requests that have no seat yet.
const (
	// maxUnread is how many bodies of one client may be on their way.
	maxUnread = 100
	// maxHeld is how many bytes are kept for one client while its requests arrive and
	// wait; heldByUsers for all, and heldByCluster for nodes and administrators.
	maxHeld       = 64 << 20
	heldByUsers   = 128 << 20
	heldByCluster = 64 << 20
	// leastHeld is what a client is given when all of that is held, out of as much as
	// spare.
	leastHeld = 256 << 10
	spare     = 64 << 20
	// firstBuffer is how much is kept for a body of which nothing has come yet.
	firstBuffer = 64 << 10
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

	mu sync.Mutex
	// users and cluster are what is kept for whom; what comes from this process is in
	// neither, and not bounded.
	users, cluster pool
}

// pool is memory that clients share. One may hold no more than is free then, so that
// none has it all; and a little always, from what is spare, however much those who came
// before it hold.
type pool struct {
	size, least, spare int64
	held               int64
	clients            map[string]*unread
}

func newPool(size int64) pool {
	return pool{size: size, least: leastHeld, spare: spare, clients: map[string]*unread{}}
}

// has reports whether there are n bytes more for one that holds that much.
func (p *pool) has(held, n int64) bool {
	held += n
	return held <= maxHeld && held <= p.size-p.held-n || held <= p.least && p.held+n <= p.size+p.spare
}

// unread is what one client's requests bring.
type unread struct {
	bodies int
	held   int64
}

func newBodies(next flowcontrol.Interface, limit int64, timeout time.Duration) *bodies {
	return &bodies{
		Interface: next, limit: limit, within: timeout / 2, wait: timeout / 4,
		users: newPool(heldByUsers), cluster: newPool(heldByCluster),
	}
}

// account is what one request's body is counted to.
type account struct {
	bodies *bodies
	of     *pool // nil: it is not bounded
	client string
	held   int64
}

// accountOf is who a body is counted to: the service accounts of a namespace are one
// client, as whoever may make one may make many. Those of kube-system are the cluster's
// own add-ons, made by administrators: each is a client, beside the nodes.
func (b *bodies) accountOf(ctx context.Context, who user.Info) *account {
	a := &account{bodies: b, of: &b.users, client: fmt.Sprintf("user %q", who.GetName())}
	groups := who.GetGroups()
	switch namespace, _, err := serviceaccount.SplitUsername(who.GetName()); {
	case slices.Contains(groups, user.NodesGroup):
		a.of = &b.cluster
	case inproc.Inside(ctx):
		a.of = nil
	case slices.Contains(groups, user.SystemPrivilegedGroup):
		a.of = &b.cluster
	case err == nil && namespace == metav1.NamespaceSystem:
		a.of = &b.cluster
	case err == nil:
		a.client = fmt.Sprintf("service accounts of namespace %q", namespace)
	}
	return a
}

// incoming is a request's body: first what was read of it, then the rest.
type incoming struct {
	body io.ReadCloser
	// ctx ends when the client goes.
	ctx context.Context
	// deadline ends reads of body at a time; zero: never.
	deadline    func(time.Time) error
	contentType string
	// length is how long the client says that it is; less than none: it does not say.
	length int64
	// ended: it was read to its end.
	ended bool
	// data is the whole body, if that was read before the request got its seat.
	data []byte
	// rest is what has not been given to the handler.
	rest io.Reader
	// refusal is what the request is answered with; nil: it is worked on.
	refusal *apierrors.StatusError
}

// Read implements io.Reader.
func (in *incoming) Read(p []byte) (int, error) {
	n, err := in.rest.Read(p)
	if in.ended && errors.Is(err, io.EOF) {
		in.data, in.rest = nil, http.NoBody // the handler has it now
	}
	return n, err
}

// Close implements io.Closer.
func (in *incoming) Close() error { return in.body.Close() }

type incomingKey struct{}

// withBodies lets flow control find the body of a request. It has to be the
// outermost handler: it sets deadlines of the connection.
func withBodies(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Body != nil && req.Body != http.NoBody { // of a client in this process the length may not be known
			in := &incoming{
				body: req.Body, rest: req.Body, ctx: req.Context(), contentType: req.Header.Get("Content-Type"), length: req.ContentLength,
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
		if !in.ended {
			// What still comes is not waited for, as net/http would. Of one that has
			// ended net/http reads on, and would take the client for gone.
			_ = in.deadline(time.Now().Add(-time.Second))
		}
		responsewriters.ErrorNegotiated(in.refusal, apis.Codecs, schema.GroupVersion{Version: "v1"}, w, req)
	})
}

// Handle implements flowcontrol.Interface.
func (b *bodies) Handle(ctx context.Context, digest flowcontrol.RequestDigest,
	note func(*flowcontrolv1.FlowSchema, *flowcontrolv1.PriorityLevelConfiguration, string),
	estimate func() flowcontrolrequest.WorkEstimate, queued fairqueuing.QueueNoteFn, execute func(),
) {
	in, _ := ctx.Value(incomingKey{}).(*incoming)
	if in == nil || !digest.RequestInfo.IsResourceRequest {
		// What is no resource has no handler that reads a body; some of it anybody may ask.
		b.Interface.Handle(ctx, digest, note, estimate, queued, execute)
		return
	}
	begin := time.Now()
	of := b.accountOf(ctx, digest.User)
	b.take(in, of)
	release := sync.OnceFunc(of.release)
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

// take reads the body of a request, or says in it why not. What is kept of it is
// counted to an account, which is to be released.
func (b *bodies) take(in *incoming, of *account) {
	if !of.begin() {
		in.refusal = apierrors.NewTooManyRequests(fmt.Sprintf("%d requests of %s are being received already: send fewer at once, and each at once", maxUnread, of.client), 1)
		return
	}
	defer of.end()
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
			more := b.next(int64(cap(data)), in.length) - int64(cap(data))
			if !of.hold(more) {
				in.refusal = apierrors.NewTooManyRequests(fmt.Sprintf("requests of %s that arrive or wait hold as much memory as there is for them now: send fewer at once", of.client), 1)
				return
			}
			data = append(make([]byte, 0, int64(cap(data))+more), data...)
		}
		n, err := in.body.Read(data[len(data):cap(data)])
		data = data[:len(data)+n]
		switch {
		case errors.Is(err, io.EOF):
			in.data, in.rest, in.ended = data, bytes.NewReader(data), true
			return
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded) || !time.Now().Before(until):
			in.refusal = &apierrors.StatusError{ErrStatus: metav1.Status{
				Status: metav1.StatusFailure, Code: http.StatusRequestTimeout, Reason: metav1.StatusReasonTimeout,
				Message: fmt.Sprintf("the body of the request did not arrive within %v: %d bytes of it did", b.within, len(data)),
			}}
			return
		default:
			in.refusal = apierrors.NewBadRequest(fmt.Sprintf("the body of the request could not be read: %v", err))
			return
		}
	}
	// It is longer than the library takes, which says so. Others' APIs have bounds of their own.
	in.rest = io.MultiReader(bytes.NewReader(data), in.body)
}

// next is how large a buffer is after one of that size, for a body of that length, with
// room for its end to be seen.
func (b *bodies) next(size, length int64) int64 {
	most := b.limit + 1
	switch {
	case size == 0 && length >= 0:
		return min(length+1, firstBuffer, most)
	case size == 0:
		return min(firstBuffer/16, most)
	case length >= size:
		return min(length+1, most)
	}
	return min(2*size, most)
}

func (a *account) begin() bool {
	if a.of == nil {
		return true
	}
	a.bodies.mu.Lock()
	defer a.bodies.mu.Unlock()
	u := a.of.clients[a.client]
	if u == nil {
		u = &unread{}
		a.of.clients[a.client] = u
	}
	if u.bodies >= maxUnread {
		return false
	}
	u.bodies++
	return true
}

func (a *account) end() {
	if a.of == nil {
		return
	}
	a.bodies.mu.Lock()
	defer a.bodies.mu.Unlock()
	a.of.clients[a.client].bodies--
	a.forget()
}

// hold is called between begin and end.
func (a *account) hold(n int64) bool {
	if a.of == nil {
		return true
	}
	a.bodies.mu.Lock()
	defer a.bodies.mu.Unlock()
	u := a.of.clients[a.client]
	if !a.of.has(u.held, n) {
		return false
	}
	u.held += n
	a.of.held += n
	a.held += n
	return true
}

func (a *account) release() {
	if a.of == nil {
		return
	}
	a.bodies.mu.Lock()
	defer a.bodies.mu.Unlock()
	if u := a.of.clients[a.client]; u != nil {
		u.held -= a.held
		a.of.held -= a.held
		a.held = 0
		a.forget()
	}
}

// forget needs mu.
func (a *account) forget() {
	if u := a.of.clients[a.client]; u.bodies == 0 && u.held == 0 {
		delete(a.of.clients, a.client)
	}
}
