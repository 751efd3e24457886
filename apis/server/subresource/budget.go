package subresource

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/storage"
	storeerr "k8s.io/apiserver/pkg/storage/errors"

	"github.com/clusterd/clusterd/apis/core"
)

// maxDisrupted is how many pods a budget may remember as on their way out. It
// keeps the object small when the controller that clears the list is behind.
const maxDisrupted = 2000

var budgetsResource = policyv1.Resource("poddisruptionbudgets")

// budgets are the PodDisruptionBudgets. How many disruptions one allows is
// computed by a controller and stands in its status; here it is spent.
type budgets struct{ store *registry.Store }

// spend takes one disruption from the budget of pod, or says why not. A pod
// without a budget, or that is not running or already going, costs nothing. asItIs
// says that it costs nothing because it does not serve: if it has begun to when it is
// deleted, that may be one more than its budget allows.
func (b budgets) spend(ctx context.Context, pod *corev1.Pod, dryRun bool) (asItIs bool, err error) {
	if core.Finished(pod) || pod.DeletionTimestamp != nil {
		return false, nil
	}
	if pod.Status.Phase == corev1.PodPending {
		return true, nil
	}
	budget, err := b.of(ctx, pod)
	if budget == nil || err != nil {
		return false, err
	}
	if !core.PodReady(pod) && spareUnready(budget) {
		return true, nil
	}
	key, err := b.store.KeyFunc(ctx, budget.Name)
	if err != nil {
		return false, err
	}
	err = b.store.Storage.GuaranteedUpdate(ctx, key, &policyv1.PodDisruptionBudget{}, false, &storage.Preconditions{UID: &budget.UID},
		storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
			current, ok := obj.(*policyv1.PodDisruptionBudget)
			if !ok {
				return nil, fmt.Errorf("budget %s: stored as a %T", budget.Name, obj)
			}
			if err := allow(current); err != nil {
				return nil, err
			}
			current.Status.DisruptionsAllowed--
			if current.Status.DisruptedPods == nil {
				current.Status.DisruptedPods = map[string]metav1.Time{}
			}
			current.Status.DisruptedPods[pod.Name] = metav1.NewTime(time.Now())
			return current, nil
		}), dryRun, nil)
	return false, storeerr.InterpretUpdateError(err, budgetsResource, budget.Name)
}

// of finds the budget that selects pod; two are more than can be spent at once.
func (b budgets) of(ctx context.Context, pod *corev1.Pod) (*policyv1.PodDisruptionBudget, error) {
	list, err := b.store.List(ctx, &internalversion.ListOptions{})
	if err != nil {
		return nil, err
	}
	all, ok := list.(*policyv1.PodDisruptionBudgetList)
	if !ok {
		return nil, errors.NewInternalError(fmt.Errorf("list budgets: got a %T", list))
	}
	var found *policyv1.PodDisruptionBudget
	for i := range all.Items {
		selector, err := metav1.LabelSelectorAsSelector(all.Items[i].Spec.Selector)
		if err != nil || !selector.Matches(labels.Set(pod.Labels)) {
			continue // a selector that cannot be read selects nothing
		}
		if found != nil {
			return nil, errors.NewInternalError(fmt.Errorf("this pod has more than one PodDisruptionBudget, which the eviction subresource does not support"))
		}
		found = &all.Items[i]
	}
	return found, nil
}

// allow refuses what budget does not permit. It fails closed: a budget whose
// controller has not looked at it yet permits nothing.
func allow(budget *policyv1.PodDisruptionBudget) error {
	status := budget.Status
	switch {
	case status.ObservedGeneration < budget.Generation:
		return refuse(fmt.Sprintf("The disruption budget %s is still being processed by the server.", budget.Name), 10)
	case status.DisruptionsAllowed < 0:
		return errors.NewForbidden(budgetsResource, budget.Name, fmt.Errorf("pdb disruptions allowed is negative"))
	case len(status.DisruptedPods) > maxDisrupted:
		return errors.NewForbidden(budgetsResource, budget.Name, fmt.Errorf("DisruptedPods map too big - too many evictions not confirmed by PDB controller"))
	case status.DisruptionsAllowed == 0:
		return refuse(fmt.Sprintf("The disruption budget %s needs %d healthy pods and has %d currently", budget.Name, status.DesiredHealthy, status.CurrentHealthy), 0)
	}
	return nil
}

func refuse(why string, retry int) error {
	err := errors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", retry)
	err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, metav1.StatusCause{Type: policyv1.DisruptionBudgetCause, Message: why})
	return err
}

// spareUnready reports whether an unready pod may be evicted without cost:
// the budget is met without it, or says that such pods do not count.
func spareUnready(budget *policyv1.PodDisruptionBudget) bool {
	if p := budget.Spec.UnhealthyPodEvictionPolicy; p != nil && *p == policyv1.AlwaysAllow {
		return true
	}
	return budget.Status.ObservedGeneration >= budget.Generation &&
		budget.Status.CurrentHealthy >= budget.Status.DesiredHealthy && budget.Status.DesiredHealthy > 0
}
