// Package endpoints translates between the two ways to say what stands behind a
// Service. Endpoints of a Service with a selector are written from its
// EndpointSlices, for clients that know nothing newer; Endpoints that a user
// wrote for a Service without one are mirrored into EndpointSlices, which is
// what the cluster reads.
package endpoints

import (
	"context"
	"errors"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/record"

	"github.com/clusterd/clusterd/sched/loop"
)

type controller struct {
	*loop.Controller
	client    kubernetes.Interface
	events    record.EventRecorder
	services  corelisters.ServiceLister
	endpoints corelisters.EndpointsLister
	slices    discoverylisters.EndpointSliceLister
	// gone holds the keys of Services that were seen to go: their Endpoints go
	// too, whichever client wrote them. Endpoints without a Service may also be early.
	gone sync.Map
}

// New returns the loop. It watches Services, Endpoints and EndpointSlices.
func New(env loop.Env) loop.Loop {
	core, slices := env.Informers.Core().V1(), env.Informers.Discovery().V1().EndpointSlices()
	c := &controller{
		client:    env.Client,
		events:    env.Events.For("endpoint-slice-mirroring-controller"),
		services:  core.Services().Lister(),
		endpoints: core.Endpoints().Lister(),
		slices:    slices.Lister(),
	}
	c.Controller = loop.New("endpoints", env, 2, c.reconcile)
	loop.Watch(c.Controller, core.Services().Informer(), func(old, s *corev1.Service) {
		key := loop.KeyOf(loop.Latest(old, s))
		if s == nil {
			c.gone.Store(key, true)
		} else {
			c.gone.Delete(key)
		}
		c.Enqueue(key)
	})
	loop.Watch(c.Controller, core.Endpoints().Informer(), func(old, e *corev1.Endpoints) {
		c.Enqueue(loop.KeyOf(loop.Latest(old, e)))
	})
	loop.Watch(c.Controller, slices.Informer(), func(old, s *discoveryv1.EndpointSlice) {
		for _, s := range []*discoveryv1.EndpointSlice{old, s} {
			if s != nil && s.Labels[discoveryv1.LabelServiceName] != "" {
				c.Enqueue(loop.Key{Namespace: s.Namespace, Name: s.Labels[discoveryv1.LabelServiceName]})
			}
		}
	})
	return c.Loop()
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	service, err := c.services.Services(key.Namespace).Get(key.Name)
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	if err != nil {
		service = nil
	}
	endpoints, err := c.endpoints.Endpoints(key.Namespace).Get(key.Name)
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	if err != nil {
		endpoints = nil
	}
	all, err := c.slices.EndpointSlices(key.Namespace).List(labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: key.Name}))
	if err != nil {
		return err
	}
	_, gone := c.gone.Load(key)
	err = c.execute(ctx, key, Decide(service, endpoints, all, gone))
	if err == nil && service == nil {
		c.gone.Delete(key)
	}
	return err
}

// execute carries the plan out: what is added first, so that no endpoint is
// missing in between. What the cache does not show yet fails on its version or
// its name, which is always the same, and is tried again.
func (c *controller) execute(ctx context.Context, key loop.Key, plan Plan) error {
	var errs []error
	failed := func(what string, err error) {
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	core, slices := c.client.CoreV1().Endpoints(key.Namespace), c.client.DiscoveryV1().EndpointSlices(key.Namespace)
	if e := plan.Create; e != nil {
		_, err := core.Create(ctx, e, metav1.CreateOptions{})
		failed("create endpoints", err)
	}
	if e := plan.Update; e != nil {
		_, err := core.Update(ctx, e, metav1.UpdateOptions{})
		failed("update endpoints", err)
	}
	if e := plan.Delete; e != nil {
		failed("delete endpoints", core.Delete(ctx, e.Name, *metav1.NewPreconditionDeleteOptions(string(e.UID))))
	}
	for _, s := range plan.CreateSlices {
		_, err := slices.Create(ctx, s, metav1.CreateOptions{})
		failed("create slice "+s.Name, err)
	}
	for _, s := range plan.UpdateSlices {
		_, err := slices.Update(ctx, s, metav1.UpdateOptions{})
		failed("update slice "+s.Name, err)
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	for _, s := range plan.DeleteSlices {
		failed("delete slice "+s.Name, slices.Delete(ctx, s.Name, *metav1.NewPreconditionDeleteOptions(string(s.UID))))
	}
	if plan.LeftOut > 0 && len(plan.CreateSlices)+len(plan.UpdateSlices) > 0 {
		c.events.Eventf(plan.Mirrored, corev1.EventTypeWarning, "TooManyAddressesToMirror",
			"%d addresses are not mirrored: at most %d for one set of ports; write EndpointSlices instead", plan.LeftOut, maxAddresses)
	}
	return errors.Join(errs...)
}
