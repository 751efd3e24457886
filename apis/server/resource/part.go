package resource

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/clusterd/clusterd/apis/kind"
)

// writer is a subresource that reads and writes the same objects as the main
// resource, by a strategy of its own. It never creates.
type writer struct{ store *registry.Store }

// New returns an empty object of the kind.
func (w writer) New() runtime.Object { return w.store.New() }

// Destroy does nothing: the storage belongs to the main resource.
func (w writer) Destroy() {}

// Get reads the object.
func (w writer) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	return w.store.Get(ctx, name, options)
}

// Update writes the object as its strategy lets it. It never creates:
// forceAllowCreate, which server-side apply sets, is ignored.
func (w writer) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc, update rest.ValidateObjectUpdateFunc, _ bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	return w.store.Update(ctx, name, info, create, update, false, options)
}

// ConvertToTable makes the kind's table.
func (w writer) ConvertToTable(ctx context.Context, obj, options runtime.Object) (*metav1.Table, error) {
	return w.store.ConvertToTable(ctx, obj, options)
}

// Part is a subresource that writes one part of its object: pods/resize.
type Part struct {
	writer
	fields map[fieldpath.APIVersion]fieldpath.Filter
}

var (
	_ rest.Patcher                   = &Part{}
	_ rest.ResetFieldsFilterStrategy = &Part{}
)

// NewPart makes the subresource of one of the kind's parts.
func NewPart(main *Store, part kind.Part) *Part {
	store := *main.Store
	store.UpdateStrategy = partStrategy{main.CreateStrategy.(strategy), part}
	store.ResetFieldsStrategy = nil // the filter below says it
	version := fieldpath.APIVersion(main.kind.GVK.GroupVersion().String())
	return &Part{writer{&store}, map[fieldpath.APIVersion]fieldpath.Filter{version: fieldpath.NewIncludeMatcherFilter(matcher(part.Fields))}}
}

// matcher matches what is at or below any of the paths. (The library's own
// merging of matchers does not join those that begin with a wildcard.)
func matcher(paths [][]string) *fieldpath.SetMatcher {
	below := map[string][][]string{}
	for _, path := range paths {
		if len(path) == 0 {
			return fieldpath.MatchAnySet()
		}
		below[path[0]] = append(below[path[0]], path[1:])
	}
	var members []*fieldpath.SetMemberMatcher
	for name, rest := range below {
		at := fieldpath.PathElementMatcher{PathElement: fieldpath.PathElement{FieldName: &name}}
		if name == "*" {
			at = fieldpath.MatchAnyPathElement()
		}
		members = append(members, &fieldpath.SetMemberMatcher{Path: at, Child: matcher(rest)})
	}
	return fieldpath.NewSetMatcher(false, members...)
}

// GetResetFieldsFilter passes what a writer of the part can own.
func (p *Part) GetResetFieldsFilter() map[fieldpath.APIVersion]fieldpath.Filter { return p.fields }

// partStrategy serves updates of a part.
type partStrategy struct {
	strategy
	part kind.Part
}

func (s partStrategy) AllowCreateOnUpdate(context.Context) bool      { return false }
func (s partStrategy) AllowUnconditionalUpdate(context.Context) bool { return true }

func (s partStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	s.part.PrepareUpdate(obj, old)
}

func (s partStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	return s.part.ValidateUpdate(obj, old)
}
