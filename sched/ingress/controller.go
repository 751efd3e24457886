// Package ingress keeps what serves Ingresses: the default IngressClass, made
// once, and, as soon as there is an Ingress of a class of ours, the pods that
// run the proxy and the Service in front of them. It writes the addresses of
// that Service into the Ingresses' statuses, so that the proxies only read.
package ingress

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
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
	services  corelisters.ServiceLister
	accounts  corelisters.ServiceAccountLister
	sets      appslisters.DaemonSetLister
}

// New returns the loop.
func New(env loop.Env) loop.Loop {
	core, net, apps := env.Informers.Core().V1(), env.Informers.Networking().V1(), env.Informers.Apps().V1()
	c := &controller{
		client: env.Client, ingresses: net.Ingresses().Lister(), classes: net.IngressClasses().Lister(),
		services: core.Services().Lister(), accounts: core.ServiceAccounts().Lister(), sets: apps.DaemonSets().Lister(),
	}
	c.Controller = loop.New("ingress", env, 1, c.reconcile)
	loop.Watch(c.Controller, net.Ingresses().Informer(), func(_, i *networkingv1.Ingress) {
		if i != nil {
			c.Enqueue(loop.KeyOf(i))
		}
	})
	loop.Watch(c.Controller, net.IngressClasses().Informer(), func(_, _ *networkingv1.IngressClass) { c.all() })
	loop.Watch(c.Controller, core.Services().Informer(), func(old, s *corev1.Service) {
		if loop.KeyOf(loop.Latest(old, s)) == Name {
			c.all()
		}
	})
	loop.Watch(c.Controller, apps.DaemonSets().Informer(), func(old, s *appsv1.DaemonSet) {
		if s == nil && loop.KeyOf(old) == Name {
			c.all()
		}
	})
	loop.Watch(c.Controller, core.ServiceAccounts().Informer(), func(old, s *corev1.ServiceAccount) {
		if s == nil && loop.KeyOf(old) == Name {
			c.all()
		}
	})
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
	if err := c.serve(ctx); err != nil {
		return err
	}
	service, err := c.services.Services(Name.Namespace).Get(Name.Name)
	if apierrors.IsNotFound(err) {
		return nil // it was made just now; the cache will show it
	}
	if err != nil {
		return err
	}
	want := addresses(service)
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

// serve makes what is missing of the pods and what they need. What is there is
// the administrator's to change.
func (c *controller) serve(ctx context.Context) error {
	ns := Name.Namespace
	if _, err := c.accounts.ServiceAccounts(ns).Get(Name.Name); apierrors.IsNotFound(err) {
		if _, err := c.client.CoreV1().ServiceAccounts(ns).Create(ctx, newAccount(), metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("make service account %s: %w", Name, err)
		}
	} else if err != nil {
		return err
	}
	if _, err := c.services.Services(ns).Get(Name.Name); apierrors.IsNotFound(err) {
		if _, err := c.client.CoreV1().Services(ns).Create(ctx, newService(), metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("make service %s: %w", Name, err)
		}
	} else if err != nil {
		return err
	}
	if _, err := c.sets.DaemonSets(ns).Get(Name.Name); apierrors.IsNotFound(err) {
		if _, err := c.client.AppsV1().DaemonSets(ns).Create(ctx, newDaemonSet(), metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("make daemon set %s: %w", Name, err)
		}
	} else if err != nil {
		return err
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
