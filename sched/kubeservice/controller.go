// Package kubeservice keeps the Service "kubernetes" in the namespace default:
// the address by which pods reach the API, with the API servers that live
// behind it.
package kubeservice

import (
	"context"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"

	"github.com/clusterd/clusterd/sched/loop"
)

// the is the one object this loop is about.
var the = loop.Key{Namespace: metav1.NamespaceDefault, Name: "kubernetes"}

type controller struct {
	*loop.Controller
	client   kubernetes.Interface
	services corelisters.ServiceLister
	nodes    corelisters.NodeLister
	slices   discoverylisters.EndpointSliceLister
	address  netip.Addr
}

// New returns the loop. serviceCIDR is the range of cluster addresses: the first
// of it is the Service's.
func New(env loop.Env, serviceCIDR netip.Prefix) loop.Loop {
	core, slices := env.Informers.Core().V1(), env.Informers.Discovery().V1().EndpointSlices()
	c := &controller{
		client: env.Client, services: core.Services().Lister(), nodes: core.Nodes().Lister(), slices: slices.Lister(),
		address: serviceCIDR.Masked().Addr().Next(),
	}
	c.Controller = loop.New("kubeservice", env, 1, c.reconcile)
	loop.Watch(c.Controller, core.Nodes().Informer(), func(old, node *corev1.Node) {
		if old == nil || node == nil || tells(old) != tells(node) {
			c.Enqueue(the)
		}
	})
	loop.Watch(c.Controller, core.Services().Informer(), func(old, s *corev1.Service) {
		if loop.KeyOf(loop.Latest(old, s)) == the {
			c.Enqueue(the)
		}
	})
	loop.Watch(c.Controller, slices.Informer(), func(old, s *discoveryv1.EndpointSlice) {
		if o := loop.Latest(old, s); ours(o) {
			c.Enqueue(the)
		}
	})
	return loop.Loop{Name: c.Loop().Name, Run: func(ctx context.Context) error {
		return c.RunReady(ctx, func() { c.Enqueue(the) }) // also where nothing is there to tell of it
	}}
}

func ours(s *discoveryv1.EndpointSlice) bool {
	return s.Namespace == the.Namespace && s.Labels[discoveryv1.LabelServiceName] == the.Name
}

func (c *controller) reconcile(ctx context.Context, _ loop.Key) error {
	service, err := c.services.Services(the.Namespace).Get(the.Name)
	if apierrors.IsNotFound(err) {
		service, err = c.client.CoreV1().Services(the.Namespace).Create(ctx, newService(c.address), metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil // the cache will show it
		}
	}
	if err != nil {
		return fmt.Errorf("service %s: %w", the, err)
	}
	if fixed := fix(service); fixed != nil {
		if _, err := c.client.CoreV1().Services(the.Namespace).Update(ctx, fixed, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("service %s: %w", the, err)
		}
	}
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return err
	}
	have, err := c.slices.EndpointSlices(the.Namespace).List(labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: the.Name}))
	if err != nil {
		return err
	}
	return c.execute(ctx, Decide(nodes), have)
}

// execute makes the slices what they should be. An empty answer is none: when
// every server seems dead this one is alive, and the last known ones stay.
func (c *controller) execute(ctx context.Context, want []*discoveryv1.EndpointSlice, have []*discoveryv1.EndpointSlice) error {
	if len(want) == 0 {
		return nil
	}
	api := c.client.DiscoveryV1().EndpointSlices(the.Namespace)
	now := map[string]*discoveryv1.EndpointSlice{}
	for _, s := range have {
		now[s.Name] = s
	}
	for _, w := range want {
		s, ok := now[w.Name]
		delete(now, w.Name)
		var err error
		switch {
		case !ok:
			_, err = api.Create(ctx, w, metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) {
				err = nil // the cache will show it
			}
		case s.AddressType != w.AddressType:
			err = api.Delete(ctx, s.Name, metav1.DeleteOptions{}) // cannot be altered; made again next time
		case !apiequality.Semantic.DeepEqual(s.Endpoints, w.Endpoints) || !apiequality.Semantic.DeepEqual(s.Ports, w.Ports):
			s = s.DeepCopy()
			s.Endpoints, s.Ports = w.Endpoints, w.Ports
			_, err = api.Update(ctx, s, metav1.UpdateOptions{})
		}
		if err != nil {
			return fmt.Errorf("endpoint slice %s: %w", w.Name, err)
		}
	}
	for name, s := range now {
		if s.Labels[discoveryv1.LabelManagedBy] != managedBy {
			continue
		}
		if err := api.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("endpoint slice %s: %w", name, err)
		}
	}
	return nil
}
