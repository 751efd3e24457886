package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/clusterd/clusterd/apis/past"
)

// history answers a get with the changes of the object.
func (p *pastHandler) history(w http.ResponseWriter, req *http.Request, info *request.RequestInfo, query url.Values) error {
	switch {
	case p.store == nil:
		return apierrors.NewBadRequest("history: this server keeps no history")
	case info.Verb != "get" || info.Subresource != "" || info.Name == "":
		return apierrors.NewBadRequest(fmt.Sprintf("history: only a get of one object can ask for it, not %s", asked(info)))
	case query.Has(past.AtParameter):
		return apierrors.NewBadRequest("history: it cannot be combined with at")
	}
	limit := past.DefaultChanges
	if text := query.Get(past.HistoryParameter); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > past.MaxChanges {
			return apierrors.NewBadRequest(fmt.Sprintf("history: %q: give how many changes to tell at most, between 1 and %d", text, past.MaxChanges))
		}
		limit = n
	}
	known, err := p.store.Changes(req.Context(), keyOf(info), limit)
	if err != nil {
		return err
	}
	since, err := p.since(req.Context(), info)
	if err != nil {
		return err
	}
	known.List = slices.DeleteFunc(known.List, func(c StoredChange) bool { return c.Revision < since })
	if known.Base < since {
		known.Base = 0
	}
	if len(known.List) == 0 && known.Base == 0 {
		resource := schema.GroupResource{Group: info.APIGroup, Resource: info.Resource}
		missing := apierrors.NewNotFound(resource, info.Name)
		missing.ErrStatus.Message = fmt.Sprintf("%s: neither now nor in the history, which begins with revision %d of %s",
			missing.ErrStatus.Message, known.Extent.Oldest, stamp(known.Extent.OldestTime))
		return missing
	}
	answer := past.History{
		Changes: make([]past.Change, 0, len(known.List)), More: known.More,
		OldestRevision: known.Extent.Oldest, OldestTime: known.Extent.OldestTime.UTC(), NewestRevision: known.Extent.Newest,
	}
	if known.Base > 0 {
		answer.Base = p.object(req, known.Extent.Oldest)
	}
	for _, c := range known.List {
		change := past.Change{Type: past.Modified, Revision: c.Revision, Time: c.Time.UTC(), Origin: c.Origin, Server: c.Server}
		shown := c.Revision
		switch {
		case c.Deleted:
			change.Type, shown = past.Deleted, max(c.Previous, known.Extent.Oldest)
		case c.Previous == 0:
			change.Type = past.Added
		}
		if shown >= since {
			change.Object = p.object(req, shown)
		}
		answer.Changes = append(answer.Changes, change)
	}
	body, err := json.Marshal(answer)
	if err != nil {
		return apierrors.NewInternalError(err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set(past.RevisionHeader, strconv.FormatInt(known.Extent.Newest, 10))
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write(body) // a client that has gone needs no answer
	return nil
}

// object asks the rest of the server for the requested object as of a
// revision, as JSON; nil when it cannot be read, because it has just left the
// history or is damaged.
func (p *pastHandler) object(req *http.Request, revision int64) json.RawMessage {
	get := req.Clone(p.store.At(req.Context(), revision))
	get.URL.RawQuery = ""
	get.Header = http.Header{"Accept": {"application/json"}, "User-Agent": req.Header["User-Agent"]}
	var answer answer
	p.next.ServeHTTP(&answer, get)
	if answer.code != http.StatusOK || !json.Valid(answer.body.Bytes()) {
		return nil
	}
	return answer.body.Bytes()
}

// answer keeps what a handler writes.
type answer struct {
	header http.Header
	code   int
	body   bytes.Buffer
}

// Header implements http.ResponseWriter.
func (a *answer) Header() http.Header {
	if a.header == nil {
		a.header = http.Header{}
	}
	return a.header
}

// WriteHeader implements http.ResponseWriter.
func (a *answer) WriteHeader(code int) {
	if a.code == 0 {
		a.code = code
	}
}

// Write implements http.ResponseWriter.
func (a *answer) Write(b []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	return a.body.Write(b)
}

// keyOf is where the storage keeps the object that a request is about.
func keyOf(info *request.RequestInfo) string {
	namespace := info.Namespace
	if info.APIGroup == "" && info.Resource == "namespaces" {
		namespace = "" // it names itself there
	}
	return path.Join(prefix(schema.GroupResource{Group: info.APIGroup, Resource: info.Resource}), namespace, info.Name)
}
