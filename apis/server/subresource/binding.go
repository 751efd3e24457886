package subresource

import (
	"context"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	storeerr "k8s.io/apiserver/pkg/storage/errors"
	"k8s.io/apiserver/pkg/util/dryrun"

	"github.com/clusterd/clusterd/apis/core"
)

var podsResource = corev1.Resource("pods")

// Binding serves pods/binding: it gives a pod that has no node its node, once.
type Binding struct{ pods *registry.Store }

var (
	_ rest.NamedCreater                   = &Binding{}
	_ rest.SubresourceObjectMetaPreserver = &Binding{}
)

// NewBinding binds pods of the given store.
func NewBinding(pods *registry.Store) *Binding { return &Binding{pods: pods} }

// New returns an empty Binding.
func (b *Binding) New() runtime.Object { return &corev1.Binding{} }

// Destroy does nothing: the storage belongs to the pods.
func (b *Binding) Destroy() {}

// NamespaceScoped is true: a binding lives where its pod does.
func (b *Binding) NamespaceScoped() bool { return true }

// PreserveRequestObjectMetaSystemFieldsOnSubresourceCreate keeps the uid that
// the scheduler saw: it is the precondition.
func (b *Binding) PreserveRequestObjectMetaSystemFieldsOnSubresourceCreate() bool { return true }

// Create binds the pod called name to the target of obj, a Binding. It fails
// with a conflict if the pod has a node, is being deleted, or is not the pod
// whose uid the binding carries.
func (b *Binding) Create(ctx context.Context, name string, obj runtime.Object, validate rest.ValidateObjectFunc, options *metav1.CreateOptions) (runtime.Object, error) {
	binding, ok := obj.(*corev1.Binding)
	if !ok {
		return nil, errors.NewBadRequest(fmt.Sprintf("expected a Binding, got %T", obj))
	}
	if name != binding.Name {
		return nil, errors.NewBadRequest("name in URL does not match name in Binding object")
	}
	if faults := validateBinding(binding); len(faults) > 0 {
		return nil, errors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Binding").GroupKind(), name, faults)
	}
	if validate != nil {
		if err := validate(ctx, binding.DeepCopy()); err != nil {
			return nil, err
		}
	}
	if err := b.assign(ctx, binding, dryrun.IsDryRun(options.DryRun)); err != nil {
		return nil, err
	}
	return &metav1.Status{Status: metav1.StatusSuccess}, nil
}

func validateBinding(binding *corev1.Binding) field.ErrorList {
	var faults field.ErrorList
	target := field.NewPath("target")
	if kind := binding.Target.Kind; kind != "" && kind != "Node" {
		faults = append(faults, field.NotSupported(target.Child("kind"), kind, []string{"Node", "<empty>"}))
	}
	if binding.Target.Name == "" {
		faults = append(faults, field.Required(target.Child("name"), ""))
	}
	// Both are copied into the pod, whose every write would be refused for them.
	faults = append(faults, metav1validation.ValidateLabels(binding.Labels, field.NewPath("metadata", "labels"))...)
	return append(faults, validation.ValidateAnnotations(binding.Annotations, field.NewPath("metadata", "annotations"))...)
}

func (b *Binding) assign(ctx context.Context, binding *corev1.Binding, dryRun bool) error {
	key, err := b.pods.KeyFunc(ctx, binding.Name)
	if err != nil {
		return err
	}
	var conditions storage.Preconditions
	if uid := binding.UID; uid != "" {
		conditions.UID = &uid
	}
	if version := binding.ResourceVersion; version != "" {
		conditions.ResourceVersion = &version
	}
	err = b.pods.Storage.GuaranteedUpdate(ctx, key, &corev1.Pod{}, false, &conditions,
		storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
			pod, ok := obj.(*corev1.Pod)
			if !ok {
				return nil, fmt.Errorf("bind %s: not a pod but a %T", binding.Name, obj)
			}
			if err := bind(pod, binding); err != nil {
				return nil, errors.NewConflict(corev1.Resource("pods/binding"), pod.Name, err)
			}
			if err := validation.ValidateAnnotationsSize(pod.Annotations); err != nil {
				fault := field.Invalid(field.NewPath("metadata", "annotations"), len(binding.Annotations), "with those that the pod has: "+err.Error())
				return nil, errors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Binding").GroupKind(), pod.Name, field.ErrorList{fault})
			}
			return pod, nil
		}), dryRun, nil)
	return storeerr.InterpretUpdateError(err, podsResource, binding.Name)
}

// bind writes the decision of binding into pod.
func bind(pod *corev1.Pod, binding *corev1.Binding) error {
	if pod.DeletionTimestamp != nil {
		return fmt.Errorf("pod %s is being deleted, cannot be assigned to a host", pod.Name)
	}
	if pod.Spec.NodeName != "" {
		return fmt.Errorf("pod %s is already assigned to node %q", pod.Name, pod.Spec.NodeName)
	}
	if len(pod.Spec.SchedulingGates) > 0 {
		return fmt.Errorf("pod %s has non-empty .spec.schedulingGates", pod.Name)
	}
	pod.Spec.NodeName = binding.Target.Name
	if len(binding.Annotations) > 0 {
		if pod.Annotations == nil {
			pod.Annotations = map[string]string{}
		}
		maps.Copy(pod.Annotations, binding.Annotations)
	}
	if len(binding.Labels) > 0 { // where the node is: see admission
		if pod.Labels == nil {
			pod.Labels = map[string]string{}
		}
		maps.Copy(pod.Labels, binding.Labels)
	}
	core.SetPodCondition(&pod.Status, corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}, time.Now())
	return nil
}

// LegacyBinding serves the collection "bindings", the older way to post the
// same object.
type LegacyBinding struct{ binding *Binding }

var _ rest.Creater = &LegacyBinding{}

// NewLegacyBinding posts to binding.
func NewLegacyBinding(binding *Binding) *LegacyBinding { return &LegacyBinding{binding: binding} }

// New returns an empty Binding.
func (b *LegacyBinding) New() runtime.Object { return b.binding.New() }

// Destroy does nothing: the storage belongs to the pods.
func (b *LegacyBinding) Destroy() {}

// NamespaceScoped is true: a binding lives where its pod does.
func (b *LegacyBinding) NamespaceScoped() bool { return true }

// GetSingularName is the name of the resource in discovery.
func (b *LegacyBinding) GetSingularName() string { return "binding" }

// Create binds the pod that obj names.
func (b *LegacyBinding) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc, options *metav1.CreateOptions) (runtime.Object, error) {
	binding, ok := obj.(*corev1.Binding)
	if !ok {
		return nil, errors.NewBadRequest(fmt.Sprintf("expected a Binding, got %T", obj))
	}
	return b.binding.Create(ctx, binding.Name, obj, validate, options)
}
