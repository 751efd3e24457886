package subresource

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	storeerr "k8s.io/apiserver/pkg/storage/errors"
	"k8s.io/apiserver/pkg/util/dryrun"

	"github.com/clusterd/clusterd/apis/core"
)

// Eviction serves pods/eviction, by which drain takes pods off a node: a
// deletion that says why, and that the pod's disruption budget has to permit.
type Eviction struct {
	pods    *registry.Store
	budgets budgets
}

var (
	_ rest.NamedCreater             = &Eviction{}
	_ rest.GroupVersionKindProvider = &Eviction{}
)

// NewEviction evicts pods of one store within the PodDisruptionBudgets of
// another.
func NewEviction(pods, disruptionBudgets *registry.Store) *Eviction {
	return &Eviction{pods: pods, budgets: budgets{disruptionBudgets}}
}

// New returns an empty Eviction.
func (e *Eviction) New() runtime.Object { return &policyv1.Eviction{} }

// Destroy does nothing: the storage belongs to the pods.
func (e *Eviction) Destroy() {}

// GroupVersionKind is policy/v1 Eviction, though the resource is core.
func (e *Eviction) GroupVersionKind(schema.GroupVersion) schema.GroupVersionKind {
	return policyv1.SchemeGroupVersion.WithKind("Eviction")
}

// Create marks the pod called name as disrupted and deletes it with the
// options that obj, an Eviction, carries.
func (e *Eviction) Create(ctx context.Context, name string, obj runtime.Object, validate rest.ValidateObjectFunc, create *metav1.CreateOptions) (runtime.Object, error) {
	eviction, ok := obj.(*policyv1.Eviction)
	if !ok {
		return nil, errors.NewBadRequest(fmt.Sprintf("expected an Eviction, got %T", obj))
	}
	if name != eviction.Name {
		return nil, errors.NewBadRequest("name in URL does not match name in Eviction object")
	}
	if validate != nil {
		if err := validate(ctx, eviction.DeepCopy()); err != nil {
			return nil, err
		}
	}
	options := eviction.DeleteOptions.DeepCopy()
	if options == nil {
		options = &metav1.DeleteOptions{}
	}
	// A dry run may be asked for by the request or by the options within: it
	// must not delete either way.
	if dryrun.IsDryRun(create.DryRun) {
		options.DryRun = create.DryRun
	}
	pod, err := getPod(ctx, e.pods, name)
	if err != nil {
		return nil, err
	}
	if p := options.Preconditions; p != nil && p.UID != nil && *p.UID != pod.UID {
		return nil, errors.NewConflict(podsResource, name, fmt.Errorf("the UID in the precondition (%s) does not match the UID in record (%s)", *p.UID, pod.UID))
	}
	// What the budget permits is for this pod, not for a later one of its name.
	if options.Preconditions == nil {
		options.Preconditions = &metav1.Preconditions{}
	}
	options.Preconditions.UID = &pod.UID
	asItIs, err := e.budgets.spend(ctx, pod, dryrun.IsDryRun(options.DryRun))
	if err != nil {
		return nil, err
	}
	asItIs = asItIs && options.Preconditions.ResourceVersion == nil
	if asItIs {
		options.Preconditions.ResourceVersion = &pod.ResourceVersion
	}
	if err = e.mark(ctx, name, options); err == nil {
		_, _, err = e.pods.Delete(ctx, name, rest.ValidateAllObjectFunc, options)
	}
	if asItIs && errors.IsConflict(err) {
		// Who evicts named no version, and knows how to go on after this answer.
		return nil, errors.NewTooManyRequests(fmt.Sprintf("pod %q changed while it was looked at whether its eviction costs its disruption budget something; try again", name), 1)
	}
	if err != nil {
		return nil, err
	}
	return &metav1.Status{Status: metav1.StatusSuccess}, nil
}

// mark writes the reason of the coming deletion into the pod, where it shows
// while the pod ends. A finished pod needs no reason.
func (e *Eviction) mark(ctx context.Context, name string, options *metav1.DeleteOptions) error {
	key, err := e.pods.KeyFunc(ctx, name)
	if err != nil {
		return err
	}
	var conditions storage.Preconditions
	if p := options.Preconditions; p != nil {
		conditions.UID, conditions.ResourceVersion = p.UID, p.ResourceVersion
	}
	out := &corev1.Pod{}
	err = e.pods.Storage.GuaranteedUpdate(ctx, key, out, false, &conditions,
		storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
			pod, ok := obj.(*corev1.Pod)
			if !ok {
				return nil, fmt.Errorf("evict %s: not a pod but a %T", name, obj)
			}
			if core.Finished(pod) || pod.DeletionTimestamp != nil {
				return pod, nil
			}
			core.SetPodCondition(&pod.Status, corev1.PodCondition{
				Type:    corev1.DisruptionTarget,
				Status:  corev1.ConditionTrue,
				Reason:  "EvictionByEvictionAPI",
				Message: "Eviction API: evicting",
			}, time.Now())
			return pod, nil
		}), dryrun.IsDryRun(options.DryRun), nil)
	if err != nil {
		return storeerr.InterpretUpdateError(err, podsResource, name)
	}
	if p := options.Preconditions; p != nil && p.ResourceVersion != nil {
		// Our own write moved the version the client saw.
		p.ResourceVersion = &out.ResourceVersion
	}
	return nil
}
