package resource

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// Status is the /status subresource of a kind: the same objects as its Store,
// written by another strategy.
type Status struct{ store *registry.Store }

var (
	_ rest.Patcher             = &Status{}
	_ rest.ResetFieldsStrategy = &Status{}
)

// NewStatus makes the status subresource of a kind that has one.
func NewStatus(main *Store) *Status {
	base := main.CreateStrategy.(strategy)
	store := *main.Store
	store.UpdateStrategy = statusStrategy{base}
	store.ResetFieldsStrategy = statusStrategy{base}
	return &Status{store: &store}
}

// New returns an empty object of the kind.
func (s *Status) New() runtime.Object { return s.store.New() }

// Destroy does nothing: the storage belongs to the main resource.
func (s *Status) Destroy() {}

// Get reads the object.
func (s *Status) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	return s.store.Get(ctx, name, options)
}

// Update writes the status. It never creates: forceAllowCreate, which
// server-side apply sets, is ignored.
func (s *Status) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc, update rest.ValidateObjectUpdateFunc, _ bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	return s.store.Update(ctx, name, info, create, update, false, options)
}

// GetResetFields names what a writer of the status cannot own.
func (s *Status) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return s.store.GetResetFields()
}

// ConvertToTable makes the kind's table.
func (s *Status) ConvertToTable(ctx context.Context, obj, options runtime.Object) (*metav1.Table, error) {
	return s.store.ConvertToTable(ctx, obj, options)
}
