package ingress

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"
	corelisters "k8s.io/client-go/listers/core/v1"

	"github.com/clusterd/clusterd/sched/loop"
)

// Proxies are the pods that serve Ingresses and Gateways, with what they need.
type Proxies struct {
	client   kubernetes.Interface
	services corelisters.ServiceLister
	accounts corelisters.ServiceAccountLister
	sets     appslisters.DaemonSetLister
	env      loop.Env
}

// NewProxies makes nothing yet.
func NewProxies(env loop.Env) *Proxies {
	core, apps := env.Informers.Core().V1(), env.Informers.Apps().V1()
	return &Proxies{client: env.Client, services: core.Services().Lister(), accounts: core.ServiceAccounts().Lister(), sets: apps.DaemonSets().Lister(), env: env}
}

// Watch has changed called when Ensure may have something to do, or the Service
// has other addresses.
func (c *Proxies) Watch(l *loop.Controller, changed func()) {
	core, apps := c.env.Informers.Core().V1(), c.env.Informers.Apps().V1()
	loop.Watch(l, core.Services().Informer(), func(old, s *corev1.Service) {
		if loop.KeyOf(loop.Latest(old, s)) == Name {
			changed()
		}
	})
	loop.Watch(l, apps.DaemonSets().Informer(), func(old, s *appsv1.DaemonSet) {
		if s == nil && loop.KeyOf(old) == Name {
			changed()
		}
	})
	loop.Watch(l, core.ServiceAccounts().Informer(), func(old, s *corev1.ServiceAccount) {
		if s == nil && loop.KeyOf(old) == Name {
			changed()
		}
	})
}

// Ensure makes what is missing of the pods, what they need, and the Service that
// Ingresses have, and returns that; nil: it was made just now, and the cache will
// show it. What is there is the administrator's to change.
func (c *Proxies) Ensure(ctx context.Context) (*corev1.Service, error) {
	ns := Name.Namespace
	if _, err := c.services.Services(ns).Get(Name.Name); apierrors.IsNotFound(err) {
		if _, err := c.client.CoreV1().Services(ns).Create(ctx, newService(), metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return nil, fmt.Errorf("make service %s: %w", Name, err)
		}
	} else if err != nil {
		return nil, err
	}
	if err := c.EnsurePods(ctx); err != nil {
		return nil, err
	}
	service, err := c.services.Services(ns).Get(Name.Name)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return service, err
}

// EnsurePods makes what is missing of the pods and what they need, but no Service.
func (c *Proxies) EnsurePods(ctx context.Context) error {
	ns := Name.Namespace
	if _, err := c.accounts.ServiceAccounts(ns).Get(Name.Name); apierrors.IsNotFound(err) {
		if _, err := c.client.CoreV1().ServiceAccounts(ns).Create(ctx, newAccount(), metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("make service account %s: %w", Name, err)
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
