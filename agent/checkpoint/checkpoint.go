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
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// Gate is between a node's clients and the API. It is in one of three states, and
// goes through them in this order, the second of which may be left out:
//
//	waiting ──(no answer for a time: Isolate)──▶ isolated ──(an answer)──▶ live
//	   └───────────────────────(an answer)────────────────────────────────▶
//
// Waiting and isolated, it holds back lists and watches and tries them again each
// second, so that no client is in a long back-off when the state changes. Isolated,
// it answers from the records what they can answer; what is written, and what it
// cannot answer, goes to the API in any state. Live, it passes all on.
// Its methods may be called concurrently.
type Gate struct {
	live     chan struct{} // closed once live
	isolated chan struct{} // closed once isolated
	refused  atomic.Bool   // the API's last answer was that it does not know this node

	mu   sync.Mutex // guards the closing of both, and kept
	kept *content
}

// NewGate returns a Gate that waits.
func NewGate() *Gate {
	return &Gate{live: make(chan struct{}), isolated: make(chan struct{})}
}

// Live is closed when the API has answered.
func (g *Gate) Live() <-chan struct{} { return g.live }

// Refused reports whether the API answers, and refuses this node. Then others may run
// its pods.
func (g *Gate) Refused() bool { return g.refused.Load() }

// Isolate has reads answered from the records from now on. It returns false if the
// API has answered before.
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

// note draws the conclusion from an answer of the API.
func (g *Gate) note(resp *http.Response, err error) {
	if err != nil || failing(resp.StatusCode) {
		return
	}
	if g.refused.Store(refusal(resp.StatusCode)); refusal(resp.StatusCode) {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !closed(g.live) {
		close(g.live)
		g.kept = nil
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
}

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
			l = &list{kind: kind}
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
