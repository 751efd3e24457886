package resource

import (
	"context"
	"fmt"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// scaleGVK is how every kind's scale looks on the wire.
var scaleGVK = autoscalingv1.SchemeGroupVersion.WithKind("Scale")

// Scale is the /scale subresource of a kind: an autoscaling/v1 Scale as a view
// of the object's replicas.
type Scale struct{ main *Store }

var (
	_ rest.Patcher                  = &Scale{}
	_ rest.GroupVersionKindProvider = &Scale{}
)

// NewScale makes the scale subresource of a kind that has one.
func NewScale(main *Store) *Scale { return &Scale{main: main} }

// New returns an empty Scale.
func (s *Scale) New() runtime.Object { return &autoscalingv1.Scale{} }

// Destroy does nothing: the storage belongs to the main resource.
func (s *Scale) Destroy() {}

// GroupVersionKind is autoscaling/v1 Scale, whatever the group of the kind.
func (s *Scale) GroupVersionKind(schema.GroupVersion) schema.GroupVersionKind { return scaleGVK }

// Get reads the object and shows its scale.
func (s *Scale) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	obj, err := s.main.Get(ctx, name, options)
	if err != nil {
		return nil, err
	}
	return s.view(obj)
}

// Update sets the replicas of the object to those of the written Scale, by a
// compare-and-set of the whole object: the kind's validation runs.
func (s *Scale) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc, update rest.ValidateObjectUpdateFunc, _ bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	edit := &scaleEdit{scale: s, info: info}
	obj, _, err := s.main.Update(ctx, name, edit,
		s.viewed(create), s.viewedUpdate(update), false, options)
	if err != nil {
		return nil, false, err
	}
	view, err := s.view(obj)
	return view, false, err
}

// ConvertToTable shows name and replicas as the default table does.
func (s *Scale) ConvertToTable(ctx context.Context, obj, options runtime.Object) (*metav1.Table, error) {
	return rest.NewDefaultTableConvertor(schema.GroupResource{Group: scaleGVK.Group, Resource: "scales"}).ConvertToTable(ctx, obj, options)
}

func (s *Scale) view(obj runtime.Object) (*autoscalingv1.Scale, error) {
	object, err := meta.Accessor(obj)
	if err != nil {
		return nil, fmt.Errorf("scale of a %s: %w", s.main.kind.Singular, err)
	}
	selector, err := s.main.kind.Scale.Selector(obj)
	if err != nil {
		return nil, errors.NewInternalError(fmt.Errorf("selector of %s %s: %w", s.main.kind.Singular, object.GetName(), err))
	}
	entries, err := s.managedFields(object).ToSubresource()
	if err != nil {
		return nil, errors.NewInternalError(fmt.Errorf("owned fields of %s %s: %w", s.main.kind.Singular, object.GetName(), err))
	}
	return &autoscalingv1.Scale{
		ObjectMeta: metav1.ObjectMeta{
			Name:              object.GetName(),
			Namespace:         object.GetNamespace(),
			UID:               object.GetUID(),
			ResourceVersion:   object.GetResourceVersion(),
			CreationTimestamp: object.GetCreationTimestamp(),
			ManagedFields:     entries,
		},
		Spec:   autoscalingv1.ScaleSpec{Replicas: s.main.kind.Scale.SpecReplicas(obj)},
		Status: autoscalingv1.ScaleStatus{Replicas: s.main.kind.Scale.StatusReplicas(obj), Selector: selector},
	}, nil
}

// viewed shows admission the Scale instead of the object.
func (s *Scale) viewed(validate rest.ValidateObjectFunc) rest.ValidateObjectFunc {
	return func(ctx context.Context, obj runtime.Object) error {
		view, err := s.view(obj)
		if err != nil {
			return err
		}
		return validate(ctx, view)
	}
}

func (s *Scale) viewedUpdate(validate rest.ValidateObjectUpdateFunc) rest.ValidateObjectUpdateFunc {
	return func(ctx context.Context, obj, old runtime.Object) error {
		newView, err := s.view(obj)
		if err != nil {
			return err
		}
		oldView, err := s.view(old)
		if err != nil {
			return err
		}
		return validate(ctx, newView, oldView)
	}
}

// scaleEdit is the update of an object that a written Scale asks for.
type scaleEdit struct {
	scale *Scale
	info  rest.UpdatedObjectInfo
}

func (e *scaleEdit) Preconditions() *metav1.Preconditions { return e.info.Preconditions() }

func (e *scaleEdit) UpdatedObject(ctx context.Context, old runtime.Object) (runtime.Object, error) {
	kind := e.scale.main.kind
	obj := old.DeepCopyObject()
	object, err := meta.Accessor(obj)
	if err != nil {
		return nil, fmt.Errorf("scale a %s: %w", kind.Singular, err)
	}
	before, err := e.scale.view(obj)
	if err != nil {
		return nil, err
	}
	owned := e.scale.managedFields(object)
	written, err := e.info.UpdatedObject(ctx, before)
	if err != nil {
		return nil, err
	}
	scale, ok := written.(*autoscalingv1.Scale)
	if !ok {
		return nil, errors.NewBadRequest(fmt.Sprintf("expected an autoscaling/v1 Scale, got %T", written))
	}
	if faults := validateScale(scale); len(faults) > 0 {
		return nil, errors.NewInvalid(scaleGVK.GroupKind(), object.GetName(), faults)
	}
	if scale.UID != object.GetUID() && scale.UID != "" {
		return nil, errors.NewConflict(e.scale.main.DefaultQualifiedResource, object.GetName(), fmt.Errorf("the UID in the precondition (%s) does not match the UID in record (%s). The object might have been deleted and then recreated", scale.UID, object.GetUID()))
	}
	if scale.ResourceVersion != "" {
		// The client says which version it has seen: the store compares.
		object.SetResourceVersion(scale.ResourceVersion)
	}
	kind.Scale.SetSpecReplicas(obj, scale.Spec.Replicas)
	entries, err := owned.ToParent(scale.ManagedFields)
	if err != nil {
		return nil, errors.NewInternalError(err)
	}
	object.SetManagedFields(entries)
	return obj, nil
}

func validateScale(scale *autoscalingv1.Scale) field.ErrorList {
	if scale.Spec.Replicas >= 0 {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("spec", "replicas"), scale.Spec.Replicas, "must be greater than or equal to 0")}
}

// managedFields translates who owns spec.replicas between the object and its
// Scale.
func (s *Scale) managedFields(object metav1.Object) *managedfields.ScaleHandler {
	version := s.main.kind.GVK.GroupVersion()
	return managedfields.NewScaleHandler(object.GetManagedFields(), version, managedfields.ResourcePathMappings{
		version.String(): fieldpath.MakePathOrDie("spec", "replicas"),
	})
}
