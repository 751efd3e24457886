// Package priority turns the priority class a pod or a PodGroup names into its priority. The
// two classes every cluster has are built in; a pod that names none gets the
// class that is marked as the global default, or priority 0. There is one such
// default: a second one is refused.
package priority

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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

var (
	_ admission.MutationInterface   = &plugin{}
	_ admission.ValidationInterface = &plugin{}
)

// New makes the plugin.
func New(classes Classes) admission.Interface {
	return &plugin{Handler: admission.NewHandler(admission.Create, admission.Update), classes: classes}
}

// Admit sets the priority and preemption policy of a new pod or PodGroup, which
// may repeat what its class gives it, and may not contradict it. Later writes of
// a pod that leave them out keep them.
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
		if a.GetOperation() == admission.Update {
			return keep(pod, a.GetOldObject())
		}
		class, err := p.resolve(ctx, a, "pod "+pod.Name, pod.Spec.PriorityClassName, pod.Spec.Priority, "pod spec")
		if err != nil {
			return err
		}
		if given := pod.Spec.PreemptionPolicy; given != nil && *given != *class.PreemptionPolicy {
			return contradicts(a, string(*given), "pod spec", &class)
		}
		pod.Spec.PriorityClassName, pod.Spec.Priority, pod.Spec.PreemptionPolicy = class.Name, &class.Value, class.PreemptionPolicy
	case schedulingv1beta1.Resource("podgroups"):
		if a.GetOperation() == admission.Update {
			return nil
		}
		group, ok := a.GetObject().(*schedulingv1beta1.PodGroup)
		if !ok {
			return errors.NewBadRequest(fmt.Sprintf("expected a PodGroup, got %T", a.GetObject()))
		}
		class, err := p.resolve(ctx, a, "pod group "+group.Name, group.Spec.PriorityClassName, group.Spec.Priority, "pod group spec")
		if err != nil {
			return err
		}
		policy := schedulingv1beta1.PreemptionPolicy(*class.PreemptionPolicy)
		if given := group.Spec.PreemptionPolicy; given != nil && *given != policy {
			return contradicts(a, string(*given), "pod group spec", &class)
		}
		group.Spec.PriorityClassName, group.Spec.Priority, group.Spec.PreemptionPolicy = class.Name, &class.Value, &policy
	}
	return nil
}

// Validate refuses a second class for pods that name none.
func (p *plugin) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetSubresource() != "" || a.GetResource().GroupResource() != schedulingv1.Resource("priorityclasses") {
		return nil
	}
	class, ok := a.GetObject().(*schedulingv1.PriorityClass)
	if !ok {
		return errors.NewBadRequest(fmt.Sprintf("expected a PriorityClass, got %T", a.GetObject()))
	}
	if !class.GlobalDefault {
		return nil
	}
	all, err := p.classes.PriorityClasses(ctx)
	if err != nil {
		return errors.NewInternalError(fmt.Errorf("look for another default beside PriorityClass %s: %w", class.Name, err))
	}
	for _, other := range all {
		if other.GlobalDefault && (other.Name != class.Name || a.GetOperation() == admission.Create) {
			return admission.NewForbidden(a, fmt.Errorf("PriorityClass %s is already marked as default. Only one default can exist", other.Name))
		}
	}
	return nil
}

// keep gives pod what it leaves out of what old got when it was made.
func keep(pod *corev1.Pod, old runtime.Object) error {
	was, ok := old.(*corev1.Pod)
	if !ok {
		return errors.NewBadRequest(fmt.Sprintf("expected a Pod, got %T", old))
	}
	if pod.Spec.Priority == nil {
		pod.Spec.Priority = was.Spec.Priority
	}
	if pod.Spec.PreemptionPolicy == nil {
		pod.Spec.PreemptionPolicy = was.Spec.PreemptionPolicy
	}
	return nil
}

// contradicts refuses a preemption policy, given in the part that where names,
// that is not its class's.
func contradicts(a admission.Attributes, given, where string, class *schedulingv1.PriorityClass) error {
	return admission.NewForbidden(a, fmt.Errorf("the string value of PreemptionPolicy (%s) must not be provided in %s; priority admission controller computed %s from the given PriorityClass name", given, where, *class.PreemptionPolicy))
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
			// Two that are written at the same moment can both be taken: the
			// lower one then counts, so that no pod gains by it.
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
