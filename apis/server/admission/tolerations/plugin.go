// Package tolerations implements DefaultTolerationSeconds: it bounds how long a pod stays
// on a node that is not ready or unreachable, unless the pod sets its own tolerations.
package tolerations

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"
)

// DefaultSeconds is the bound when none is configured.
const DefaultSeconds int64 = 300

type plugin struct {
	*admission.Handler
	seconds int64
}

var _ admission.MutationInterface = &plugin{}

// New makes the plugin; seconds is the bound it sets.
func New(seconds int64) admission.Interface {
	return &plugin{Handler: admission.NewHandler(admission.Create, admission.Update), seconds: seconds}
}

// Admit adds the tolerations that the pod lacks.
func (p *plugin) Admit(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != corev1.Resource("pods") || a.GetSubresource() != "" {
		return nil
	}
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok {
		return errors.NewBadRequest(fmt.Sprintf("expected a Pod, got %T", a.GetObject()))
	}
	for _, key := range []string{corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable} {
		if !tolerates(pod, key) {
			pod.Spec.Tolerations = append(pod.Spec.Tolerations, corev1.Toleration{
				Key:               key,
				Operator:          corev1.TolerationOpExists,
				Effect:            corev1.TaintEffectNoExecute,
				TolerationSeconds: &p.seconds,
			})
		}
	}
	return nil
}

func tolerates(pod *corev1.Pod, key string) bool {
	return slices.ContainsFunc(pod.Spec.Tolerations, func(t corev1.Toleration) bool {
		return (t.Key == key || t.Key == "") && (t.Effect == corev1.TaintEffectNoExecute || t.Effect == "")
	})
}
