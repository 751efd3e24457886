// Package accounttoken fills Secrets of type kubernetes.io/service-account-token
// with a token of the service account that they name, and deletes them with
// it. It signs nothing: it asks the API for a token that is bound to the
// Secret, and so ends when the Secret is deleted. A token whose key verifies no
// more is replaced within some minute: that is a year after another key began to sign, or
// at once where that one stands alone.
package accounttoken

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/sched/loop"
)

// lifetime is the longest that the API gives: such a token ends with its
// Secret.
const lifetime int64 = 1 << 32

const byAccount = "account"

type controller struct {
	*loop.Controller
	client   kubernetes.Interface
	secrets  cache.SharedIndexInformer
	accounts corelisters.ServiceAccountLister
	rootCA   []byte
	keys     Keys
	// known is what keys said last.
	known atomic.Pointer[[]string]
}

// Keys are the ids of the keys that verify tokens.
type Keys func(ctx context.Context) ([]string, error)

// keysLook is how often they are looked at.
const keysLook = time.Minute

// New returns the loop; it watches ServiceAccounts and, of Secrets, those that
// are for tokens. rootCA is the PEM bundle that goes beside the token. keys may be
// nil: tokens then stay.
func New(env loop.Env, rootCA []byte, keys Keys) loop.Loop {
	accounts := env.Informers.Core().V1().ServiceAccounts()
	c := &controller{
		client:   env.Client,
		accounts: accounts.Lister(),
		rootCA:   rootCA,
		keys:     keys,
		secrets: coreinformers.NewFilteredSecretInformer(env.Client, metav1.NamespaceAll, 0, cache.Indexers{byAccount: accountOf}, func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("type", string(corev1.SecretTypeServiceAccountToken)).String()
		}),
	}
	c.Controller = loop.New("accounttoken", env, 2, c.reconcile)
	loop.Watch(c.Controller, c.secrets, func(_, secret *corev1.Secret) {
		if secret != nil {
			c.Enqueue(loop.KeyOf(secret))
		}
	})
	loop.Watch(c.Controller, accounts.Informer(), func(old, account *corev1.ServiceAccount) {
		if old != nil && account != nil && old.UID == account.UID {
			return
		}
		// It came or went.
		o := loop.Latest(old, account)
		found, err := c.secrets.GetIndexer().ByIndex(byAccount, o.Namespace+"/"+o.Name)
		if err != nil {
			return // the index exists: New made it
		}
		for _, obj := range found {
			if secret, ok := obj.(*corev1.Secret); ok {
				c.Enqueue(loop.KeyOf(secret))
			}
		}
	})
	return loop.Loop{Name: "accounttoken", Run: c.run}
}

func accountOf(obj any) ([]string, error) {
	secret, ok := obj.(*corev1.Secret)
	if !ok {
		return nil, nil
	}
	return []string{secret.Namespace + "/" + secret.Annotations[corev1.ServiceAccountNameKey]}, nil
}

// run runs the informer of its own beside the loop.
func (c *controller) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { c.secrets.RunWithContext(ctx); return nil })
	group.Go(func() error { return c.Run(ctx) })
	group.Go(func() error { c.followKeys(ctx); return nil })
	return group.Wait()
}

// followKeys has all Secrets looked at when other keys verify tokens.
func (c *controller) followKeys(ctx context.Context) {
	if c.keys == nil || !cache.WaitForCacheSync(ctx.Done(), c.secrets.HasSynced) {
		return
	}
	wait.JitterUntilWithContext(ctx, func(ctx context.Context) {
		keys, err := c.keys(ctx)
		if err != nil {
			klog.FromContext(ctx).V(2).Info("The keys that verify tokens could not be read, trying again", "err", err)
			return
		}
		if before := c.known.Swap(&keys); before != nil && slices.Equal(*before, keys) {
			return
		}
		for _, obj := range c.secrets.GetIndexer().List() {
			if secret, ok := obj.(*corev1.Secret); ok {
				c.Enqueue(loop.KeyOf(secret))
			}
		}
	}, keysLook, 0.2, true)
}

// verifying are the keys' ids as they were seen last; nil: not yet.
func (c *controller) verifying() []string {
	if known := c.known.Load(); known != nil {
		return *known
	}
	return nil
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	obj, ok, err := c.secrets.GetIndexer().GetByKey(key.String())
	if err != nil || !ok {
		return err
	}
	secret, ok := obj.(*corev1.Secret)
	if !ok || secret.DeletionTimestamp != nil {
		return nil
	}
	name := secret.Annotations[corev1.ServiceAccountNameKey]
	account, err := c.accounts.ServiceAccounts(key.Namespace).Get(name)
	if apierrors.IsNotFound(err) {
		// The cache may not know yet what was made a moment ago.
		account, err = c.client.CoreV1().ServiceAccounts(key.Namespace).Get(ctx, name, metav1.GetOptions{})
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	if err != nil {
		account = nil
	}
	keys := c.verifying()
	if outlived(secret.Data[corev1.ServiceAccountTokenKey], keys) {
		// A key may sign before it was seen here: a token of it would be replaced by another of it.
		if keys, err = c.keys(ctx); err != nil {
			return fmt.Errorf("the keys that verify tokens: %w", err)
		}
	}
	switch decide(secret, account, c.rootCA, keys) {
	case drop:
		err := c.client.CoreV1().Secrets(key.Namespace).Delete(ctx, key.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &secret.UID}})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fmt.Errorf("delete the secret of a service account that is gone: %w", err)
		}
	case fill:
		return c.fill(ctx, secret, account, keys)
	}
	return nil
}

func (c *controller) fill(ctx context.Context, secret *corev1.Secret, account *corev1.ServiceAccount, keys []string) error {
	updated := filled(secret, account, c.rootCA, keys)
	if len(updated.Data[corev1.ServiceAccountTokenKey]) == 0 {
		seconds := lifetime
		request, err := c.client.CoreV1().ServiceAccounts(secret.Namespace).CreateToken(ctx, account.Name, &authenticationv1.TokenRequest{
			Spec: authenticationv1.TokenRequestSpec{
				ExpirationSeconds: &seconds,
				BoundObjectRef:    &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Secret", Name: secret.Name, UID: secret.UID},
			},
		}, metav1.CreateOptions{})
		if apierrors.IsNotFound(err) {
			return nil // it went meanwhile: its event wakes us
		}
		if err != nil {
			return fmt.Errorf("token of service account %s/%s: %w", account.Namespace, account.Name, err)
		}
		updated.Data[corev1.ServiceAccountTokenKey] = []byte(request.Status.Token)
	}
	_, err := c.client.CoreV1().Secrets(secret.Namespace).Update(ctx, updated, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("fill the secret of a service account: %w", err)
	}
	return nil
}
