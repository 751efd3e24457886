// Package kind holds type Kind: what the API server has to know about one kind
// of object. It is a leaf, so that the groups' packages can build Kinds and
// package apis can list them.
package kind

import (
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Kind is everything the API server has to know about one kind of object.
// A nil function means "nothing to do". All functions are pure, may be called
// concurrently, own nothing of their arguments and must not keep them; those
// named Default and Prepare… change the object they are given.
type Kind struct {
	GVK        schema.GroupVersionKind
	Resource   string // plural, lower case: "pods"
	Singular   string // "pod"
	ShortNames []string
	Categories []string // "all" puts the kind into `get all`
	Namespaced bool

	New     func() runtime.Object
	NewList func() runtime.Object

	// Default fills the fields the user left empty. It is idempotent, and is
	// registered with the Scheme, so that every decode runs it.
	Default func(obj runtime.Object)

	// PrepareCreate clears what a creator may not set (status) and sets what
	// only the server may (generation 1).
	PrepareCreate func(obj runtime.Object)
	// Requested records the requesting user in a new object and replaces what the
	// request says about it; it is called after PrepareCreate.
	Requested func(obj runtime.Object, by authenticationv1.UserInfo)
	// PrepareUpdate keeps what an update of the main resource may not change
	// (status) and bumps metadata.generation when the spec changed.
	PrepareUpdate func(obj, old runtime.Object)

	// Validate returns every fault of a new object, each naming its field.
	// ObjectMeta is included.
	Validate func(obj runtime.Object) field.ErrorList
	// ValidateUpdate returns every fault of replacing old by obj: Validate's,
	// plus changes of immutable fields.
	ValidateUpdate func(obj, old runtime.Object) field.ErrorList
	// Warnings returns sentences for the client's Warning headers.
	Warnings func(obj runtime.Object) []string

	// Columns and Row make the server-side table. Row returns one cell per
	// column. Columns with Priority > 0 are shown by -o wide only. Ages are
	// counted from now, which the caller passes so that Row stays pure.
	Columns []metav1.TableColumnDefinition
	Row     func(obj runtime.Object, now time.Time) []any

	// Fields are the values that --field-selector can match beside
	// metadata.name and metadata.namespace, which every kind has.
	Fields func(obj runtime.Object) fields.Set

	// Status is the /status subresource; nil: the kind has none.
	Status *Status
	// Scale is the /scale subresource; nil: the kind has none.
	Scale *Scale
	// Parts are the subresources that each write one part of the object which
	// an update of the main resource must leave alone.
	Parts []Part

	// Untracked: objects created by the cluster's own controllers have no
	// managedFields until a client uses server-side apply on them.
	Untracked bool
	// NeverTracked reports whether the object has none whoever makes it, until a client
	// applies to it: what one writer writes, and most often. nil: no object of the kind.
	NeverTracked func(obj runtime.Object) bool

	// Views are the other versions that the kind is served in; none is stored.
	Views []View

	// Grace sets the deletion grace period of a graceful deletion in
	// options.GracePeriodSeconds and reports whether deletion is graceful at
	// all; nil: the object goes at once (finalizers permitting).
	Grace func(obj runtime.Object, options *metav1.DeleteOptions) bool

	// TTLSeconds is how long an object is kept after its last write; nil or
	// 0: without a limit.
	TTLSeconds func(obj runtime.Object) uint64

	// CreateOnUpdate allows PUT to create (Lease, Event as upstream does).
	CreateOnUpdate bool
	// UnconditionalUpdate allows PUT without a resourceVersion.
	UnconditionalUpdate bool
	// OrphanWarning is a sentence for clients whose deletion leaves dependents behind
	// without having said so.
	OrphanWarning string

	// OrphansByDefault: a deletion that names no propagation policy leaves the
	// dependents.
	OrphansByDefault bool
}

// View is a version in which a kind is served beside its storage version.
type View struct {
	// Group is the API group of the view; "": the kind's own. The name of the
	// kind is the same in both.
	Group   string
	Version string // "v1"
	// AddConversions adds the functions between the view's Go types (object
	// and list) and the hub's. Those into the hub set the hub's defaults.
	AddConversions func(*runtime.Scheme) error
	// FieldLabels are the view's names of what Kind.Fields calls otherwise:
	// "regarding.name" → "involvedObject.name". Nil: they are the same. If not
	// nil, these (and metadata.name and metadata.namespace) are all there are.
	FieldLabels map[string]string
	// Validate and ValidateUpdate judge what is written through the view, in
	// place of the kind's. They are given the hub's type; their faults name
	// the view's fields. Nil: the kind's do.
	Validate       func(obj runtime.Object) field.ErrorList
	ValidateUpdate func(obj, old runtime.Object) field.ErrorList
}

// ViewGVK is the kind as it is called in v.
func (k Kind) ViewGVK(v View) schema.GroupVersionKind {
	gvk := schema.GroupVersionKind{Group: v.Group, Version: v.Version, Kind: k.GVK.Kind}
	if gvk.Group == "" {
		gvk.Group = k.GVK.Group
	}
	return gvk
}

// Status describes a status subresource.
type Status struct {
	// PrepareUpdate keeps everything of old but the status (and the metadata
	// a status writer may change).
	PrepareUpdate  func(obj, old runtime.Object)
	ValidateUpdate func(obj, old runtime.Object) field.ErrorList
}

// Part is a subresource that reads as the whole object and writes one part of
// it: pods/resize.
type Part struct {
	Name string // "resize"
	// PrepareUpdate keeps everything of old but the part, and bumps
	// metadata.generation when it changed.
	PrepareUpdate  func(obj, old runtime.Object)
	ValidateUpdate func(obj, old runtime.Object) field.ErrorList
	// Fields are the paths that its writers may own under server-side apply;
	// "*" stands for any item of a list.
	Fields [][]string
}

// Scale reads and writes the parts of an object that autoscaling/v1 Scale
// shows.
type Scale struct {
	SpecReplicas    func(obj runtime.Object) int32
	SetSpecReplicas func(obj runtime.Object, n int32)
	StatusReplicas  func(obj runtime.Object) int32
	// Selector is the label selector in its string form.
	Selector func(obj runtime.Object) (string, error)
}
