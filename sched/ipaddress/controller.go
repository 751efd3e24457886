// Package ipaddress keeps an IPAddress for each cluster address that a Service
// has, so that one list shows who has which, and no other object reserves it.
package ipaddress

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	networkinglisters "k8s.io/client-go/listers/networking/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"github.com/clusterd/clusterd/sched/loop"
)

// byAddress is the index of Services by their cluster addresses.
const byAddress = "clusterIP"

type controller struct {
	*loop.Controller
	client    kubernetes.Interface
	services  cache.Indexer
	addresses networkinglisters.IPAddressLister
	events    record.EventRecorder
}

// New returns the loop. Its keys are addresses.
func New(env loop.Env) (loop.Loop, error) {
	services, addresses := env.Informers.Core().V1().Services().Informer(), env.Informers.Networking().V1().IPAddresses()
	err := services.AddIndexers(cache.Indexers{byAddress: func(obj any) ([]string, error) {
		s, ok := obj.(*corev1.Service)
		if !ok {
			return nil, fmt.Errorf("index Services by address: got a %T", obj)
		}
		return addressesOf(s), nil
	}})
	if err != nil {
		return loop.Loop{}, fmt.Errorf("index Services by address: %w", err)
	}
	c := &controller{client: env.Client, services: services.GetIndexer(), addresses: addresses.Lister(), events: env.Events.For("ipaddress-controller")}
	c.Controller = loop.New("ipaddress", env, 2, c.reconcile)
	loop.Watch(c.Controller, services, func(old, s *corev1.Service) {
		for _, one := range []*corev1.Service{old, s} {
			if one == nil {
				continue
			}
			for _, address := range addressesOf(one) {
				c.Enqueue(loop.Key{Name: address})
			}
		}
	})
	loop.Watch(c.Controller, addresses.Informer(), func(old, a *networkingv1.IPAddress) { c.Enqueue(loop.KeyOf(loop.Latest(old, a))) })
	return c.Loop(), nil
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	have, err := c.addresses.Get(key.Name)
	if apierrors.IsNotFound(err) {
		have, err = nil, nil
	}
	if err != nil {
		return err
	}
	objs, err := c.services.ByIndex(byAddress, key.Name)
	if err != nil {
		return err
	}
	var holders []*corev1.Service
	for _, obj := range objs {
		if s, ok := obj.(*corev1.Service); ok {
			holders = append(holders, s)
		}
	}
	api := c.client.NetworkingV1().IPAddresses()
	step := Decide(key.Name, holders, have)
	switch {
	case step.Delete:
		// What is created again in between is another object. One that is wanted again is
		// made when the watch shows that it is gone.
		err := api.Delete(ctx, key.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(have.UID))})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fmt.Errorf("delete IPAddress %s: %w", key.Name, err)
		}
	case step.Create != nil:
		if _, err := api.Create(ctx, step.Create, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create IPAddress %s: %w", key.Name, err)
		}
	case step.Stolen != nil:
		c.events.Eventf(step.Stolen, corev1.EventTypeWarning, "IPAddressWrongReference", "the IPAddress %s is reserved for something else than this Service, which has it: delete one of the two", key.Name)
	}
	return nil
}
