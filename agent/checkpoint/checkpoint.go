// Package checkpoint keeps on disk what a node needs to start its pods again after a
// boot with no API in reach, and answers the node's own reads from it until the API
// does.
//
// It decides which pods may be started so (Startable), and when (Gate). It starts
// none, and never takes a record for the truth: whatever was started is unconfirmed
// until the API has listed the node's pods.
package checkpoint

import (
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// Gate is between a node's clients and the API. It is in one of three states, and
// goes through them in this order, the second of which may be left out:
//
//	waiting ──(no answer for a time: Isolate)──▶ isolated ──(the node's pods are listed: Open)──▶ live
//	   └───────────────────────(the node's pods are listed: Open)────────────────────────────▶
//
// Waiting and isolated, it holds back lists and watches and tries them again each
// second, so that no client is in a long back-off when the state changes; lists are
// consistent reads then, which a server without quorum does not answer. Isolated,
// it answers from the records what they can answer; what is written, and what it
// cannot answer, goes to the API in any state. Live, it passes all on.
// Its methods may be called concurrently.
type Gate struct {
	node     string        // the name
	live     chan struct{} // closed once live
	isolated chan struct{} // closed once isolated

	mu       sync.Mutex // guards the closing of both, and all below
	kept     *content
	answered time.Time
	refused  bool
}

// NewGate returns a Gate of the node that waits.
func NewGate(node string) *Gate {
	return &Gate{node: node, live: make(chan struct{}), isolated: make(chan struct{})}
}

// Live is closed once the API has listed the node's pods.
func (g *Gate) Live() <-chan struct{} { return g.live }

// Answered is when the API last did what takes a quorum: it renewed the node's Lease, or
// read the node's own object.
func (g *Gate) Answered() time.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.answered
}

// Refused reports whether the API's last answer to the node, asked for the node's own
// object, was that it may not know. Then others may run its pods.
func (g *Gate) Refused() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.refused
}

// Open has all passed on from now on: the API has listed the node's pods.
func (g *Gate) Open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !closed(g.live) {
		close(g.live)
		g.kept = nil
	}
}

// Isolate has reads answered from the records from now on. It returns false if the
// API has listed the node's pods before.
func (g *Gate) Isolate(pods []*Pod, cluster *Cluster) (bool, error) {
	kept, err := newContent(pods, cluster)
	if err != nil {
		return false, fmt.Errorf("checkpoint: %w", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if closed(g.live) || closed(g.isolated) {
		return false, nil
	}
	g.kept = kept
	close(g.isolated)
	return true, nil
}

// note draws the conclusion from what the API said when it was asked for the node's own
// object, or to renew its Lease: both need no role, and a quorum.
func (g *Gate) note(resp *http.Response, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.refused = err == nil && refusal(resp.StatusCode)
	if err == nil && (resp.StatusCode < http.StatusBadRequest || resp.StatusCode == http.StatusNotFound) {
		g.answered = time.Now()
	}
}

// failing: a server without quorum answers so, and one that starts or is overloaded.
func failing(code int) bool {
	return code >= http.StatusInternalServerError || code == http.StatusTooManyRequests
}

func refusal(code int) bool {
	return code == http.StatusUnauthorized || code == http.StatusForbidden
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func (g *Gate) content() *content {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.kept
}

// content is what the records hold, as it is asked for.
type content struct {
	// of each resource, "group/version/resource"
	lists map[string]*list
}

type list struct {
	kind  string
	all   bool // no other object of the kind was known to the node
	items []item
	// absent are those that were not there, by absence
	absent sets.Set[string]
}

func absence(namespace, name, signer string) string { return namespace + "/" + name + "/" + signer }

type item struct {
	namespace, name, signer string
	raw                     json.RawMessage
}

func newContent(pods []*Pod, cluster *Cluster) (*content, error) {
	c := &content{lists: map[string]*list{}}
	seen := sets.New[string]()
	add := func(kind string, raw json.RawMessage, all bool) error {
		gvr, ok := kinds[kind]
		if !ok {
			return fmt.Errorf("kind %q is not known here", kind)
		}
		var meta struct {
			Metadata struct{ Namespace, Name string }
			Spec     struct{ SignerName string }
		}
		if raw != nil {
			if err := json.Unmarshal(raw, &meta); err != nil {
				return fmt.Errorf("a %s: %w", kind, err)
			}
		}
		key := gvr.Group + "/" + gvr.Version + "/" + gvr.Resource
		l := c.lists[key]
		if l == nil {
			l = &list{kind: kind, absent: sets.New[string]()}
			c.lists[key] = l
		}
		l.all = l.all || all
		id := key + "/" + meta.Metadata.Namespace + "/" + meta.Metadata.Name
		if raw == nil || seen.Has(id) {
			return nil
		}
		seen.Insert(id)
		l.items = append(l.items, item{meta.Metadata.Namespace, meta.Metadata.Name, meta.Spec.SignerName, raw})
		return nil
	}
	if cluster != nil {
		for kind, objects := range cluster.Lists {
			all := kind != "ConfigMap" // of these the node follows one
			if err := add(kind, nil, all); err != nil {
				return nil, err
			}
			for _, raw := range objects {
				if err := add(kind, raw, all); err != nil {
					return nil, err
				}
			}
		}
	}
	for _, p := range pods {
		for _, o := range p.Objects {
			if err := add(o.Kind, o.Object, false); err != nil {
				return nil, err
			}
		}
		for _, a := range p.Absent {
			if err := add(a.Kind, nil, false); err != nil {
				return nil, err
			}
			gvr := kinds[a.Kind]
			c.lists[gvr.Group+"/"+gvr.Version+"/"+gvr.Resource].absent.Insert(absence(a.Namespace, a.Name, a.Signer))
		}
		for _, claim := range p.Claims {
			pvc, err := Encode(claim.Claim)
			if err != nil {
				return nil, err
			}
			pv, err := Encode(claim.Volume)
			if err != nil {
				return nil, err
			}
			for _, o := range []Object{pvc, pv} {
				if err := add(o.Kind, o.Object, false); err != nil {
					return nil, err
				}
			}
		}
	}
	return c, nil
}

// find returns what a request to read asks for; false: it is not known.
func (c *content) find(info *request.RequestInfo, req *http.Request) (*list, []item, bool) {
	l := c.lists[info.APIGroup+"/"+info.APIVersion+"/"+info.Resource]
	if l == nil || info.Subresource != "" || req.URL.Query().Get("labelSelector") != "" {
		return nil, nil, false
	}
	name, signer := "", ""
	if info.Verb == "get" {
		name = info.Name
	}
	selector, err := fields.ParseSelector(req.URL.Query().Get("fieldSelector"))
	if err != nil {
		return nil, nil, false
	}
	for _, r := range selector.Requirements() {
		switch r.Field {
		case "metadata.name":
			name = r.Value
		case "spec.signerName":
			signer = r.Value
		default:
			return nil, nil, false
		}
	}
	namespace := info.Namespace
	if info.Resource == "namespaces" {
		namespace = "" // requestinfo takes its name for one
	}
	var found []item
	for _, i := range l.items {
		if (namespace == "" || i.namespace == namespace) && (name == "" || i.name == name) && (signer == "" || i.signer == signer) {
			found = append(found, i)
		}
	}
	if len(found) == 0 && (name != "" || signer != "") && l.absent.Has(absence(namespace, name, signer)) {
		return l, nil, true
	}
	if len(found) == 0 && (!l.all || name != "") {
		return nil, nil, false
	}
	if name == "" && signer == "" && !l.all {
		return nil, nil, false
	}
	return l, found, true
}

// retryAfter is between two tries of a request that is held back, headersWithin what
// the API may take to begin its answer to one.
const (
	retryAfter    = time.Second
	headersWithin = 10 * time.Second
)
