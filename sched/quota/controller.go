// Package quota writes down in ResourceQuotas what is used of them. Admission
// keeps the sums while objects come; this loop mends them when objects go.
package quota

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	resourcelisters "k8s.io/client-go/listers/resource/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/apis/quota"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

// settled is how long a quota has to stay as it is before a smaller sum is
// written: what admission has counted is in the store a moment later.
const settled = time.Second

// recount is how often quotas are counted that bound the number of objects of
// kinds that this loop does not watch.
const recount = 20 * time.Second

// resync is how often all others are: changes wake them, but not what admission
// counted for a request that failed afterwards, nor that the time has come at which a
// pod should have been gone.
const resync = 2 * time.Minute

type controller struct {
	*loop.Controller
	clock    clock.PassiveClock
	client   kubernetes.Interface
	metadata metadata.Interface
	quotas   corelisters.ResourceQuotaLister
	pods     corelisters.PodLister
	services corelisters.ServiceLister
	claims   corelisters.PersistentVolumeClaimLister
	devices  resourcelisters.ResourceClaimLister

	mu sync.Mutex
	// waiting holds the versions of quotas whose sum seems too great.
	waiting map[loop.Key]string
}

// New returns the loop; it watches ResourceQuotas, Pods, Services,
// PersistentVolumeClaims and ResourceClaims, and counts other kinds through metadata.
func New(env loop.Env, metadata metadata.Interface) loop.Loop {
	core := env.Informers.Core().V1()
	c := &controller{
		clock: env.Clock, client: env.Client, metadata: metadata, waiting: map[loop.Key]string{},
		quotas: core.ResourceQuotas().Lister(), pods: core.Pods().Lister(),
		services: core.Services().Lister(), claims: core.PersistentVolumeClaims().Lister(),
		devices: env.Informers.Resource().V1().ResourceClaims().Lister(),
	}
	c.Controller = loop.New("quota", env, 2, c.reconcile)
	loop.Watch(c.Controller, core.ResourceQuotas().Informer(), func(old, q *corev1.ResourceQuota) {
		// Admission's own writes are right; a recount would only race them.
		if q != nil && (old == nil || !equality.Semantic.DeepEqual(old.Spec, q.Spec) || !equality.Semantic.DeepEqual(q.Status.Hard, q.Spec.Hard)) {
			c.Enqueue(loop.KeyOf(q))
		}
	})
	loop.Watch(c.Controller, core.Pods().Informer(), func(old, pod *corev1.Pod) {
		// Most updates are of status; the generation tells without a comparison.
		if pod == nil || old != nil && pods.Finished(pod) != pods.Finished(old) || old != nil && old.Generation != pod.Generation && !equality.Semantic.DeepEqual(old.Spec, pod.Spec) {
			c.namespace(loop.Latest(old, pod).Namespace)
		}
	})
	loop.Watch(c.Controller, core.Services().Informer(), func(old, service *corev1.Service) {
		if service == nil || old != nil && !equality.Semantic.DeepEqual(old.Spec, service.Spec) {
			c.namespace(loop.Latest(old, service).Namespace)
		}
	})
	loop.Watch(c.Controller, core.PersistentVolumeClaims().Informer(), func(old, claim *corev1.PersistentVolumeClaim) {
		if claim == nil || old != nil && !quota.AttributesClasses(old).Equal(quota.AttributesClasses(claim)) {
			c.namespace(loop.Latest(old, claim).Namespace)
		}
	})
	loop.Watch(c.Controller, env.Informers.Resource().V1().ResourceClaims().Informer(), func(old, claim *resourcev1.ResourceClaim) {
		if claim == nil {
			c.namespace(old.Namespace)
		}
	})
	return c.Loop()
}

// namespace asks for a recount of the quotas of a namespace.
func (c *controller) namespace(name string) {
	quotas, err := c.quotas.ResourceQuotas(name).List(labels.Everything())
	if err != nil {
		return // a cache does not fail
	}
	for _, q := range quotas {
		c.Enqueue(loop.KeyOf(q))
	}
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	q, err := c.quotas.ResourceQuotas(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		c.mu.Lock()
		delete(c.waiting, key)
		c.mu.Unlock()
		return nil
	}
	if err != nil {
		return err
	}
	used, polled, err := c.used(ctx, q)
	if err != nil {
		return err
	}
	again := resync
	if polled {
		again = recount
	}
	defer c.EnqueueAfter(key, again)
	if equality.Semantic.DeepEqual(q.Status.Hard, q.Spec.Hard) && equality.Semantic.DeepEqual(q.Status.Used, used) {
		return nil
	}
	if !c.due(key, q, used) {
		c.EnqueueAfter(key, settled)
		return nil
	}
	updated := q.DeepCopy()
	updated.Status = corev1.ResourceQuotaStatus{Hard: q.Spec.Hard.DeepCopy(), Used: used}
	// At the version that was counted for: admission may have counted on.
	if _, err := c.client.CoreV1().ResourceQuotas(key.Namespace).UpdateStatus(ctx, updated, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write down what is used of the quota: %w", err)
	}
	return nil
}

// due reports whether used may be written now. A sum that is smaller than what
// stands there may miss objects that admission has let in and that are being
// stored; so the quota has to have stood still for a while.
func (c *controller) due(key loop.Key, q *corev1.ResourceQuota, used corev1.ResourceList) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !smaller(used, q.Status.Used) || c.waiting[key] == q.ResourceVersion {
		delete(c.waiting, key)
		return true
	}
	c.waiting[key] = q.ResourceVersion
	return false
}

// smaller reports whether some sum is less than what was written down.
func smaller(used, was corev1.ResourceList) bool {
	for name, quantity := range was {
		if now, ok := used[name]; ok && now.Cmp(quantity) < 0 {
			return true
		}
	}
	return false
}

// used measures what q bounds, and reports whether some of it is of kinds that
// are not watched.
func (c *controller) used(ctx context.Context, q *corev1.ResourceQuota) (corev1.ResourceList, bool, error) {
	resources := quota.Resources(q.Spec.Hard)
	polled := false
	list := func(resource schema.GroupResource, namespace string) ([]runtime.Object, error) {
		switch resource {
		case corev1.Resource("pods"):
			return listed(c.pods.Pods(namespace).List(labels.Everything()))
		case corev1.Resource("services"):
			return listed(c.services.Services(namespace).List(labels.Everything()))
		case corev1.Resource("persistentvolumeclaims"):
			return listed(c.claims.PersistentVolumeClaims(namespace).List(labels.Everything()))
		case resourcev1.Resource("resourceclaims"):
			return listed(c.devices.ResourceClaims(namespace).List(labels.Everything()))
		}
		polled = true
		return c.count(ctx, resource, namespace)
	}
	used, err := quota.Used(q, resources, list, c.clock.Now)
	return used, polled, err
}

func listed[T runtime.Object](objects []T, err error) ([]runtime.Object, error) {
	all := make([]runtime.Object, len(objects))
	for i, obj := range objects {
		all[i] = obj
	}
	return all, err
}

// count lists the metadata of a kind that is not watched. A kind that is not
// served has no objects.
func (c *controller) count(ctx context.Context, resource schema.GroupResource, namespace string) ([]runtime.Object, error) {
	version := "v1"
	if resource.Group != "" {
		group, err := c.version(resource)
		if err != nil {
			return nil, err
		}
		if version = group; version == "" {
			return nil, nil
		}
	}
	list, err := c.metadata.Resource(resource.WithVersion(version)).Namespace(namespace).List(ctx, metav1.ListOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("count %s: %w", resource, err)
	}
	return meta.ExtractList(list)
}

// version is the version by which the resource is served, the group's preferred one if
// it is in that; "": it is not served.
func (c *controller) version(resource schema.GroupResource) (string, error) {
	groups, err := c.client.Discovery().ServerGroups()
	if err != nil {
		return "", fmt.Errorf("find the version of %s: %w", resource, err)
	}
	for _, group := range groups.Groups {
		if group.Name != resource.Group {
			continue
		}
		versions := []metav1.GroupVersionForDiscovery{group.PreferredVersion}
		for _, v := range group.Versions {
			if v != group.PreferredVersion {
				versions = append(versions, v)
			}
		}
		for _, v := range versions {
			list, err := c.client.Discovery().ServerResourcesForGroupVersion(v.GroupVersion)
			if apierrors.IsNotFound(err) {
				continue // it went between the questions
			}
			if err != nil {
				return "", fmt.Errorf("find the version of %s in %s: %w", resource, v.GroupVersion, err)
			}
			if slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == resource.Resource }) {
				return v.Version, nil
			}
		}
	}
	return "", nil
}
