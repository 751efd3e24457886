// Package serviceaccount keeps in every namespace what each pod counts on: the
// ServiceAccount "default" and the ConfigMap kube-root-ca.crt.
package serviceaccount

import (
	"context"
	"errors"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"

	"github.com/clusterd/clusterd/sched/loop"
)

const (
	accountName = "default"
	rootCAName  = "kube-root-ca.crt"
	rootCAKey   = "ca.crt"
	description = "kubernetes.io/description"
)

type controller struct {
	*loop.Controller
	client     kubernetes.Interface
	namespaces corelisters.NamespaceLister
	accounts   corelisters.ServiceAccountLister
	configMaps corelisters.ConfigMapLister
	rootCA     string
}

// New returns the loop; it watches Namespaces, ServiceAccounts and ConfigMaps.
// rootCA is the PEM bundle that pods verify the API server with; if it is empty
// no ConfigMap is made.
func New(env loop.Env, rootCA []byte) loop.Loop {
	core := env.Informers.Core().V1()
	c := &controller{
		client:     env.Client,
		namespaces: core.Namespaces().Lister(),
		accounts:   core.ServiceAccounts().Lister(),
		configMaps: core.ConfigMaps().Lister(),
		rootCA:     string(rootCA),
	}
	c.Controller = loop.New("serviceaccount", env, 2, c.reconcile)
	loop.Watch(c.Controller, core.Namespaces().Informer(), func(_, ns *corev1.Namespace) {
		if ns != nil {
			c.Enqueue(loop.Key{Name: ns.Name})
		}
	})
	loop.Watch(c.Controller, core.ServiceAccounts().Informer(), func(old, sa *corev1.ServiceAccount) {
		if sa == nil && old.Name == accountName {
			c.Enqueue(loop.Key{Name: old.Namespace})
		}
	})
	loop.Watch(c.Controller, core.ConfigMaps().Informer(), func(old, cm *corev1.ConfigMap) {
		if o := loop.Latest(old, cm); o.Name == rootCAName {
			c.Enqueue(loop.Key{Name: o.Namespace})
		}
	})
	return c.Loop()
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	ns, err := c.namespaces.Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if ns.DeletionTimestamp != nil || ns.Status.Phase == corev1.NamespaceTerminating {
		return nil
	}
	return errors.Join(c.account(ctx, ns.Name), c.certificates(ctx, ns.Name))
}

func (c *controller) account(ctx context.Context, namespace string) error {
	_, err := c.accounts.ServiceAccounts(namespace).Get(accountName)
	if !apierrors.IsNotFound(err) {
		return err
	}
	_, err = c.client.CoreV1().ServiceAccounts(namespace).Create(ctx, &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: accountName},
	}, metav1.CreateOptions{})
	if settled(err) {
		return nil
	}
	return fmt.Errorf("create service account: %w", err)
}

func (c *controller) certificates(ctx context.Context, namespace string) error {
	if c.rootCA == "" {
		return nil
	}
	data := map[string]string{rootCAKey: c.rootCA}
	have, err := c.configMaps.ConfigMaps(namespace).Get(rootCAName)
	switch {
	case apierrors.IsNotFound(err):
		_, err = c.client.CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: rootCAName,
				Annotations: map[string]string{description: "The certificates that a client verifies the API server with. Changes are undone."},
			},
			Data: data,
		}, metav1.CreateOptions{})
		if settled(err) {
			return nil
		}
		return fmt.Errorf("create %s: %w", rootCAName, err)
	case err != nil:
		return err
	case maps.Equal(have.Data, data) && len(have.BinaryData) == 0:
		return nil
	}
	updated := have.DeepCopy()
	updated.Data, updated.BinaryData = data, nil
	_, err = c.client.CoreV1().ConfigMaps(namespace).Update(ctx, updated, metav1.UpdateOptions{})
	if err == nil || apierrors.IsNotFound(err) {
		return nil // deleted meanwhile: its event wakes us
	}
	return fmt.Errorf("restore %s: %w", rootCAName, err)
}

// settled reports whether a create needs no retry: it worked, another client was
// faster, or the namespace is on its way out.
func settled(err error) bool {
	return err == nil || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err) ||
		apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
}
