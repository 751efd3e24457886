// Package podgroups judges and completes new PodGroups: those made from a
// template of a Workload need that template, and all have the finalizer that
// keeps them while pods name them. A loop of the leader takes it off.
package podgroups

import (
	"context"
	"fmt"
	"slices"

	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"
)

// Finalizer is the one of PodGroups, by the name that kubectl describe shows.
const Finalizer = "scheduling.k8s.io/podgroup-protection"

// Workloads finds Workloads. They may be a moment old.
type Workloads interface {
	// Workload fails with a NotFound StatusError if there is none.
	Workload(ctx context.Context, namespace, name string) (*schedulingv1beta1.Workload, error)
}

type protection struct{ *admission.Handler }

var _ admission.MutationInterface = &protection{}

// NewProtection makes the plugin that adds the finalizer.
func NewProtection() admission.Interface {
	return &protection{admission.NewHandler(admission.Create)}
}

// Admit adds the finalizer.
func (*protection) Admit(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	group, err := groupOf(a)
	if group == nil || err != nil {
		return err
	}
	if !slices.Contains(group.Finalizers, Finalizer) {
		group.Finalizers = append(group.Finalizers, Finalizer)
	}
	return nil
}

type workloadExists struct {
	*admission.Handler
	workloads Workloads
}

var _ admission.ValidationInterface = &workloadExists{}

// NewWorkloadExists makes the plugin that looks for the template.
func NewWorkloadExists(workloads Workloads) admission.Interface {
	return &workloadExists{admission.NewHandler(admission.Create), workloads}
}

// Validate refuses a PodGroup whose Workload, or whose template in it, is not there.
func (p *workloadExists) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	group, err := groupOf(a)
	if group == nil || err != nil || group.Spec.WorkloadRef == nil {
		return err
	}
	ref := group.Spec.WorkloadRef
	workload, err := p.workloads.Workload(ctx, a.GetNamespace(), ref.WorkloadName)
	if errors.IsNotFound(err) {
		return admission.NewForbidden(a, fmt.Errorf("spec.workloadRef.workloadName: there is no Workload %q in namespace %q: create it first", ref.WorkloadName, a.GetNamespace()))
	}
	if err != nil {
		return errors.NewInternalError(fmt.Errorf("find the workload of pod group %s: %w", group.Name, err))
	}
	if !slices.ContainsFunc(workload.Spec.PodGroupTemplates, func(t schedulingv1beta1.PodGroupTemplate) bool { return t.Name == ref.TemplateName }) {
		return admission.NewForbidden(a, fmt.Errorf("spec.workloadRef.templateName: Workload %q has no podGroupTemplate %q", ref.WorkloadName, ref.TemplateName))
	}
	return nil
}

// groupOf is the PodGroup that is written; nil: something else is.
func groupOf(a admission.Attributes) (*schedulingv1beta1.PodGroup, error) {
	if a.GetResource().GroupResource() != schedulingv1beta1.Resource("podgroups") || a.GetSubresource() != "" {
		return nil, nil
	}
	group, ok := a.GetObject().(*schedulingv1beta1.PodGroup)
	if !ok {
		return nil, errors.NewBadRequest(fmt.Sprintf("expected a PodGroup, got %T", a.GetObject()))
	}
	return group, nil
}
