// Package newnodes implements TaintNodesByCondition: a new node gets the taint
// node.kubernetes.io/not-ready, so that it gets no pods before it is ready.
package newnodes

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"
)

type plugin struct{ *admission.Handler }

var _ admission.MutationInterface = plugin{}

// New makes the plugin.
func New() admission.Interface { return plugin{admission.NewHandler(admission.Create)} }

// Admit adds the taint, which the loop nodelifecycle takes off.
func (plugin) Admit(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != corev1.Resource("nodes") || a.GetSubresource() != "" {
		return nil
	}
	node, ok := a.GetObject().(*corev1.Node)
	if !ok {
		return apierrors.NewBadRequest(fmt.Sprintf("expected a Node, got %T", a.GetObject()))
	}
	unready := corev1.Taint{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoSchedule}
	for i := range node.Spec.Taints {
		if node.Spec.Taints[i].MatchTaint(&unready) {
			return nil
		}
	}
	node.Spec.Taints = append(node.Spec.Taints, unready)
	return nil
}
