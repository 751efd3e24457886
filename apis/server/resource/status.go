package resource

import (
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// Status is the /status subresource of a kind: the same objects as its Store,
// written by another strategy.
type Status struct{ writer }

var (
	_ rest.Patcher             = &Status{}
	_ rest.ResetFieldsStrategy = &Status{}
)

// NewStatus makes the status subresource of a kind that has one.
func NewStatus(main *Store) *Status {
	store := *main.Store
	s := statusStrategy{main.CreateStrategy.(strategy)}
	store.UpdateStrategy, store.ResetFieldsStrategy = s, s
	// What the spec asks for is given out when the spec is written: the one that comes
	// with a status counts for nothing.
	store.BeginUpdate, store.AfterUpdate = nil, nil
	return &Status{writer{&store}}
}

// GetResetFields names what a writer of the status cannot own.
func (s *Status) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return s.store.GetResetFields()
}
