// Package servicecidr says of each ServiceCIDR whether Services are given
// addresses of it, keeps one that goes until none has any, and makes the one of
// the range that the cluster was begun with.
package servicecidr

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	networkinglisters "k8s.io/client-go/listers/networking/v1"

	"github.com/clusterd/clusterd/apis/networking"
	"github.com/clusterd/clusterd/sched/loop"
)

type controller struct {
	*loop.Controller
	client kubernetes.Interface
	cidrs  networkinglisters.ServiceCIDRLister
	ranges Ranges
}

// New returns the loop. Its keys are names of ServiceCIDRs.
func New(env loop.Env, ranges Ranges) loop.Loop {
	cidrs := env.Informers.Networking().V1().ServiceCIDRs()
	c := &controller{client: env.Client, cidrs: cidrs.Lister(), ranges: ranges}
	c.Controller = loop.New("servicecidr", env, 1, c.reconcile)
	loop.Watch(c.Controller, cidrs.Informer(), func(old, s *networkingv1.ServiceCIDR) {
		c.Enqueue(loop.KeyOf(loop.Latest(old, s)))
		c.leaving() // it may cover what one that goes is kept for
	})
	loop.Watch(c.Controller, env.Informers.Core().V1().Services().Informer(), func(old, s *corev1.Service) {
		if old != nil && (s == nil || !slices.Equal(old.Spec.ClusterIPs, s.Spec.ClusterIPs)) {
			c.leaving() // its address may be the last one
		}
	})
	return loop.Loop{Name: c.Loop().Name, Run: func(ctx context.Context) error {
		return c.RunReady(ctx, func() { c.Enqueue(loop.Key{Name: networking.DefaultServiceCIDR}) })
	}}
}

// leaving looks at those again that are being deleted.
func (c *controller) leaving() {
	all, err := c.cidrs.List(labels.Everything())
	if err != nil {
		return // a lister of a cache has none
	}
	for _, s := range all {
		if s.DeletionTimestamp != nil {
			c.Enqueue(loop.KeyOf(s))
		}
	}
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	have, err := c.cidrs.Get(key.Name)
	if apierrors.IsNotFound(err) {
		if key.Name != networking.DefaultServiceCIDR {
			return nil
		}
		_, err = c.client.NetworkingV1().ServiceCIDRs().Create(ctx, newDefault(c.ranges.Services), metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create ServiceCIDR %s: %w", key.Name, err)
		}
		return nil // the watch shows it
	}
	if err != nil {
		return err
	}
	if have.DeletionTimestamp != nil && !slices.Contains(have.Finalizers, networking.ServiceCIDRFinalizer) {
		return nil
	}
	if wider := c.ranges.widen(have); wider != nil {
		if _, err := c.client.NetworkingV1().ServiceCIDRs().Update(ctx, wider, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("add a range to ServiceCIDR %s: %w", key.Name, err)
		}
		return nil // the watch shows it
	}
	user, err := c.user(ctx, have)
	if err != nil {
		return err
	}
	return c.write(ctx, have, user)
}

// user is a Service for whose sake one that is being deleted has to stay; "":
// there is none. It asks the server: the cache may lack a new Service.
func (c *controller) user(ctx context.Context, going *networkingv1.ServiceCIDR) (string, error) {
	if going.DeletionTimestamp == nil {
		return "", nil
	}
	all, err := c.cidrs.List(labels.Everything())
	if err != nil {
		return "", err
	}
	services, err := c.client.CoreV1().Services(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", fmt.Errorf("list the Services that may have addresses of ServiceCIDR %s: %w", going.Name, err)
	}
	return User(going, all, services.Items), nil
}

// write makes condition and finalizer what they should be.
func (c *controller) write(ctx context.Context, have *networkingv1.ServiceCIDR, user string) error {
	api := c.client.NetworkingV1().ServiceCIDRs()
	finalizers := slices.DeleteFunc(slices.Clone(have.Finalizers), func(f string) bool { return f == networking.ServiceCIDRFinalizer })
	if have.DeletionTimestamp == nil || user != "" {
		finalizers = append(finalizers, networking.ServiceCIDRFinalizer)
	}
	if len(finalizers) != len(have.Finalizers) {
		have = have.DeepCopy()
		have.Finalizers = finalizers
		updated, err := api.Update(ctx, have, metav1.UpdateOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("finalizer of ServiceCIDR %s: %w", have.Name, err)
		}
		if have = updated; user == "" && have.DeletionTimestamp != nil {
			return nil // it is gone, or others keep it
		}
	}
	want := have.DeepCopy()
	meta.SetStatusCondition(&want.Status.Conditions, c.ranges.Condition(have, user))
	if apiequality.Semantic.DeepEqual(have.Status, want.Status) {
		return nil
	}
	if _, err := api.UpdateStatus(ctx, want, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("status of ServiceCIDR %s: %w", have.Name, err)
	}
	return nil
}

func newDefault(services []netip.Prefix) *networkingv1.ServiceCIDR {
	c := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: networking.DefaultServiceCIDR}}
	for _, s := range services {
		c.Spec.CIDRs = append(c.Spec.CIDRs, s.Masked().String())
	}
	return c
}
