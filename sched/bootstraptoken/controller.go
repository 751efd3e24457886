// Package bootstraptoken deletes bootstrap tokens that have expired: Secrets of
// type bootstrap.kubernetes.io/token in kube-system.
package bootstraptoken

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	bootstrapapi "k8s.io/cluster-bootstrap/token/api"
	bootstrapsecrets "k8s.io/cluster-bootstrap/util/secrets"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/loop"
)

type controller struct {
	*loop.Controller
	client  kubernetes.Interface
	clock   clock.PassiveClock
	secrets cache.SharedIndexInformer
}

// New returns the loop; of Secrets it watches those of that type in kube-system.
func New(env loop.Env) loop.Loop {
	c := &controller{
		client: env.Client,
		clock:  env.Clock,
		secrets: coreinformers.NewFilteredSecretInformer(env.Client, metav1.NamespaceSystem, 0, cache.Indexers{}, func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("type", string(bootstrapapi.SecretTypeBootstrapToken)).String()
		}),
	}
	c.Controller = loop.New("bootstraptoken", env, 1, c.reconcile)
	loop.Watch(c.Controller, c.secrets, func(_, secret *corev1.Secret) {
		if secret != nil {
			c.Enqueue(loop.KeyOf(secret))
		}
	})
	return loop.Loop{Name: "bootstraptoken", Run: c.run}
}

// run runs the informer of its own beside the loop.
func (c *controller) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { c.secrets.RunWithContext(ctx); return nil })
	group.Go(func() error { return c.Run(ctx) })
	return group.Wait()
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	obj, ok, err := c.secrets.GetIndexer().GetByKey(key.String())
	if err != nil || !ok {
		return err
	}
	secret, ok := obj.(*corev1.Secret)
	if !ok || secret.Type != bootstrapapi.SecretTypeBootstrapToken || secret.DeletionTimestamp != nil {
		return nil
	}
	// An end that is no time counts as one that has passed.
	left, expired := bootstrapsecrets.GetExpiration(secret, c.clock.Now())
	switch {
	case !expired && left > 0:
		c.EnqueueAfter(key, left)
		return nil
	case !expired: // it has no end
		return nil
	}
	err = c.client.CoreV1().Secrets(key.Namespace).Delete(ctx, key.Name, metav1.DeleteOptions{
		// One that was given more time meanwhile is another version.
		Preconditions: &metav1.Preconditions{UID: &secret.UID, ResourceVersion: &secret.ResourceVersion}})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete the expired bootstrap token %s: %w", key.Name, err)
	}
	return nil
}
