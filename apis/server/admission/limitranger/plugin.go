// Package limitranger implements LimitRanger: it applies the defaults of the namespace's
// LimitRanges to pods and claims, and refuses what is out of their bounds.
package limitranger

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apiserver/pkg/admission"
	resourcehelper "k8s.io/component-helpers/resource"
)

// Objects is what the plugin looks up.
type Objects interface {
	// LimitRanges lists those of a namespace.
	LimitRanges(ctx context.Context, namespace string) ([]corev1.LimitRange, error)
}

type plugin struct {
	*admission.Handler
	objects Objects
}

var (
	_ admission.MutationInterface   = &plugin{}
	_ admission.ValidationInterface = &plugin{}
)

// New makes the plugin.
func New(objects Objects) admission.Interface {
	return &plugin{Handler: admission.NewHandler(admission.Create, admission.Update), objects: objects}
}

// Admit fills in the defaults of new pods' containers.
func (p *plugin) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok || a.GetOperation() != admission.Create || a.GetSubresource() != "" || a.GetResource().GroupResource() != corev1.Resource("pods") {
		return nil
	}
	limits, err := p.objects.LimitRanges(ctx, a.GetNamespace())
	if err != nil {
		return admission.NewForbidden(a, fmt.Errorf("look up the limit ranges of namespace %s: %w", a.GetNamespace(), err))
	}
	var set []string
	for _, limit := range limits {
		set = append(set, Complete(pod, &limit)...)
	}
	if len(set) > 0 {
		if pod.Annotations == nil {
			pod.Annotations = map[string]string{}
		}
		pod.Annotations[annotation] = "LimitRanger plugin set: " + strings.Join(set, "; ")
	}
	return nil
}

// Validate refuses what is out of bounds.
func (p *plugin) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if old, ok := a.GetOldObject().(metav1.Object); ok && a.GetOperation() == admission.Update && old.GetDeletionTimestamp() != nil {
		return nil // it goes: a limit that came later must not keep its finalizers
	}
	var faults func(*corev1.LimitRange) []error
	switch obj := a.GetObject().(type) {
	case *corev1.Pod:
		// Only new pods and resized ones have resources to judge.
		if a.GetSubresource() != "resize" && (a.GetSubresource() != "" || a.GetOperation() == admission.Update) {
			return nil
		}
		faults = func(l *corev1.LimitRange) []error { return PodFaults(obj, l) }
	case *corev1.PersistentVolumeClaim:
		if a.GetSubresource() != "" {
			return nil
		}
		faults = func(l *corev1.LimitRange) []error { return ClaimFaults(obj, l) }
	default:
		return nil
	}
	limits, err := p.objects.LimitRanges(ctx, a.GetNamespace())
	if err != nil {
		return admission.NewForbidden(a, fmt.Errorf("look up the limit ranges of namespace %s: %w", a.GetNamespace(), err))
	}
	for _, limit := range limits {
		if all := faults(&limit); len(all) > 0 {
			return admission.NewForbidden(a, errors.NewAggregate(all))
		}
	}
	return nil
}

// annotation says of a pod what its author left out and it has by a LimitRange.
const annotation = "kubernetes.io/limit-ranger"

// Complete gives the containers of pod what they leave out and limit has a
// default for, and says what that was: "cpu, memory request for container c".
func Complete(pod *corev1.Pod, limit *corev1.LimitRange) []string {
	var set []string
	for _, item := range limit.Spec.Limits {
		if item.Type != corev1.LimitTypeContainer {
			continue
		}
		for _, of := range []struct {
			kind       string
			containers []corev1.Container
		}{{"container", pod.Spec.Containers}, {"init container", pod.Spec.InitContainers}} {
			for i := range of.containers {
				r := &of.containers[i].Resources
				tell := func(what string, names []string) {
					if len(names) > 0 {
						set = append(set, fmt.Sprintf("%s %s for %s %s", strings.Join(names, ", "), what, of.kind, of.containers[i].Name))
					}
				}
				// A request that is left out is the limit, if that was given.
				requests := corev1.ResourceList{}
				maps.Copy(requests, item.DefaultRequest)
				maps.Copy(requests, r.Limits)
				tell("request", fill(&r.Requests, requests, item.DefaultRequest))
				tell("limit", fill(&r.Limits, item.Default, item.Default))
			}
		}
	}
	return set
}

// fill sets in list what it lacks of values, and returns the names of that in
// order; only names in which count.
func fill(list *corev1.ResourceList, values, names corev1.ResourceList) []string {
	var set []string
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if _, ok := (*list)[name]; ok {
			continue
		}
		if *list == nil {
			*list = corev1.ResourceList{}
		}
		(*list)[name] = values[name].DeepCopy()
		set = append(set, string(name))
	}
	return set
}

// PodFaults is what limit has against pod.
func PodFaults(pod *corev1.Pod, limit *corev1.LimitRange) []error {
	var faults []error
	for _, item := range limit.Spec.Limits {
		switch item.Type {
		case corev1.LimitTypeContainer:
			for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
				faults = append(faults, bounds(item, c.Resources.Requests, c.Resources.Limits)...)
			}
		case corev1.LimitTypePod:
			faults = append(faults, bounds(item,
				resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{ExcludeOverhead: true}),
				resourcehelper.PodLimits(pod, resourcehelper.PodResourcesOptions{ExcludeOverhead: true}))...)
		}
	}
	return faults
}

// ClaimFaults is what limit has against claim.
func ClaimFaults(claim *corev1.PersistentVolumeClaim, limit *corev1.LimitRange) []error {
	var faults []error
	for _, item := range limit.Spec.Limits {
		if item.Type == corev1.LimitTypePersistentVolumeClaim {
			faults = append(faults, claimBounds(item, claim.Spec.Resources.Requests)...)
		}
	}
	return faults
}

// bounds compares what is requested and limited with an item, resource by
// resource.
func bounds(item corev1.LimitRangeItem, requests, limits corev1.ResourceList) []error {
	var faults []error
	for _, name := range slices.Sorted(maps.Keys(item.Min)) {
		min := item.Min[name]
		request, requested := requests[name]
		limit, limited := limits[name]
		switch {
		case !requested:
			faults = append(faults, fmt.Errorf("minimum %s usage per %s is %s.  No request is specified", name, item.Type, min.String()))
		case request.Cmp(min) < 0:
			faults = append(faults, fmt.Errorf("minimum %s usage per %s is %s, but request is %s", name, item.Type, min.String(), request.String()))
		}
		if limited && limit.Cmp(min) < 0 {
			faults = append(faults, fmt.Errorf("minimum %s usage per %s is %s, but limit is %s", name, item.Type, min.String(), limit.String()))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(item.Max)) {
		max := item.Max[name]
		request, requested := requests[name]
		limit, limited := limits[name]
		switch {
		case !limited:
			faults = append(faults, fmt.Errorf("maximum %s usage per %s is %s.  No limit is specified", name, item.Type, max.String()))
		case limit.Cmp(max) > 0:
			faults = append(faults, fmt.Errorf("maximum %s usage per %s is %s, but limit is %s", name, item.Type, max.String(), limit.String()))
		}
		if requested && request.Cmp(max) > 0 {
			faults = append(faults, fmt.Errorf("maximum %s usage per %s is %s, but request is %s", name, item.Type, max.String(), request.String()))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(item.MaxLimitRequestRatio)) {
		ratio := item.MaxLimitRequestRatio[name]
		request, requested := requests[name]
		limit, limited := limits[name]
		switch {
		case !requested || request.IsZero():
			faults = append(faults, fmt.Errorf("%s max limit to request ratio per %s is %s, but no request is specified or request is 0", name, item.Type, ratio.String()))
		case !limited || limit.IsZero():
			faults = append(faults, fmt.Errorf("%s max limit to request ratio per %s is %s, but no limit is specified or limit is 0", name, item.Type, ratio.String()))
		case limit.AsApproximateFloat64() > ratio.AsApproximateFloat64()*request.AsApproximateFloat64():
			faults = append(faults, fmt.Errorf("%s max limit to request ratio per %s is %s, but provided ratio is %f", name, item.Type, ratio.String(), limit.AsApproximateFloat64()/request.AsApproximateFloat64()))
		}
	}
	return faults
}

// claimBounds: a claim has a request alone.
func claimBounds(item corev1.LimitRangeItem, requests corev1.ResourceList) []error {
	var faults []error
	for _, name := range slices.Sorted(maps.Keys(item.Min)) {
		min, request := item.Min[name], requests[name]
		if request.Cmp(min) < 0 {
			faults = append(faults, fmt.Errorf("minimum %s usage per %s is %s, but request is %s", name, item.Type, min.String(), request.String()))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(item.Max)) {
		max, request := item.Max[name], requests[name]
		if request.Cmp(max) > 0 {
			faults = append(faults, fmt.Errorf("maximum %s usage per %s is %s, but request is %s", name, item.Type, max.String(), request.String()))
		}
	}
	return faults
}
