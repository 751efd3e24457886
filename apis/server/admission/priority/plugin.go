// Package priority turns the priority class a pod names into its priority. The
// two classes every cluster has are built in; a pod that names none gets the
// class that is marked as the global default, or priority 0.
package priority

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
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

// Admit sets the pod's priority and preemption policy. A pod may repeat what
// its class gives it, and may not contradict it.
func (p *plugin) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != corev1.Resource("pods") || a.GetSubresource() != "" {
		return nil
	}
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok {
		return errors.NewBadRequest(fmt.Sprintf("expected a Pod, got %T", a.GetObject()))
	}
	class, err := p.class(ctx, pod.Spec.PriorityClassName)
	if errors.IsNotFound(err) {
		return admission.NewForbidden(a, fmt.Errorf("no PriorityClass with name %s was found", pod.Spec.PriorityClassName))
	}
	if err != nil {
		return errors.NewInternalError(fmt.Errorf("find the priority of pod %s: %w", pod.Name, err))
	}
	value := class.Value
	if pod.Spec.Priority != nil && *pod.Spec.Priority != value {
		return admission.NewForbidden(a, fmt.Errorf("the integer value of priority (%d) must not be provided in pod spec; priority admission controller computed %d from the given PriorityClass name", *pod.Spec.Priority, value))
	}
	pod.Spec.PriorityClassName = class.Name
	pod.Spec.Priority = &value
	if pod.Spec.PreemptionPolicy == nil {
		pod.Spec.PreemptionPolicy = class.PreemptionPolicy
	}
	return nil
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
