package extend

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	crdserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	crdinformers "k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions/apiextensions/v1"
	crdlisters "k8s.io/apiextensions-apiserver/pkg/client/listers/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/apis/server/inproc"
)

// Keys tells whether there is anything below a folder of the storage.
type Keys interface {
	// Empty reports whether no key has the prefix, and as of which revision, the
	// newest one of the cluster.
	Empty(ctx context.Context, prefix string) (empty bool, revision int64, err error)
	// Watch returns a channel that is closed when a key with the prefix has been
	// written after revision, when that can be known no more, and when ctx ends.
	// ErrWritten: one has been already.
	Watch(ctx context.Context, prefix string, revision int64) (<-chan struct{}, error)
}

// ErrWritten is returned by Keys.
var ErrWritten = errors.New("a key has been written since")

// Quiet answers lists and watches of custom kinds of which there is no object, for
// clients inside this process. What the library keeps of a kind once anybody has
// asked for its objects (schemas, compiled rules, a watch cache) is megabytes,
// and the collector of garbage watches every kind there is. A watch ends when the
// first object is written; the client asks again then, and is the library's.
type Quiet struct {
	keys        Keys
	prefix      func(group, resource string) string
	definitions crdlisters.CustomResourceDefinitionLister

	mu      sync.Mutex
	changed chan struct{} // closed when a definition has changed
}

// NewQuiet makes a Quiet of the custom kinds that an informer knows, whose objects
// are stored below prefix.
func NewQuiet(keys Keys, prefix func(group, resource string) string, definitions crdinformers.CustomResourceDefinitionInformer) (*Quiet, error) {
	q := &Quiet{keys: keys, prefix: prefix, definitions: definitions.Lister(), changed: make(chan struct{})}
	_, err := definitions.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { q.wake() },
		UpdateFunc: func(any, any) { q.wake() },
		DeleteFunc: func(any) { q.wake() },
	})
	if err != nil {
		return nil, fmt.Errorf("watch the custom kinds: %w", err)
	}
	return q, nil
}

// wake lets those look again who wait.
func (q *Quiet) wake() {
	q.mu.Lock()
	defer q.mu.Unlock()
	close(q.changed)
	q.changed = make(chan struct{})
}

func (q *Quiet) changes() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.changed
}

// quietRequest is a list or a watch that Quiet may answer.
type quietRequest struct {
	info   *request.RequestInfo
	prefix string
	// partial: the client asks for the objects' metadata alone.
	partial bool
	// from is the least revision wanted.
	from      int64
	initial   bool // the watch begins with what there is
	bookmarks bool
	timeout   time.Duration
	kind      *apiextensionsv1.CustomResourceDefinition
}

// longestWatch bounds a watch that has no limit of its own.
const longestWatch = 30 * time.Minute

// Answer answers a request, or reports false: it is another's to answer.
func (q *Quiet) Answer(w http.ResponseWriter, req *http.Request) bool {
	ctx := req.Context()
	r, ok := q.request(req)
	if !ok {
		return false
	}
	empty, now, err := q.keys.Empty(ctx, r.prefix)
	if err != nil || !empty || now < r.from {
		return false
	}
	if r.info.Verb == "list" {
		q.list(w, r, now)
		return true
	}
	if r.initial || r.from == 0 {
		r.from = now
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	written, err := q.keys.Watch(ctx, r.prefix, r.from)
	switch {
	case errors.Is(err, ErrWritten):
		return false
	case err != nil && (r.initial || ctx.Err() != nil):
		return false
	case err != nil:
		// What was since is forgotten: the client lists again.
		gone := apierrors.NewResourceExpired(fmt.Sprintf("resourceVersion %d of %s: %v", r.from, r.kind.Name, err))
		responsewriters.ErrorNegotiated(gone, crdserver.Codecs, schema.GroupVersion{Group: r.info.APIGroup, Version: r.info.APIVersion}, w, req)
		return true
	}
	q.hold(ctx, w, r, written)
	return true
}

// request is false if req is not about objects of a custom kind, comes from
// outside, or asks for more than Quiet understands.
func (q *Quiet) request(req *http.Request) (*quietRequest, bool) {
	info, ok := request.RequestInfoFrom(req.Context())
	if !ok || !info.IsResourceRequest || info.Verb != "list" && info.Verb != "watch" || info.Subresource != "" || info.Name != "" ||
		!strings.Contains(info.APIGroup, ".") || !inproc.Inside(req.Context()) {
		return nil, false
	}
	r := &quietRequest{info: info, timeout: longestWatch}
	accept := req.Header.Get("Accept")
	r.partial = strings.Contains(accept, "as=PartialObjectMetadata")
	if strings.Contains(accept, "as=Table") || !r.partial && !strings.Contains(accept, "json") {
		return nil, false
	}
	if !r.understands(req.URL.Query()) {
		return nil, false
	}
	if r.kind, ok = q.served(info); !ok {
		return nil, false
	}
	r.prefix = q.prefix(info.APIGroup, info.Resource) + "/"
	return r, true
}

func (r *quietRequest) understands(query url.Values) bool {
	for key, values := range query {
		value := values[0]
		var err error
		switch key {
		case "resourceVersion":
			if value != "" {
				r.from, err = strconv.ParseInt(value, 10, 64)
			}
		case "resourceVersionMatch":
			if value != "" && value != string(metav1.ResourceVersionMatchNotOlderThan) {
				return false
			}
		case "sendInitialEvents":
			r.initial, err = strconv.ParseBool(value)
		case "allowWatchBookmarks":
			r.bookmarks, err = strconv.ParseBool(value)
		case "timeoutSeconds":
			var seconds int64
			if seconds, err = strconv.ParseInt(value, 10, 32); seconds > 0 {
				r.timeout = min(r.timeout, time.Duration(seconds)*time.Second)
			}
		case "watch", "limit", "timeout":
		default:
			if value != "" {
				return false
			}
		}
		if err != nil {
			return false
		}
	}
	// An initial state without the mark of its end is none.
	return !r.initial || r.bookmarks
}

// served is the definition of the kind that is asked for, if it serves it.
func (q *Quiet) served(info *request.RequestInfo) (*apiextensionsv1.CustomResourceDefinition, bool) {
	kind, err := q.definitions.Get(info.Resource + "." + info.APIGroup)
	if err != nil || kind.DeletionTimestamp != nil || kind.Status.AcceptedNames.Plural != info.Resource || kind.Spec.Scope == apiextensionsv1.ClusterScoped && info.Namespace != "" {
		return nil, false
	}
	// As the library: it serves a kind as soon as its names are its own.
	if !apihelpers.IsCRDConditionTrue(kind, apiextensionsv1.NamesAccepted) && !apihelpers.IsCRDConditionTrue(kind, apiextensionsv1.Established) {
		return nil, false
	}
	for _, version := range kind.Spec.Versions {
		if version.Name == info.APIVersion {
			return kind, version.Served
		}
	}
	return nil, false
}

func (r *quietRequest) typeMeta(list bool) metav1.TypeMeta {
	names := r.kind.Status.AcceptedNames
	t := metav1.TypeMeta{APIVersion: r.info.APIGroup + "/" + r.info.APIVersion, Kind: names.Kind}
	if r.partial {
		t = metav1.TypeMeta{APIVersion: metav1.SchemeGroupVersion.String(), Kind: "PartialObjectMetadata"}
	}
	switch {
	case list && r.partial:
		t.Kind += "List"
	case list:
		t.Kind = names.ListKind
	}
	return t
}

func (q *Quiet) list(w http.ResponseWriter, r *quietRequest, revision int64) {
	w.Header().Set("Content-Type", "application/json")
	err := json.NewEncoder(w).Encode(metav1.PartialObjectMetadataList{
		TypeMeta: r.typeMeta(true), ListMeta: metav1.ListMeta{ResourceVersion: strconv.FormatInt(revision, 10)},
		Items: []metav1.PartialObjectMetadata{},
	})
	if err != nil {
		klog.V(2).InfoS("An empty list was not sent", "definition", r.kind.Name, "err", err)
	}
}

// hold keeps a watch open until there is something to watch, the kind is another
// one, or its time is over.
func (q *Quiet) hold(ctx context.Context, w http.ResponseWriter, r *quietRequest, written <-chan struct{}) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	if r.initial {
		bookmark(w, r, r.from, true)
	}
	if f, ok := w.(http.Flusher); ok {
		f.Flush()
	}
	flowcontrol.WatchInitialized(ctx)
	over := time.NewTimer(r.timeout)
	defer over.Stop()
	for {
		changed := q.changes()
		if kind, ok := q.served(r.info); !ok || kind.UID != r.kind.UID {
			return
		}
		select {
		case <-changed:
			continue
		case <-written:
			// Watches without any event look like failures to clients.
			bookmark(w, r, r.from, false)
		case <-over.C:
			if empty, now, err := q.keys.Empty(ctx, r.prefix); err == nil && empty {
				if _, err := q.keys.Watch(ctx, r.prefix, r.from); err == nil {
					bookmark(w, r, now, false) // nothing was written in between
				}
			}
		case <-ctx.Done():
		}
		return
	}
}

// bookmark says that the client knows everything up to a revision.
func bookmark(w http.ResponseWriter, r *quietRequest, revision int64, initial bool) {
	if !r.bookmarks {
		return
	}
	object := metav1.PartialObjectMetadata{TypeMeta: r.typeMeta(false), ObjectMeta: metav1.ObjectMeta{ResourceVersion: strconv.FormatInt(revision, 10)}}
	if initial {
		object.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	}
	err := json.NewEncoder(w).Encode(struct {
		Type   watch.EventType               `json:"type"`
		Object *metav1.PartialObjectMetadata `json:"object"`
	}{watch.Bookmark, &object})
	if err != nil {
		klog.V(2).InfoS("A bookmark was not sent", "definition", r.kind.Name, "err", err)
	}
}
