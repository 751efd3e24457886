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

// Typed is Kind with functions over the kind's own Go type T. Its fields mean
// what Kind's mean. Giving one of the resulting functions an object of another
// type is a bug of the caller and panics.
type Typed[T runtime.Object] struct {
	GVK        schema.GroupVersionKind
	Resource   string
	Singular   string
	ShortNames []string
	Categories []string
	Namespaced bool

	New     func() runtime.Object
	NewList func() runtime.Object

	Default        func(obj T)
	PrepareCreate  func(obj T)
	Requested      func(obj T, by authenticationv1.UserInfo)
	PrepareUpdate  func(obj, old T)
	Validate       func(obj T) field.ErrorList
	ValidateUpdate func(obj, old T) field.ErrorList
	Warnings       func(obj T) []string

	Columns []metav1.TableColumnDefinition
	Row     func(obj T, now time.Time) []any
	Fields  func(obj T) fields.Set

	Status *TypedStatus[T]
	Scale  *TypedScale[T]
	Parts  []TypedPart[T]

	Grace      func(obj T, options *metav1.DeleteOptions) bool
	TTLSeconds func(obj T) uint64

	CreateOnUpdate      bool
	UnconditionalUpdate bool
	OrphansByDefault    bool
	OrphanWarning       string
	Untracked           bool
	NeverTracked        func(obj T) bool
}

// TypedStatus is Status over the kind's own Go type.
type TypedStatus[T runtime.Object] struct {
	PrepareUpdate  func(obj, old T)
	ValidateUpdate func(obj, old T) field.ErrorList
}

// TypedPart is Part over the kind's own Go type.
type TypedPart[T runtime.Object] struct {
	Name           string
	PrepareUpdate  func(obj, old T)
	ValidateUpdate func(obj, old T) field.ErrorList
	Fields         [][]string
}

// TypedScale is Scale over the kind's own Go type.
type TypedScale[T runtime.Object] struct {
	SpecReplicas    func(obj T) int32
	SetSpecReplicas func(obj T, n int32)
	StatusReplicas  func(obj T) int32
	Selector        func(obj T) (string, error)
}

// Kind erases the type. Functions that are nil stay nil.
func (t Typed[T]) Kind() Kind {
	k := Kind{
		GVK:        t.GVK,
		Resource:   t.Resource,
		Singular:   t.Singular,
		ShortNames: t.ShortNames,
		Categories: t.Categories,
		Namespaced: t.Namespaced,

		New:     t.New,
		NewList: t.NewList,

		Default:        one(t.Default),
		PrepareCreate:  one(t.PrepareCreate),
		PrepareUpdate:  two(t.PrepareUpdate),
		Validate:       oneTo(t.Validate),
		ValidateUpdate: twoTo(t.ValidateUpdate),
		Warnings:       oneTo(t.Warnings),

		Columns:    t.Columns,
		Fields:     oneTo(t.Fields),
		TTLSeconds: oneTo(t.TTLSeconds),

		CreateOnUpdate:      t.CreateOnUpdate,
		UnconditionalUpdate: t.UnconditionalUpdate,
		OrphansByDefault:    t.OrphansByDefault,
		OrphanWarning:       t.OrphanWarning,
		Untracked:           t.Untracked,
		NeverTracked:        oneTo(t.NeverTracked),
	}
	if t.Requested != nil {
		k.Requested = func(obj runtime.Object, by authenticationv1.UserInfo) { t.Requested(obj.(T), by) }
	}
	if t.Row != nil {
		k.Row = func(obj runtime.Object, now time.Time) []any { return t.Row(obj.(T), now) }
	}
	if t.Grace != nil {
		k.Grace = func(obj runtime.Object, options *metav1.DeleteOptions) bool { return t.Grace(obj.(T), options) }
	}
	if s := t.Status; s != nil {
		k.Status = &Status{PrepareUpdate: two(s.PrepareUpdate), ValidateUpdate: twoTo(s.ValidateUpdate)}
	}
	if s := t.Scale; s != nil {
		k.Scale = &Scale{
			SpecReplicas:    oneTo(s.SpecReplicas),
			SetSpecReplicas: func(obj runtime.Object, n int32) { s.SetSpecReplicas(obj.(T), n) },
			StatusReplicas:  oneTo(s.StatusReplicas),
			Selector:        func(obj runtime.Object) (string, error) { return s.Selector(obj.(T)) },
		}
	}
	for _, p := range t.Parts {
		k.Parts = append(k.Parts, Part{Name: p.Name, PrepareUpdate: two(p.PrepareUpdate), ValidateUpdate: twoTo(p.ValidateUpdate), Fields: p.Fields})
	}
	return k
}

func one[T runtime.Object](f func(T)) func(runtime.Object) {
	if f == nil {
		return nil
	}
	return func(obj runtime.Object) { f(obj.(T)) }
}

func two[T runtime.Object](f func(_, _ T)) func(_, _ runtime.Object) {
	if f == nil {
		return nil
	}
	return func(obj, old runtime.Object) { f(obj.(T), old.(T)) }
}

func oneTo[T runtime.Object, R any](f func(T) R) func(runtime.Object) R {
	if f == nil {
		return nil
	}
	return func(obj runtime.Object) R { return f(obj.(T)) }
}

func twoTo[T runtime.Object, R any](f func(_, _ T) R) func(_, _ runtime.Object) R {
	if f == nil {
		return nil
	}
	return func(obj, old runtime.Object) R { return f(obj.(T), old.(T)) }
}
