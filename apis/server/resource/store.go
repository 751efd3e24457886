package resource

import (
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/names"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/apis"
)

// Store is one kind's resource as the library serves it.
type Store struct {
	*registry.Store
	kind apis.Kind
}

var (
	_ rest.ShortNamesProvider = &Store{}
	_ rest.CategoriesProvider = &Store{}
)

// New makes the store of kind on the storage that options hands out. typer is
// the scheme the kind is registered in.
func New(kind apis.Kind, typer runtime.ObjectTyper, options generic.RESTOptionsGetter) (*Store, error) {
	base := strategy{ObjectTyper: typer, NameGenerator: names.SimpleNameGenerator, kind: kind}
	var deletion rest.RESTDeleteStrategy = base
	if kind.Grace != nil {
		deletion = gracefulStrategy{base}
	}
	attrs := Attrs(kind)
	index := fieldIndex(kind)
	store := &registry.Store{
		NewFunc:                   kind.New,
		NewListFunc:               kind.NewList,
		DefaultQualifiedResource:  schema.GroupResource{Group: kind.GVK.Group, Resource: kind.Resource},
		SingularQualifiedResource: schema.GroupResource{Group: kind.GVK.Group, Resource: kind.Singular},
		PredicateFunc: func(label labels.Selector, field fields.Selector) storage.SelectionPredicate {
			return storage.SelectionPredicate{Label: label, Field: field, GetAttrs: attrs, IndexFields: index.fields}
		},
		CreateStrategy:      base,
		UpdateStrategy:      base,
		DeleteStrategy:      deletion,
		ResetFieldsStrategy: base,
		TableConvertor:      Table(kind),
		// A graceful deletion answers with what is left of the object for
		// its grace period; any other with a Status.
		ReturnDeletedObject: kind.Grace != nil,
	}
	if kind.TTLSeconds != nil {
		store.TTLFunc = func(obj runtime.Object, _ uint64, _ bool) (uint64, error) {
			return kind.TTLSeconds(obj), nil
		}
	}
	if err := store.CompleteWithOptions(&generic.StoreOptions{
		RESTOptions: options, AttrFunc: attrs, TriggerFunc: index.triggers, Indexers: index.indexers,
	}); err != nil {
		return nil, fmt.Errorf("complete the store of %s: %w", kind.Resource, err)
	}
	return &Store{Store: store, kind: kind}, nil
}

// Kind is what the store was made from.
func (s *Store) Kind() apis.Kind { return s.kind }

// ShortNames are the abbreviations kubectl accepts.
func (s *Store) ShortNames() []string { return s.kind.ShortNames }

// Categories are the groups of kinds ("all") that kubectl accepts.
func (s *Store) Categories() []string { return s.kind.Categories }

// Attrs gives the labels and fields by which objects of kind can be selected.
func Attrs(kind apis.Kind) storage.AttrFunc {
	return func(obj runtime.Object) (labels.Set, fields.Set, error) {
		object, err := meta.Accessor(obj)
		if err != nil {
			return nil, nil, fmt.Errorf("select a %s: %w", kind.Singular, err)
		}
		set := fields.Set{}
		if kind.Fields != nil {
			set = kind.Fields(obj)
		}
		set["metadata.name"] = object.GetName()
		if kind.Namespaced {
			set["metadata.namespace"] = object.GetNamespace()
		}
		return object.GetLabels(), set, nil
	}
}

// nodeField is the field by which every agent selects its pods. With a watch
// cache in front of the store an index keeps a change of one pod from being
// matched against the watch of every node.
const nodeField = "spec.nodeName"

// index is what a watch cache may index a kind's objects by.
type index struct {
	fields   []string
	triggers storage.IndexerFuncs
	indexers *cache.Indexers
}

func fieldIndex(kind apis.Kind) index {
	if kind.Fields == nil || !kind.Fields(kind.New()).Has(nodeField) {
		return index{}
	}
	value := func(obj runtime.Object) string { return kind.Fields(obj).Get(nodeField) }
	return index{
		fields:   []string{nodeField},
		triggers: storage.IndexerFuncs{nodeField: value},
		indexers: &cache.Indexers{storage.FieldIndex(nodeField): func(obj any) ([]string, error) {
			o, ok := obj.(runtime.Object)
			if !ok {
				return nil, fmt.Errorf("index a %T as a %s", obj, kind.Singular)
			}
			return []string{value(o)}, nil
		}},
	}
}
