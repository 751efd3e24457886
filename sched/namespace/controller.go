// Package namespace empties namespaces that are being deleted and then lets
// them go.
package namespace

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/internal/served"
	"github.com/clusterd/clusterd/sched/loop"
)

const (
	// again is how soon a namespace is looked at again while things in it are
	// on their way out: pods take their grace period.
	again = time.Second
	// inFlight bounds how many kinds of one namespace are swept at once.
	inFlight = 8
	// page bounds the objects read at a time.
	page = 500
)

type controller struct {
	*loop.Controller
	client   kubernetes.Interface
	metadata metadata.Interface
	clock    clock.PassiveClock
	lister   corelisters.NamespaceLister
}

// New returns the loop; it watches Namespaces, and lists what is in those that
// are being deleted.
func New(env loop.Env, metadata metadata.Interface) loop.Loop {
	informer := env.Informers.Core().V1().Namespaces()
	c := &controller{client: env.Client, metadata: metadata, clock: env.Clock, lister: informer.Lister()}
	c.Controller = loop.New("namespace", env, 4, c.reconcile)
	loop.Watch(c.Controller, informer.Informer(), func(_, ns *corev1.Namespace) {
		if ns != nil && ns.DeletionTimestamp != nil {
			c.Enqueue(loop.Key{Name: ns.Name})
		}
	})
	return c.Loop()
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	ns, err := c.lister.Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if ns.DeletionTimestamp == nil {
		return nil
	}
	if !slices.Contains(ns.Spec.Finalizers, corev1.FinalizerKubernetes) {
		return nil // our part is done; others hold it
	}
	if ns.Status.Phase != corev1.NamespaceTerminating {
		// From here on the server refuses new objects in it.
		if ns, err = c.writeStatus(ctx, ns, ns.Status.Conditions); err != nil {
			return err
		}
	}
	sweep := c.sweep(ctx, ns.Name)
	if sweep.Empty() {
		return c.finalize(ctx, ns)
	}
	klog.FromContext(ctx).V(2).Info("namespace is not empty yet", "namespace", ns.Name, "left", len(sweep.Left),
		"failures", len(sweep.Failures), "discovery", len(sweep.Discovery))
	if _, err := c.writeStatus(ctx, ns, conditionsOf(sweep, ns.Status.Conditions, c.clock.Now())); err != nil {
		return err
	}
	if errs := append(slices.Clone(sweep.Discovery), sweep.Failures...); len(errs) > 0 {
		return errors.Join(errs...) // with back-off
	}
	c.EnqueueAfter(key, again)
	return nil
}

func (c *controller) writeStatus(ctx context.Context, ns *corev1.Namespace, conditions []corev1.NamespaceCondition) (*corev1.Namespace, error) {
	updated := ns.DeepCopy()
	updated.Status.Phase = corev1.NamespaceTerminating
	updated.Status.Conditions = conditions
	if apiequality.Semantic.DeepEqual(updated.Status, ns.Status) {
		return ns, nil
	}
	stored, err := c.client.CoreV1().Namespaces().UpdateStatus(ctx, updated, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("update namespace status: %w", err)
	}
	if err != nil {
		return ns, nil
	}
	return stored, nil
}

// finalize takes our finalizer off; the server then removes the namespace.
func (c *controller) finalize(ctx context.Context, ns *corev1.Namespace) error {
	updated := ns.DeepCopy()
	updated.Spec.Finalizers = slices.DeleteFunc(updated.Spec.Finalizers, func(f corev1.FinalizerName) bool {
		return f == corev1.FinalizerKubernetes
	})
	_, err := c.client.CoreV1().Namespaces().Finalize(ctx, updated, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("finalize namespace: %w", err)
	}
	klog.FromContext(ctx).Info("namespace removed", "namespace", ns.Name)
	return nil
}

// sweep deletes everything in the namespace and reports what is left. Pods go
// first, and alone: as long as one runs, the policies and secrets that it is bound
// by stay (KEP-5080). Of the others a kind that fails, or a group that does not
// answer, keeps the rest from nothing.
func (c *controller) sweep(ctx context.Context, namespace string) *Sweep {
	resources, failed := served.Resources(ctx, c.client.Discovery())
	s := &Sweep{Discovery: failed, Left: map[schema.GroupResource]int{}, Finalizers: map[string]int{}}
	var targets []served.Resource
	for _, r := range resources {
		if r.Namespaced && r.Can("delete") && r.Can("list") {
			targets = append(targets, r)
		}
	}
	if len(targets) == 0 && len(failed) == 0 {
		s.Discovery = append(s.Discovery, errors.New("the server names no kinds at all"))
	}
	if i := slices.IndexFunc(targets, func(r served.Resource) bool { return r.GroupResource() == corev1.Resource("pods") }); i >= 0 {
		o := c.empty(ctx, targets[i], namespace)
		if s.add(targets[i].GroupResource(), o); o.left > 0 || o.err != nil {
			return s
		}
		targets = slices.Delete(targets, i, i+1)
	}
	outcomes := make([]outcome, len(targets))
	var group errgroup.Group
	group.SetLimit(inFlight)
	for i, r := range targets {
		group.Go(func() error {
			outcomes[i] = c.empty(ctx, r, namespace)
			return nil
		})
	}
	_ = group.Wait()
	for i, o := range outcomes {
		s.add(targets[i].GroupResource(), o)
	}
	return s
}

// outcome is what came of the objects of one kind.
type outcome struct {
	left       int
	finalizers map[string]int
	err        error
}

func (s *Sweep) add(gr schema.GroupResource, o outcome) {
	if o.err != nil {
		s.Failures = append(s.Failures, fmt.Errorf("%s: %w", gr, o.err))
	}
	if o.left > 0 {
		s.Left[gr] += o.left
	}
	for name, n := range o.finalizers {
		s.Finalizers[name] += n
	}
}

// empty deletes the namespace's objects of one kind and counts the rest.
func (c *controller) empty(ctx context.Context, r served.Resource, namespace string) outcome {
	api := c.metadata.Resource(r.GroupVersionResource).Namespace(namespace)
	background := metav1.DeletePropagationBackground
	options := metav1.DeleteOptions{PropagationPolicy: &background}
	if r.Can("deletecollection") {
		if err := api.DeleteCollection(ctx, options, metav1.ListOptions{}); err != nil && !gone(err) {
			return outcome{err: fmt.Errorf("delete all: %w", err)}
		}
	}
	left, held := 0, map[string]int{}
	next := ""
	for {
		list, err := api.List(ctx, metav1.ListOptions{Limit: page, Continue: next})
		if gone(err) {
			return outcome{}
		}
		if err != nil {
			return outcome{left, held, fmt.Errorf("list: %w", err)}
		}
		for i := range list.Items {
			item := &list.Items[i]
			if item.DeletionTimestamp == nil && !r.Can("deletecollection") {
				if err := api.Delete(ctx, item.Name, options); err != nil && !gone(err) {
					return outcome{left, held, fmt.Errorf("delete %s: %w", item.Name, err)}
				}
			}
			left++
			for _, f := range item.Finalizers {
				held[f]++
			}
		}
		if next = list.Continue; next == "" {
			return outcome{left, held, nil}
		}
	}
}

// gone reports that there is nothing to delete: no such object, or no such
// kind any more.
func gone(err error) bool { return apierrors.IsNotFound(err) || apierrors.IsMethodNotSupported(err) }
