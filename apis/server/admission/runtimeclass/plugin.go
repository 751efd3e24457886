// Package runtimeclass gives a pod what the runtime class it names says of
// every pod of it: what it costs beside its containers, and on which nodes it
// can run (KEP-585, KEP-688). A pod that names no class has no such cost.
package runtimeclass

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"
)

// Classes finds runtime classes. They may be a moment old.
type Classes interface {
	// RuntimeClass fails with a NotFound StatusError if there is none.
	RuntimeClass(ctx context.Context, name string) (*nodev1.RuntimeClass, error)
}

type plugin struct {
	*admission.Handler
	classes Classes
}

var (
	_ admission.MutationInterface   = &plugin{}
	_ admission.ValidationInterface = &plugin{}
)

// New makes the plugin.
func New(classes Classes) admission.Interface {
	return &plugin{Handler: admission.NewHandler(admission.Create), classes: classes}
}

// Admit completes the pod from its class and refuses one whose class is
// missing or that contradicts it.
func (p *plugin) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	return p.withClass(ctx, a, func(pod *corev1.Pod, class *nodev1.RuntimeClass) error {
		if class == nil {
			return nil
		}
		if own := overhead(class); pod.Spec.Overhead == nil && own != nil {
			pod.Spec.Overhead = own.DeepCopy()
		}
		return schedule(&pod.Spec, class.Scheduling)
	})
}

// Validate looks once more at what came out of all plugins.
func (p *plugin) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	return p.withClass(ctx, a, func(pod *corev1.Pod, class *nodev1.RuntimeClass) error {
		own := overhead(class)
		switch {
		case own == nil && pod.Spec.Overhead != nil:
			return errors.New("spec.overhead is set and the pod's RuntimeClass defines none: leave it out, it is set by the class that spec.runtimeClassName names")
		case !equality.Semantic.DeepEqual(own, pod.Spec.Overhead):
			return fmt.Errorf("spec.overhead does not match the one that RuntimeClass %q defines: leave it out, it is set by the class", class.Name)
		}
		return nil
	})
}

// withClass calls judge with a pod that is created and its class, nil if it
// names none, and makes what judge says a refusal.
func (p *plugin) withClass(ctx context.Context, a admission.Attributes, judge func(*corev1.Pod, *nodev1.RuntimeClass) error) error {
	if a.GetResource().GroupResource() != corev1.Resource("pods") || a.GetSubresource() != "" {
		return nil
	}
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok {
		return apierrors.NewBadRequest(fmt.Sprintf("expected a Pod, got %T", a.GetObject()))
	}
	var class *nodev1.RuntimeClass
	if name := pod.Spec.RuntimeClassName; name != nil {
		found, err := p.classes.RuntimeClass(ctx, *name)
		if apierrors.IsNotFound(err) {
			return admission.NewForbidden(a, fmt.Errorf("pod rejected: RuntimeClass %q not found", *name))
		}
		if err != nil {
			return apierrors.NewInternalError(fmt.Errorf("find the runtime class of pod %s: %w", pod.Name, err))
		}
		class = found
	}
	if err := judge(pod, class); err != nil {
		return admission.NewForbidden(a, fmt.Errorf("pod rejected: %w", err))
	}
	return nil
}

// overhead is what the class costs, nil: it does not say.
func overhead(class *nodev1.RuntimeClass) corev1.ResourceList {
	if class == nil || class.Overhead == nil {
		return nil
	}
	return class.Overhead.PodFixed
}

// schedule narrows the pod to nodes that the class can be had on, and lets it
// onto them.
func schedule(spec *corev1.PodSpec, s *nodev1.Scheduling) error {
	if s == nil {
		return nil
	}
	for _, key := range slices.Sorted(maps.Keys(s.NodeSelector)) {
		if own, ok := spec.NodeSelector[key]; ok && own != s.NodeSelector[key] {
			return fmt.Errorf("conflict: runtimeClass.scheduling.nodeSelector[%s] = %s; pod.spec.nodeSelector[%s] = %s",
				key, s.NodeSelector[key], key, own)
		}
	}
	if spec.NodeSelector == nil && len(s.NodeSelector) > 0 {
		spec.NodeSelector = map[string]string{}
	}
	maps.Copy(spec.NodeSelector, s.NodeSelector)
	for _, t := range s.Tolerations {
		if !slices.ContainsFunc(spec.Tolerations, func(own corev1.Toleration) bool { return equality.Semantic.DeepEqual(own, t) }) {
			spec.Tolerations = append(spec.Tolerations, t)
		}
	}
	return nil
}
