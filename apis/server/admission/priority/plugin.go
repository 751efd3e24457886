// Package priority turns the priority class a pod or a PodGroup names into its priority. The
// two classes every cluster has are built in; a pod that names none gets the
// class that is marked as the global default, or priority 0.
package priority

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
)

// builtIn are the classes that need no object.
var builtIn = map[string]int32{
	"system-cluster-critical": 2_000_000_000,
	"system-node-critical":    2_000_001_000,
}

// Classes finds priority classes. They may be a moment old.
type Classes interface {
	// PriorityClass fails with a NotFound StatusError if there is none.
	PriorityClass(ctx context.Context, name string) (*schedulingv1.PriorityClass, error)
	// PriorityClasses lists all.
	PriorityClasses(ctx context.Context) ([]schedulingv1.PriorityClass, error)
}

type plugin struct {
	*admission.Handler
	classes Classes
}

var _ admission.MutationInterface = &plugin{}

// New makes the plugin.
func New(classes Classes) admission.Interface {
	return &plugin{Handler: admission.NewHandler(admission.Create), classes: classes}
}

// Admit sets the priority and preemption policy of a pod or a PodGroup. It may
// repeat what its class gives it, and may not contradict it.
func (p *plugin) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetSubresource() != "" {
		return nil
	}
	switch a.GetResource().GroupResource() {
	case corev1.Resource("pods"):
		pod, ok := a.GetObject().(*corev1.Pod)
		if !ok {
			return errors.NewBadRequest(fmt.Sprintf("expected a Pod, got %T", a.GetObject()))
		}
		class, err := p.resolve(ctx, a, "pod "+pod.Name, pod.Spec.PriorityClassName, pod.Spec.Priority, "pod spec")
		if err != nil {
			return err
		}
		pod.Spec.PriorityClassName, pod.Spec.Priority = class.Name, &class.Value
		if pod.Spec.PreemptionPolicy == nil {
			pod.Spec.PreemptionPolicy = class.PreemptionPolicy
		}
	case schedulingv1beta1.Resource("podgroups"):
		group, ok := a.GetObject().(*schedulingv1beta1.PodGroup)
		if !ok {
			return errors.NewBadRequest(fmt.Sprintf("expected a PodGroup, got %T", a.GetObject()))
		}
		class, err := p.resolve(ctx, a, "pod group "+group.Name, group.Spec.PriorityClassName, group.Spec.Priority, "pod group spec")
		if err != nil {
			return err
		}
		group.Spec.PriorityClassName, group.Spec.Priority = class.Name, &class.Value
		if group.Spec.PreemptionPolicy == nil {
			policy := schedulingv1beta1.PreemptionPolicy(*class.PreemptionPolicy)
			group.Spec.PreemptionPolicy = &policy
		}
	}
	return nil
}

// resolve finds the class of what is called who; given is the priority that it
// came with, in the part that where names.
func (p *plugin) resolve(ctx context.Context, a admission.Attributes, who, name string, given *int32, where string) (schedulingv1.PriorityClass, error) {
	class, err := p.class(ctx, name)
	if errors.IsNotFound(err) {
		return class, admission.NewForbidden(a, fmt.Errorf("no PriorityClass with name %s was found", name))
	}
	if err != nil {
		return class, errors.NewInternalError(fmt.Errorf("find the priority of %s: %w", who, err))
	}
	if given != nil && *given != class.Value {
		return class, admission.NewForbidden(a, fmt.Errorf("the integer value of priority (%d) must not be provided in %s; priority admission controller computed %d from the given PriorityClass name", *given, where, class.Value))
	}
	return class, nil
}

// class is the class called name, or the one that stands for no name.
func (p *plugin) class(ctx context.Context, name string) (schedulingv1.PriorityClass, error) {
	class := schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if value, ok := builtIn[name]; ok {
		class.Value = value
	} else if name != "" {
		found, err := p.classes.PriorityClass(ctx, name)
		if err != nil {
			return class, err
		}
		class = *found
	} else {
		all, err := p.classes.PriorityClasses(ctx)
		if err != nil {
			return class, err
		}
		for i := range all {
			// Two defaults cannot be made at once but for a race: the lower
			// one then counts, so that no pod gains by it.
			if all[i].GlobalDefault && (class.Name == "" || all[i].Value < class.Value) {
				class = all[i]
			}
		}
	}
	if class.PreemptionPolicy == nil {
		policy := corev1.PreemptLowerPriority
		class.PreemptionPolicy = &policy
	}
	return class, nil
}
