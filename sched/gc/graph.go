package gc

import (
	"slices"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// object is what the collector knows about one object. Values are immutable: a
// change replaces the object.
type object struct {
	uid        types.UID
	resource   schema.GroupVersionResource
	kind       schema.GroupKind
	namespace  string // "" if cluster-scoped
	name       string
	owners     []metav1.OwnerReference
	finalizers []string
	deleting   bool
}

func (o *object) foreground() bool {
	return o.deleting && slices.Contains(o.finalizers, metav1.FinalizerDeleteDependents)
}

func (o *object) orphaning() bool {
	return o.deleting && slices.Contains(o.finalizers, metav1.FinalizerOrphanDependents)
}

// blocks reports whether the object holds up its owner's foreground deletion.
func (o *object) blocks(owner types.UID) bool {
	return slices.ContainsFunc(o.owners, func(r metav1.OwnerReference) bool {
		return r.UID == owner && r.BlockOwnerDeletion != nil && *r.BlockOwnerDeletion
	})
}

// ring are the objects that wait, directly or through others, for their dependents
// and are waited for by o in turn; nil: o does not wait for itself.
func (g *graph) ring(o *object) map[types.UID]bool {
	if !slices.ContainsFunc(o.owners, func(ref metav1.OwnerReference) bool {
		owner := g.get(ref.UID)
		return owner != nil && owner.foreground() && o.blocks(ref.UID)
	}) {
		return nil // no owner waits for it: most objects need no walk
	}
	seen := map[types.UID]bool{}
	waits := false
	var visit func(*object)
	visit = func(at *object) {
		for _, d := range g.of(at.uid) {
			if !d.foreground() || !d.blocks(at.uid) {
				continue
			}
			waits = waits || d.uid == o.uid
			if !seen[d.uid] {
				seen[d.uid] = true
				visit(d)
			}
		}
	}
	visit(o)
	if !waits {
		return nil
	}
	return seen
}

// graph holds every object that informers show, with its owners and dependents.
// It is a cache: the API is asked before anything is deleted.
type graph struct {
	mu         sync.RWMutex // guards below
	objects    map[types.UID]*object
	dependents map[types.UID]map[types.UID]bool // owner → dependents; the owner may be unknown
}

func newGraph() *graph {
	return &graph{objects: map[types.UID]*object{}, dependents: map[types.UID]map[types.UID]bool{}}
}

// put adds or replaces an object and returns what was known of it before.
func (g *graph) put(o *object) (old *object) {
	g.mu.Lock()
	defer g.mu.Unlock()
	old = g.objects[o.uid]
	if old != nil {
		g.unlink(old)
	}
	g.objects[o.uid] = o
	for _, ref := range o.owners {
		if g.dependents[ref.UID] == nil {
			g.dependents[ref.UID] = map[types.UID]bool{}
		}
		g.dependents[ref.UID][o.uid] = true
	}
	return old
}

// drop removes an object and returns it, or nil if it was unknown.
func (g *graph) drop(uid types.UID) *object {
	g.mu.Lock()
	defer g.mu.Unlock()
	o := g.objects[uid]
	if o != nil {
		g.unlink(o)
		delete(g.objects, uid)
	}
	return o
}

// forget removes all objects that a resource showed, and returns them.
func (g *graph) forget(resource schema.GroupVersionResource) (out []*object) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for uid, o := range g.objects {
		if o.resource == resource {
			g.unlink(o)
			delete(g.objects, uid)
			out = append(out, o)
		}
	}
	return out
}

// lacking returns the UIDs of all objects with an owner of that kind which is unknown.
func (g *graph) lacking(kind schema.GroupKind) (out []types.UID) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	for uid, o := range g.objects {
		if slices.ContainsFunc(o.owners, func(ref metav1.OwnerReference) bool {
			gv, err := schema.ParseGroupVersion(ref.APIVersion)
			return err == nil && gv.WithKind(ref.Kind).GroupKind() == kind && g.objects[ref.UID] == nil
		}) {
			out = append(out, uid)
		}
	}
	return out
}

func (g *graph) unlink(o *object) {
	for _, ref := range o.owners {
		delete(g.dependents[ref.UID], o.uid)
		if len(g.dependents[ref.UID]) == 0 {
			delete(g.dependents, ref.UID)
		}
	}
}

func (g *graph) get(uid types.UID) *object {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.objects[uid]
}

// of returns the known dependents of an owner.
func (g *graph) of(owner types.UID) []*object {
	g.mu.RLock()
	defer g.mu.RUnlock()
	out := make([]*object, 0, len(g.dependents[owner]))
	for uid := range g.dependents[owner] {
		out = append(out, g.objects[uid])
	}
	return out
}

// withOwners returns the UIDs of all objects that have owners.
func (g *graph) withOwners() []types.UID {
	g.mu.RLock()
	defer g.mu.RUnlock()
	var out []types.UID
	for uid, o := range g.objects {
		if len(o.owners) > 0 || o.deleting {
			out = append(out, uid)
		}
	}
	return out
}
