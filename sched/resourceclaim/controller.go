// Package resourceclaim makes the ResourceClaims that pods ask for by a
// template, and takes back the devices of claims that no pod uses any more. It
// allocates nothing: that is the scheduler's.
package resourceclaim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	resourcelisters "k8s.io/client-go/listers/resource/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

// byTemplate finds pods that wait for a template.
const byTemplate = "clusterd-claim-template"

// tries bounds the names that are tried for one claim: each one that is taken
// by another object was made so on purpose.
const tries = 5

// errNoTemplate is returned while the template that a pod names does not exist.
var errNoTemplate = errors.New("not found")

type controller struct {
	client    kubernetes.Interface
	events    record.EventRecorder
	pods      corelisters.PodLister
	claims    resourcelisters.ResourceClaimLister
	templates resourcelisters.ResourceClaimTemplateLister
	podIndex  cache.Indexer

	// making reconciles pods, freeing claims.
	making, freeing *loop.Controller
}

// New returns the loop. It watches Pods, ResourceClaims and
// ResourceClaimTemplates.
func New(env loop.Env) (loop.Loop, error) {
	core, resources := env.Informers.Core().V1(), env.Informers.Resource().V1()
	podInformer := core.Pods().Informer()
	if err := podInformer.AddIndexers(cache.Indexers{byTemplate: templatesOf}); err != nil {
		return loop.Loop{}, fmt.Errorf("index pods by their templates of claims: %w", err)
	}
	c := &controller{
		client: env.Client, events: env.Events.For("resource-claim"), pods: core.Pods().Lister(), podIndex: podInformer.GetIndexer(),
		claims: resources.ResourceClaims().Lister(), templates: resources.ResourceClaimTemplates().Lister(),
	}
	c.making = loop.New("resourceclaim", env, 2, c.reconcilePod)
	c.freeing = loop.New("resourceclaim-reservations", env, 2, c.reconcileClaim)
	loop.Watch(c.making, podInformer, func(_, pod *corev1.Pod) {
		if pod != nil && len(pod.Spec.ResourceClaims) > 0 && pods.Active(pod) {
			c.making.Enqueue(loop.KeyOf(pod))
		}
	})
	loop.Watch(c.making, resources.ResourceClaims().Informer(), func(old, claim *resourcev1.ResourceClaim) {
		if owner := metav1.GetControllerOf(loop.Latest(old, claim)); owner != nil && owner.Kind == "Pod" {
			c.making.Enqueue(loop.Key{Namespace: loop.Latest(old, claim).Namespace, Name: owner.Name})
		}
	})
	loop.Watch(c.making, resources.ResourceClaimTemplates().Informer(), func(old, template *resourcev1.ResourceClaimTemplate) {
		if old == nil {
			c.enqueueUsers(template)
		}
	})
	loop.Watch(c.freeing, podInformer, func(old, pod *corev1.Pod) {
		if pod != nil && !over(pod) && (old == nil || old.UID == pod.UID) {
			return // it still uses what it used
		}
		o := loop.Latest(pod, old)
		for name := range resourceclaim.PodClaims(o) {
			c.freeing.Enqueue(loop.Key{Namespace: o.Namespace, Name: name})
		}
	})
	loop.Watch(c.freeing, resources.ResourceClaims().Informer(), func(_, claim *resourcev1.ResourceClaim) {
		if claim != nil {
			c.freeing.Enqueue(loop.KeyOf(claim))
		}
	})
	return loop.Loop{Name: "resourceclaim", Run: c.run}, nil
}

func (c *controller) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.making.Run(ctx) })
	group.Go(func() error { return c.freeing.Run(ctx) })
	return group.Wait()
}

// templatesOf indexes a pod by the templates that it names.
func templatesOf(obj any) (out []string, _ error) {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return nil, nil
	}
	for i := range pod.Spec.ResourceClaims {
		if name := pod.Spec.ResourceClaims[i].ResourceClaimTemplateName; name != nil {
			out = append(out, pod.Namespace+"/"+*name)
		}
	}
	return out, nil
}

// enqueueUsers has the pods that name the template looked at.
func (c *controller) enqueueUsers(template *resourcev1.ResourceClaimTemplate) {
	found, err := c.podIndex.ByIndex(byTemplate, template.Namespace+"/"+template.Name)
	if err != nil {
		return // the index exists: New made it
	}
	for _, obj := range found {
		if pod, ok := obj.(*corev1.Pod); ok {
			c.making.Enqueue(loop.KeyOf(pod))
		}
	}
}

// reconcilePod makes the pod's claims, tells it their names, and reserves what
// is allocated already if the pod got its node without the scheduler.
func (c *controller) reconcilePod(ctx context.Context, key loop.Key) error {
	pod, err := c.pods.Pods(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if !pods.Active(pod) {
		return nil
	}
	var made []corev1.PodResourceClaimStatus
	var errs []error
	for i := range pod.Spec.ResourceClaims {
		entry := &pod.Spec.ResourceClaims[i]
		if entry.ResourceClaimTemplateName == nil {
			continue
		}
		name, err := c.ensure(ctx, pod, entry)
		switch {
		case err != nil:
			c.events.Eventf(pod, corev1.EventTypeWarning, "FailedResourceClaimCreation", "PodResourceClaim %s: %v", entry.Name, err)
			if !errors.Is(err, errNoTemplate) { // its arrival wakes us
				errs = append(errs, err)
			}
		case name != "":
			made = append(made, corev1.PodResourceClaimStatus{Name: entry.Name, ResourceClaimName: &name})
		}
	}
	if len(made) > 0 {
		errs = append(errs, c.tell(ctx, pod, made))
	} else if len(errs) == 0 && pod.Spec.NodeName != "" {
		errs = append(errs, c.reserve(ctx, pod))
	}
	return errors.Join(errs...)
}

// ensure makes the claim of one entry if there is none. It returns the claim's
// name if the pod's status does not have it.
func (c *controller) ensure(ctx context.Context, pod *corev1.Pod, entry *corev1.PodResourceClaim) (string, error) {
	name, _, err := resourceclaim.Name(pod, entry)
	if err == nil && name == nil {
		return "", nil // it was found that none is needed
	}
	if err == nil {
		if claim, err := c.claims.ResourceClaims(pod.Namespace).Get(*name); err == nil && metav1.IsControlledBy(claim, pod) {
			return "", nil
		}
	}
	for try := range tries {
		want := claimName(pod, entry.Name, try)
		have, err := c.claims.ResourceClaims(pod.Namespace).Get(want)
		if apierrors.IsNotFound(err) {
			have, err = c.create(ctx, pod, entry, try)
		}
		switch {
		case err != nil && apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
			return "", nil
		case err != nil:
			return "", err
		case !metav1.IsControlledBy(have, pod):
			continue
		case name != nil && *name == want:
			return "", nil // the pod's status has it already
		}
		return want, nil
	}
	return "", fmt.Errorf("resourceclaim %q and %d more names belong to other objects: delete them", claimName(pod, entry.Name, 0), tries-1)
}

// create makes the claim. One that exists already is read from the server.
func (c *controller) create(ctx context.Context, pod *corev1.Pod, entry *corev1.PodResourceClaim, try int) (*resourcev1.ResourceClaim, error) {
	template, err := c.templates.ResourceClaimTemplates(pod.Namespace).Get(*entry.ResourceClaimTemplateName)
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("resourceclaimtemplate %q %w", *entry.ResourceClaimTemplateName, errNoTemplate)
	}
	if err != nil {
		return nil, err
	}
	api := c.client.ResourceV1().ResourceClaims(pod.Namespace)
	claim := newClaim(pod, entry.Name, template, try)
	made, err := api.Create(ctx, claim, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		made, err = api.Get(ctx, claim.Name, metav1.GetOptions{})
	}
	if err != nil {
		return nil, fmt.Errorf("create resourceclaim %s: %w", claim.Name, err)
	}
	return made, nil
}

// tell writes the names of claims into the pod's status.
func (c *controller) tell(ctx context.Context, pod *corev1.Pod, made []corev1.PodResourceClaimStatus) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"status":   map[string]any{"resourceClaimStatuses": made},
	})
	if err != nil {
		return fmt.Errorf("encode the names of claims: %w", err)
	}
	_, err = c.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("write the names of claims into the pod's status: %w", err)
	}
	return nil
}

// reserve reserves the pod's claims that are allocated: the client that bound the pod by
// hand did not.
func (c *controller) reserve(ctx context.Context, pod *corev1.Pod) error {
	for name, owned := range resourceclaim.PodClaims(pod) {
		claim, err := c.claims.ResourceClaims(pod.Namespace).Get(name)
		if err != nil || claim.Status.Allocation == nil || claim.DeletionTimestamp != nil || owned && !metav1.IsControlledBy(claim, pod) ||
			resourceclaim.IsReservedForPod(pod, claim, false) || len(claim.Status.ReservedFor) >= resourcev1.ResourceClaimReservedForMaxSize {
			continue
		}
		updated := claim.DeepCopy()
		updated.Status.ReservedFor = append(updated.Status.ReservedFor, podOf(pod))
		if _, err := c.client.ResourceV1().ResourceClaims(pod.Namespace).UpdateStatus(ctx, updated, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("reserve resourceclaim %s: %w", name, err)
		}
	}
	return nil
}

// reconcileClaim takes away reservations of pods that are over, and what the
// last of them leaves behind.
func (c *controller) reconcileClaim(ctx context.Context, key loop.Key) error {
	claim, err := c.claims.ResourceClaims(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	gone := map[types.UID]bool{}
	for _, user := range claim.Status.ReservedFor {
		if !isPod(user) {
			continue
		}
		if gone[user.UID], err = c.podOver(ctx, key.Namespace, user.Name, user.UID, true); err != nil {
			return err
		}
	}
	ownerOver := false
	if owner := metav1.GetControllerOf(claim); owner != nil && owner.Kind == "Pod" && owner.APIVersion == "v1" {
		// A pod that the cache does not know may be new; the collector sees to it.
		if ownerOver, err = c.podOver(ctx, key.Namespace, owner.Name, owner.UID, false); err != nil {
			return err
		}
	}
	return c.carryOut(ctx, claim, decide(claim, func(user resourcev1.ResourceClaimConsumerReference) bool { return gone[user.UID] }, ownerOver))
}

// podOver reports whether the pod is over or gone. A pod that the cache does not
// know is looked up at the server if ask says so, and counts as there if not:
// nothing is taken away on a cache's word.
func (c *controller) podOver(ctx context.Context, namespace, name string, uid types.UID, ask bool) (bool, error) {
	pod, err := c.pods.Pods(namespace).Get(name)
	if (apierrors.IsNotFound(err) || err == nil && pod.UID != uid) && ask {
		pod, err = c.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return true, nil
		}
	}
	switch {
	case apierrors.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("look up pod %s, which has the claim: %w", name, err)
	}
	return pod.UID != uid && ask || pod.UID == uid && over(pod), nil
}

// carryOut writes what was decided, by updates that name the version that it was
// decided on.
func (c *controller) carryOut(ctx context.Context, claim *resourcev1.ResourceClaim, d decision) error {
	api := c.client.ResourceV1().ResourceClaims(claim.Namespace)
	if d.status != nil {
		updated := claim.DeepCopy()
		updated.Status = *d.status
		written, err := api.UpdateStatus(ctx, updated, metav1.UpdateOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("take reservations off the claim: %w", err)
		}
		claim = written
	}
	if d.release {
		updated := claim.DeepCopy()
		updated.Finalizers = slices.DeleteFunc(updated.Finalizers, func(f string) bool { return f == resourcev1.Finalizer })
		if _, err := api.Update(ctx, updated, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("take the finalizer off the claim: %w", err)
		}
	}
	if d.drop {
		err := api.Delete(ctx, claim.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &claim.UID}})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fmt.Errorf("delete the claim of a pod that has ended: %w", err)
		}
	}
	return nil
}
