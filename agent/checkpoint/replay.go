package checkpoint

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
)

var requests = &request.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")}

// errNoAPI is what a request for a token gets while the node is isolated.
var errNoAPI = errors.New("the API does not answer: the node is isolated")

// replayedVersion is the resourceVersion of lists from records: older than any of the API.
const replayedVersion = "1"

// Wrap puts the gate before the node's own way to the API.
func (g *Gate) Wrap(next http.RoundTripper) http.RoundTripper { return &gated{g, next, true} }

// WrapOther puts it before a way by another identity, whose rights are by roles: a server
// that has not read them yet refuses it, which says nothing of the node.
func (g *Gate) WrapOther(next http.RoundTripper) http.RoundTripper { return &gated{g, next, false} }

// WrapHeartbeat is for the way by which the node's Lease is renewed: the gate holds nothing of
// it back, and learns from it that the API answers.
func (g *Gate) WrapHeartbeat(next http.RoundTripper) http.RoundTripper { return &heartbeat{g, next} }

type heartbeat struct {
	gate *Gate
	next http.RoundTripper
}

// WrappedRoundTripper is for client-go, which looks for the transport below.
func (t *heartbeat) WrappedRoundTripper() http.RoundTripper { return t.next }

// RoundTrip implements http.RoundTripper.
func (t *heartbeat) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.next.RoundTrip(req)
	// Only a write takes a quorum whatever its options; one that failed says nothing.
	if err == nil && req.Method != http.MethodGet && resp.StatusCode < http.StatusBadRequest {
		t.gate.note(resp, nil)
	}
	return resp, err
}

type gated struct {
	gate *Gate
	next http.RoundTripper
	own  bool // by the node's own identity
}

// WrappedRoundTripper is for client-go, which looks for the transport below.
func (t *gated) WrappedRoundTripper() http.RoundTripper { return t.next }

// RoundTrip implements http.RoundTripper.
func (t *gated) RoundTrip(req *http.Request) (*http.Response, error) {
	if closed(t.gate.live) {
		return t.next.RoundTrip(req)
	}
	info, err := requests.NewRequestInfo(req)
	if err != nil || !info.IsResourceRequest {
		return t.next.RoundTrip(req)
	}
	switch info.Verb {
	case "list", "watch":
		return t.hold(req, info)
	case "get":
		if resp := t.fromRecords(req, info); resp != nil {
			return resp, nil
		}
	case "create":
		// A pod's start does not wait for a server that is not there: it has its last token.
		if info.Subresource == "token" && closed(t.gate.isolated) {
			return nil, errNoAPI
		}
	}
	resp, err := t.next.RoundTrip(req)
	if t.own && info.Verb == "get" && info.APIGroup == "" && info.Resource == "nodes" && info.Subresource == "" && info.Name == t.gate.node && req.URL.Query().Get("resourceVersion") == "" {
		t.gate.note(resp, err)
	}
	return resp, err
}

// hold tries until the API answers, or the records can, or the request is given up.
func (t *gated) hold(req *http.Request, info *request.RequestInfo) (*http.Response, error) {
	for {
		if resp := t.fromRecords(req, info); resp != nil {
			return resp, nil
		}
		resp, err := t.try(consistent(req, info), info)
		if err == nil && !failing(resp.StatusCode) {
			return resp, nil
		}
		if err == nil {
			_ = resp.Body.Close()
		}
		isolated := t.gate.isolated
		if closed(isolated) {
			isolated = nil
		}
		again := time.NewTimer(retryAfter)
		select {
		case <-req.Context().Done():
			again.Stop()
			return nil, req.Context().Err()
		case <-t.gate.live:
			again.Stop()
			return t.next.RoundTrip(req)
		case <-isolated:
			again.Stop()
		case <-again.C:
		}
	}
}

// consistent asks for the newest state where any would do: a server without quorum answers
// that from its own copy.
func consistent(req *http.Request, info *request.RequestInfo) *http.Request {
	q := req.URL.Query()
	if q.Get("resourceVersion") != "0" {
		return req
	}
	q.Del("resourceVersion")
	if info.Verb == "list" {
		q.Del("resourceVersionMatch") // it goes with a version
	}
	req = req.Clone(req.Context())
	req.URL.RawQuery = q.Encode()
	return req
}

// try is one request to the API, given up when its answer has not begun in time, or
// when the node is isolated meanwhile. So is a watch that has begun: it may never say anything.
func (t *gated) try(req *http.Request, info *request.RequestInfo) (*http.Response, error) {
	ctx, cancel := context.WithCancel(req.Context())
	begun := make(chan struct{})
	var watching sync.WaitGroup
	isolated := t.gate.isolated
	if closed(isolated) {
		isolated = nil
	}
	watching.Go(func() {
		timer := time.NewTimer(headersWithin)
		defer timer.Stop()
		select {
		case <-begun:
		case <-isolated:
			cancel()
		case <-timer.C:
			cancel()
		}
	})
	resp, err := t.next.RoundTrip(req.WithContext(ctx))
	close(begun)
	watching.Wait()
	if err == nil && ctx.Err() != nil { // its body cannot be read any more
		_ = resp.Body.Close()
		err = ctx.Err()
	}
	if err != nil {
		cancel()
		return nil, err
	}
	if info.Verb == "watch" && isolated != nil {
		go func() {
			select {
			case <-isolated:
				cancel()
			case <-t.gate.live:
			case <-ctx.Done():
			}
		}()
	}
	resp.Body = &cancelled{resp.Body, cancel}
	return resp, nil
}

// cancelled gives up a request's context with its body.
type cancelled struct {
	io.ReadCloser
	cancel func()
}

func (c *cancelled) Close() error {
	defer c.cancel()
	return c.ReadCloser.Close()
}

// fromRecords answers a read from the records; nil: they do not know, or are not asked.
func (t *gated) fromRecords(req *http.Request, info *request.RequestInfo) *http.Response {
	c := t.gate.content()
	if c == nil {
		return nil
	}
	l, found, ok := c.find(info, req)
	if !ok {
		return nil
	}
	gv := info.APIVersion
	if info.APIGroup != "" {
		gv = info.APIGroup + "/" + gv
	}
	code := http.StatusOK
	answer := func(body io.ReadCloser) *http.Response {
		return &http.Response{
			Status: fmt.Sprintf("%d %s", code, http.StatusText(code)), StatusCode: code, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
			Header: http.Header{"Content-Type": {"application/json"}}, Body: body, ContentLength: -1, Request: req,
		}
	}
	meta := map[string]any{"resourceVersion": replayedVersion}
	switch info.Verb {
	case "get":
		if len(found) > 0 {
			return answer(io.NopCloser(bytes.NewReader(found[0].raw)))
		}
		status := apierrors.NewNotFound(schema.GroupResource{Group: info.APIGroup, Resource: info.Resource}, info.Name).Status()
		status.APIVersion, status.Kind, code = "v1", "Status", http.StatusNotFound
		b, err := json.Marshal(status)
		if err != nil {
			return nil
		}
		return answer(io.NopCloser(bytes.NewReader(b)))
	case "list":
		items := make([]json.RawMessage, 0, len(found))
		for _, i := range found {
			items = append(items, i.raw)
		}
		b, err := json.Marshal(map[string]any{"apiVersion": gv, "kind": l.kind + "List", "metadata": meta, "items": items})
		if err != nil {
			return nil
		}
		return answer(io.NopCloser(bytes.NewReader(b)))
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	event := func(kind string, object any) error {
		return enc.Encode(map[string]any{"type": kind, "object": object})
	}
	var errs []error
	if strings.EqualFold(req.URL.Query().Get("sendInitialEvents"), "true") {
		for _, i := range found {
			errs = append(errs, event("ADDED", i.raw))
		}
		meta["annotations"] = map[string]string{"k8s.io/initial-events-end": "true"}
		errs = append(errs, event("BOOKMARK", map[string]any{"apiVersion": gv, "kind": l.kind, "metadata": meta}))
	}
	n := b.Len()
	// The watcher lists again when it reads this.
	errs = append(errs, event("ERROR", map[string]any{
		"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "Expired", "code": http.StatusGone, "message": "the API answers again: what was on record is past",
	}))
	if errors.Join(errs...) != nil {
		return nil
	}
	ctx, cancel := context.WithCancel(req.Context())
	return answer(&stream{now: b.Bytes()[:n], last: b.Bytes()[n:], live: t.gate.live, ctx: ctx, cancel: cancel})
}

// stream is the body of a watch that says what is known, and nothing more until the
// API answers.
type stream struct {
	now, last []byte
	live      <-chan struct{}
	ctx       context.Context // of the request
	cancel    func()
}

// Read implements io.Reader, for one caller at a time.
func (s *stream) Read(p []byte) (int, error) {
	if len(s.now) == 0 {
		if len(s.last) == 0 {
			return 0, io.EOF
		}
		select {
		case <-s.live:
			s.now, s.last = s.last, nil
		case <-s.ctx.Done():
			return 0, s.ctx.Err()
		}
	}
	n := copy(p, s.now)
	s.now = s.now[n:]
	return n, nil
}

// Close implements io.Closer.
func (s *stream) Close() error {
	s.cancel()
	return nil
}
