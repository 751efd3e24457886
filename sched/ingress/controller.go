// Package ingress keeps what serves Ingresses: the default IngressClass, made
// once, and, as soon as there is an Ingress of a class of ours, the pods that
// run the proxy and the Service in front of them. It writes the addresses of
// that Service into the Ingresses' statuses, so that the proxies only read.
package ingress

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	networkinglisters "k8s.io/client-go/listers/networking/v1"

	"github.com/clusterd/clusterd/sched/loop"
)

// classKey asks for the default class; others are the keys of Ingresses.
var classKey = loop.Key{Name: "!class"}

// mark is the ConfigMap that says that the default class was made once: one
// that was deleted stays deleted.
const mark = "clusterd-ingress-class"

type controller struct {
	*loop.Controller
	client    kubernetes.Interface
	ingresses networkinglisters.IngressLister
	classes   networkinglisters.IngressClassLister
	proxies   *Proxies
}

// New returns the loop.
func New(env loop.Env) loop.Loop {
	net := env.Informers.Networking().V1()
	c := &controller{
		client: env.Client, ingresses: net.Ingresses().Lister(), classes: net.IngressClasses().Lister(),
		proxies: NewProxies(env),
	}
	c.Controller = loop.New("ingress", env, 1, c.reconcile)
	loop.Watch(c.Controller, net.Ingresses().Informer(), func(_, i *networkingv1.Ingress) {
		if i != nil {
			c.Enqueue(loop.KeyOf(i))
		}
	})
	loop.Watch(c.Controller, net.IngressClasses().Informer(), func(_, _ *networkingv1.IngressClass) { c.all() })
	c.proxies.Watch(c.Controller, c.all)
	return loop.Loop{Name: "ingress", Run: func(ctx context.Context) error {
		return c.RunReady(ctx, func() { c.Enqueue(classKey) })
	}}
}

func (c *controller) all() {
	list, err := c.ingresses.List(labels.Everything())
	if err != nil {
		return
	}
	for _, i := range list {
		c.Enqueue(loop.KeyOf(i))
	}
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	if key == classKey {
		return c.makeClass(ctx)
	}
	i, err := c.ingresses.Ingresses(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	classes, err := c.classes.List(labels.Everything())
	if err != nil {
		return err
	}
	if i.DeletionTimestamp != nil || !ours(i, classes) {
		return nil
	}
	service, err := c.proxies.Ensure(ctx)
	if err != nil || service == nil {
		return err
	}
	want := Addresses(service)
	if apiequality.Semantic.DeepEqual(i.Status.LoadBalancer.Ingress, want) {
		return nil
	}
	next := i.DeepCopy()
	next.Status.LoadBalancer.Ingress = want
	if _, err := c.client.NetworkingV1().Ingresses(i.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("status of ingress %s: %w", key, err)
	}
	return nil
}

// makeClass makes the default class, once in a cluster's life.
func (c *controller) makeClass(ctx context.Context) error {
	marks := c.client.CoreV1().ConfigMaps(Name.Namespace)
	_, err := marks.Get(ctx, mark, metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		return err
	}
	if _, err := c.client.NetworkingV1().IngressClasses().Create(ctx, newClass(), metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("make the default ingress class: %w", err)
	}
	_, err = marks.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: mark}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("note that the default ingress class was made: %w", err)
	}
	return nil
}
