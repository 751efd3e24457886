// Package clusterroleaggregation keeps the rules of ClusterRoles that are sums
// of others: admin, edit, view, and what users define.
package clusterroleaggregation

import (
	"context"
	"fmt"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	rbaclisters "k8s.io/client-go/listers/rbac/v1"

	"github.com/clusterd/clusterd/sched/loop"
)

type controller struct {
	*loop.Controller
	client kubernetes.Interface
	roles  rbaclisters.ClusterRoleLister
}

// New returns the loop; it watches ClusterRoles.
func New(env loop.Env) loop.Loop {
	informer := env.Informers.Rbac().V1().ClusterRoles()
	c := &controller{client: env.Client, roles: informer.Lister()}
	c.Controller = loop.New("clusterroleaggregation", env, 1, c.reconcile)
	loop.Watch(c.Controller, informer.Informer(), func(old, role *rbacv1.ClusterRole) {
		for _, sum := range c.sums() {
			// What a role was may have counted, too: it may have lost its label.
			if old != nil && feeds(old, sum) || role != nil && (feeds(role, sum) || role.Name == sum.Name) {
				c.Enqueue(loop.Key{Name: sum.Name})
			}
		}
	})
	return c.Loop()
}

// sums are the roles that are sums of others.
func (c *controller) sums() []*rbacv1.ClusterRole {
	roles, err := c.roles.List(labels.Everything())
	if err != nil {
		return nil
	}
	var sums []*rbacv1.ClusterRole
	for _, role := range roles {
		if role.AggregationRule != nil {
			sums = append(sums, role)
		}
	}
	return sums
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	sum, err := c.roles.Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if sum.AggregationRule == nil {
		return nil
	}
	roles, err := c.roles.List(labels.Everything())
	if err != nil {
		return err
	}
	rules, err := Rules(sum, roles)
	if err != nil {
		return err
	}
	if equality.Semantic.DeepEqual(rules, sum.Rules) {
		return nil
	}
	updated := sum.DeepCopy()
	updated.Rules = rules
	if _, err := c.client.RbacV1().ClusterRoles().Update(ctx, updated, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("update the rules of cluster role %s: %w", sum.Name, err)
	}
	return nil
}
