package server

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/past"
	"github.com/clusterd/clusterd/apis/server/extend"
)

// Keys tells whether there is anything below a folder of the storage.
type Keys = extend.Keys

// ErrWritten is returned by Keys.
var ErrWritten = extend.ErrWritten

// Past is the history of the storage. Its methods are called concurrently and
// may block until ctx ends; errors that are Kubernetes statuses reach the
// client as they are.
type Past interface {
	// Extent tells which revisions can be read here. It waits for the newest
	// state of the cluster when this server has not come to revision least.
	Extent(ctx context.Context, least int64) (Extent, error)
	// RevisionAt is the revision that was the present one at a time, which lies
	// between Extent's OldestTime and Now.
	RevisionAt(ctx context.Context, at time.Time) (int64, error)
	// Created is the revision at which what is stored under key now was created, as
	// far as this server knows; 0: nothing is stored there.
	Created(ctx context.Context, key string) (int64, error)
	// At makes the storage's Get without a resource version, in the context it
	// returns, show the object as of revision.
	At(ctx context.Context, revision int64) context.Context
	// Changes tells the latest changes of what is stored under key, at most
	// limit of them, oldest first.
	Changes(ctx context.Context, key string, limit int) (Changes, error)
}

// Extent is what a Past reaches back to.
type Extent struct {
	Oldest     int64     // oldest revision that can be read
	OldestTime time.Time // since when it is known to have held
	Newest     int64
	Now        time.Time // by the storage's clock
}

// Changes are what a Past holds about one key.
type Changes struct {
	List []StoredChange
	// Base is the revision at which the state before List was made; 0: there
	// was none, or it is not known.
	Base   int64
	More   bool // older changes are left out
	Extent Extent
}

// StoredChange is one change of one key.
type StoredChange struct {
	Revision int64
	Time     time.Time
	// Previous is the revision of the state that was replaced or deleted; 0:
	// the object was created.
	Previous int64
	Deleted  bool
	Origin   string // who asked for it
	// Server is the member that passed the request on to the one that led the
	// storage, as that one has noted; "": the leader itself, or it is not known.
	Server string
}

// withPast serves gets and lists as of a moment in the past, and the history
// of objects. It stands behind authorization, and what it serves is asked for
// as the same get or list of the present is: who may read an object may read
// what it was, since its namespace was created (pasttenant.go asks auth for more).
func withPast(next http.Handler, store Past, auth authorizer.Authorizer) http.Handler {
	p := &pastHandler{next: next, store: store, authorizer: auth}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		info, ok := request.RequestInfoFrom(req.Context())
		if !ok || !info.IsResourceRequest || req.URL.RawQuery == "" {
			next.ServeHTTP(w, req)
			return
		}
		query := req.URL.Query()
		err := p.present(req, info, query)
		switch {
		case err != nil:
		case query.Has(past.HistoryParameter):
			err = p.history(w, req, info, query)
		case query.Has(past.AtParameter):
			err = p.at(w, req, info, query)
		default:
			next.ServeHTTP(w, req)
		}
		if err != nil {
			gv := schema.GroupVersion{Group: info.APIGroup, Version: info.APIVersion}
			responsewriters.ErrorNegotiated(err, apis.Codecs, gv, w, req)
		}
	})
}

type pastHandler struct {
	next       http.Handler
	store      Past
	authorizer authorizer.Authorizer
}

// at answers a get or list with the state as of a moment. A list becomes one
// with resourceVersionMatch Exact, whose continue tokens carry the revision on.
func (p *pastHandler) at(w http.ResponseWriter, req *http.Request, info *request.RequestInfo, query url.Values) error {
	switch {
	case p.store == nil:
		return apierrors.NewBadRequest("at: this server keeps no history")
	case info.Verb != "get" && info.Verb != "list" || info.Subresource != "":
		return apierrors.NewBadRequest(fmt.Sprintf("at: only get and list of whole objects can look back, not %s", asked(info)))
	case query.Get("resourceVersion") != "" || query.Get("resourceVersionMatch") != "":
		return apierrors.NewBadRequest("at: it cannot be combined with resourceVersion")
	}
	text := query.Get(past.AtParameter)
	query.Del(past.AtParameter)
	if query.Get("continue") != "" {
		p.pass(w, req, req.Context(), query)
		return nil
	}
	rev, err := p.revision(req.Context(), text)
	if err != nil {
		return err
	}
	since, err := p.since(req.Context(), info)
	if err != nil {
		return err
	}
	if err := before(rev, since, info); err != nil {
		return err
	}
	w.Header().Set(past.RevisionHeader, strconv.FormatInt(rev, 10))
	ctx := req.Context()
	if info.Verb == "list" {
		query.Set("resourceVersion", strconv.FormatInt(rev, 10))
		query.Set("resourceVersionMatch", string(metav1.ResourceVersionMatchExact))
	} else {
		ctx = p.store.At(ctx, rev)
	}
	p.pass(w, req, ctx, query)
	return nil
}

func asked(info *request.RequestInfo) string {
	if info.Subresource != "" {
		return info.Verb + " of " + info.Resource + "/" + info.Subresource
	}
	return info.Verb
}

func (p *pastHandler) pass(w http.ResponseWriter, req *http.Request, ctx context.Context, query url.Values) {
	req = req.Clone(ctx)
	req.URL.RawQuery = query.Encode()
	p.next.ServeHTTP(w, req)
}

// revision finds the revision that text means, if it is within reach.
func (p *pastHandler) revision(ctx context.Context, text string) (int64, error) {
	moment, err := past.ParseMoment(text)
	if err != nil {
		return 0, apierrors.NewBadRequest("at: " + err.Error())
	}
	extent, err := p.store.Extent(ctx, moment.Revision)
	if err != nil {
		return 0, err
	}
	if rev := moment.Revision; rev > 0 {
		switch {
		case rev > extent.Newest:
			return 0, apierrors.NewBadRequest(fmt.Sprintf("at: revision %d has not happened yet: the newest is %d", rev, extent.Newest))
		case rev < extent.Oldest:
			return 0, tooOld(fmt.Sprintf("revision %d", rev), extent)
		}
		return rev, nil
	}
	at := moment.At(extent.Now)
	switch {
	case at.After(extent.Now.Add(clockSkew)):
		return 0, apierrors.NewBadRequest(fmt.Sprintf("at: %s lies in the future: it is %s", stamp(at), stamp(extent.Now)))
	case at.Before(extent.OldestTime):
		return 0, tooOld(stamp(at), extent)
	}
	return p.store.RevisionAt(ctx, at)
}

// clockSkew is how far a client's clock may be ahead.
const clockSkew = time.Minute

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// tooOld says how far back one can look, and what decides that.
func tooOld(what string, extent Extent) error {
	return apierrors.NewResourceExpired(fmt.Sprintf(
		"at: the history does not reach back to %s: the oldest revision is %d, of %s; how much is kept is set by storeHistoryAge and storeHistorySize in the servers' configuration",
		what, extent.Oldest, stamp(extent.OldestTime)))
}
