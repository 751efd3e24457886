// Package endpointslice says which pods stand behind each Service.
package endpointslice

import (
	"context"
	"errors"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/record"

	"github.com/clusterd/clusterd/sched/internal/newname"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

// Kind is the kind that owns the slices.
var Kind = corev1.SchemeGroupVersion.WithKind("Service")

type controller struct {
	*loop.Controller
	client   kubernetes.Interface
	services corelisters.ServiceLister
	pods     corelisters.PodLister
	nodes    corelisters.NodeLister
	slices   discoverylisters.EndpointSliceLister
	pending  *loop.Pending
	events   record.EventRecorder

	mu    sync.Mutex           // guards hints
	hints map[types.UID]string // why a Service's endpoints are not shared out, as was said last
}

// New returns the loop. It watches Services, Pods, Nodes and EndpointSlices.
func New(env loop.Env) loop.Loop {
	core, slices := env.Informers.Core().V1(), env.Informers.Discovery().V1().EndpointSlices()
	c := &controller{
		client:   env.Client,
		services: core.Services().Lister(),
		pods:     core.Pods().Lister(),
		nodes:    core.Nodes().Lister(),
		slices:   slices.Lister(),
		events:   env.Events.For("endpoint-slice-controller"),
		hints:    map[types.UID]string{},
		pending: loop.NewPending(env.Clock, func(ctx context.Context, key loop.Key) (metav1.Object, error) {
			return env.Client.DiscoveryV1().EndpointSlices(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
		}),
	}
	c.Controller = loop.New("endpointslice", env, 4, c.reconcile)
	loop.Watch(c.Controller, core.Nodes().Informer(), c.onNode)
	loop.Watch(c.Controller, core.Services().Informer(), func(old, s *corev1.Service) {
		if s == nil || old != nil && old.UID != s.UID {
			c.pending.Forget(loop.KeyOf(old))
			c.mu.Lock()
			delete(c.hints, old.UID)
			c.mu.Unlock()
		}
		c.Enqueue(loop.KeyOf(loop.Latest(old, s)))
	})
	loop.Watch(c.Controller, core.Pods().Informer(), c.onPod)
	loop.Watch(c.Controller, slices.Informer(), c.onSlice)
	return c.Loop()
}

func (c *controller) onSlice(old, s *discoveryv1.EndpointSlice) {
	o := loop.Latest(old, s)
	if o.Labels[discoveryv1.LabelManagedBy] != managedBy {
		return
	}
	owner := loop.Key{Namespace: o.Namespace, Name: o.Labels[discoveryv1.LabelServiceName]}
	if s == nil || s.DeletionTimestamp != nil {
		c.pending.SawGone(owner, loop.KeyOf(o))
	} else {
		c.pending.SawPresent(owner, loop.KeyOf(o))
	}
	c.Enqueue(owner)
}

// onNode wakes all Services when a node's zone becomes known or changes, and those
// whose endpoints are shared out when the zones' processors do.
func (c *controller) onNode(old, node *corev1.Node) {
	rezoned := old != nil && node != nil && old.Labels[corev1.LabelTopologyZone] != node.Labels[corev1.LabelTopologyZone]
	if !rezoned && !weighs(old, node) {
		return
	}
	all, err := c.services.List(labels.Everything())
	if err != nil {
		return
	}
	for _, s := range all {
		if rezoned || auto(s) {
			c.Enqueue(loop.KeyOf(s))
		}
	}
}

// onPod wakes the Services that select the pod, or did before it changed.
func (c *controller) onPod(old, pod *corev1.Pod) {
	if old != nil && pod != nil && !tells(old, pod) {
		return
	}
	o := loop.Latest(old, pod)
	all, err := c.services.Services(o.Namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, s := range all {
		if selects(s, old) || selects(s, pod) {
			c.Enqueue(loop.KeyOf(s))
		}
	}
}

// tells reports whether a change of a pod may show in a slice.
func tells(old, pod *corev1.Pod) bool {
	return old.UID != pod.UID || old.Spec.NodeName != pod.Spec.NodeName || old.Status.PodIP != pod.Status.PodIP ||
		pods.Ready(old) != pods.Ready(pod) || pods.Finished(old) != pods.Finished(pod) ||
		(old.DeletionTimestamp == nil) != (pod.DeletionTimestamp == nil) ||
		!apiequality.Semantic.DeepEqual(old.Status.PodIPs, pod.Status.PodIPs) ||
		!apiequality.Semantic.DeepEqual(old.Labels, pod.Labels)
}

func selects(s *corev1.Service, pod *corev1.Pod) bool {
	return pod != nil && selecting(s) && labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(pod.Labels))
}

// selecting reports whether the Service's endpoints are ours to find: without a
// selector the user says where it leads.
func selecting(s *corev1.Service) bool {
	return len(s.Spec.Selector) > 0 && s.Spec.Type != corev1.ServiceTypeExternalName
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	service, err := c.services.Services(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil // its slices have an owner reference
	}
	if err != nil {
		return err
	}
	if !selecting(service) || service.DeletionTimestamp != nil {
		return nil
	}
	settled, wait, err := c.pending.Settled(ctx, key)
	if err != nil {
		return err
	}
	if !settled {
		c.EnqueueAfter(key, wait) // or when the cache shows what is missing
		return nil
	}
	selected, err := c.pods.Pods(key.Namespace).List(labels.SelectorFromSet(service.Spec.Selector))
	if err != nil {
		return err
	}
	have, err := c.slices.EndpointSlices(key.Namespace).List(labels.SelectorFromSet(labels.Set{
		discoveryv1.LabelServiceName: key.Name, discoveryv1.LabelManagedBy: managedBy,
	}))
	if err != nil {
		return err
	}
	var nodes []*corev1.Node
	if auto(service) {
		if nodes, err = c.nodes.List(labels.Everything()); err != nil {
			return err
		}
	}
	plan := Decide(service, selected, c.zone, nodes, have)
	if auto(service) {
		c.tellHints(service, plan.NoHints)
	}
	return c.execute(ctx, key, plan)
}

func (c *controller) zone(name string) string {
	node, err := c.nodes.Get(name)
	if err != nil {
		return ""
	}
	return node.Labels[corev1.LabelTopologyZone]
}

// execute carries the plan out: new slices first, so that no endpoint is
// missing in between.
func (c *controller) execute(ctx context.Context, key loop.Key, plan Plan) error {
	api := c.client.DiscoveryV1().EndpointSlices(key.Namespace)
	var errs []error
	for _, s := range plan.Create {
		err := newname.Create(s.GenerateName, validation.DNS1123SubdomainMaxLength, func(name string) error {
			s.Name = name
			c.pending.Creating(key, loop.KeyOf(s))
			_, err := api.Create(ctx, s, metav1.CreateOptions{})
			c.pending.Answered(key, loop.KeyOf(s), err)
			return err
		})
		if err != nil && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			errs = append(errs, fmt.Errorf("create slice: %w", err))
		}
	}
	for _, s := range plan.Update {
		if _, err := api.Update(ctx, s, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("update slice %s: %w", s.Name, err))
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...) // what would be deleted may hold what could not be written
	}
	for _, s := range plan.Delete {
		err := api.Delete(ctx, s.Name, *metav1.NewPreconditionDeleteOptions(string(s.UID)))
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			errs = append(errs, fmt.Errorf("delete slice %s: %w", s.Name, err))
		}
	}
	return errors.Join(errs...)
}
