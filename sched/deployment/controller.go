// Package deployment rolls ReplicaSets over from one pod template to the next.
// It never touches a pod: it only says how many each ReplicaSet should have.
package deployment

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/owned"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

// Kind is the kind this controller is about.
var Kind = appsv1.SchemeGroupVersion.WithKind("Deployment")

const (
	name    = "deployment"
	workers = 8
)

type controller struct {
	*loop.Controller
	client kubernetes.Interface
	clock  clock.PassiveClock
	events record.EventRecorder
	lister appslisters.DeploymentLister
	sets   cache.Indexer
	pods   cache.Indexer
}

// New returns the loop. It watches Deployments, ReplicaSets and Pods.
func New(env loop.Env) (loop.Loop, error) {
	informer := env.Informers.Apps().V1().Deployments()
	setInformer := env.Informers.Apps().V1().ReplicaSets()
	podInformer := env.Informers.Core().V1().Pods()
	if err := errors.Join(owned.Index(setInformer.Informer()), owned.Index(podInformer.Informer())); err != nil {
		return loop.Loop{}, fmt.Errorf("index by controller: %w", err)
	}
	c := &controller{
		client: env.Client,
		clock:  env.Clock,
		events: env.Events.For("deployment-controller"),
		lister: informer.Lister(),
		sets:   setInformer.Informer().GetIndexer(),
		pods:   podInformer.Informer().GetIndexer(),
	}
	c.Controller = loop.New(name, env, workers, c.reconcile)
	loop.Watch(c.Controller, informer.Informer(), func(old, d *appsv1.Deployment) {
		c.Enqueue(loop.KeyOf(loop.Latest(old, d)))
	})
	loop.Watch(c.Controller, setInformer.Informer(), c.onSet)
	loop.Watch(c.Controller, podInformer.Informer(), c.onPod)
	return c.Loop(), nil
}

func (c *controller) onSet(old, rs *appsv1.ReplicaSet) {
	for _, o := range []*appsv1.ReplicaSet{old, rs} {
		if o == nil {
			continue
		}
		if ref := metav1.GetControllerOf(o); ref != nil {
			if ref.Kind == Kind.Kind {
				c.Enqueue(loop.Key{Namespace: o.Namespace, Name: ref.Name})
			}
		} else if o == rs {
			c.offer(rs)
		}
	}
}

// offer wakes every Deployment that could adopt the orphan.
func (c *controller) offer(rs *appsv1.ReplicaSet) {
	deployments, err := c.lister.Deployments(rs.Namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, d := range deployments {
		selector, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
		if err == nil && !selector.Empty() && selector.Matches(labels.Set(rs.Labels)) {
			c.Enqueue(loop.KeyOf(d))
		}
	}
}

// onPod wakes a Recreate Deployment whose old pods end: only it looks at pods.
func (c *controller) onPod(old, pod *corev1.Pod) {
	ended := pod == nil || old != nil && !pods.Finished(old) && pods.Finished(pod)
	if !ended {
		return
	}
	ref := metav1.GetControllerOf(old)
	if ref == nil || ref.Kind != "ReplicaSet" {
		return
	}
	obj, ok, err := c.sets.GetByKey(old.Namespace + "/" + ref.Name)
	if err != nil || !ok {
		return
	}
	ref = metav1.GetControllerOf(obj.(*appsv1.ReplicaSet))
	if ref == nil || ref.Kind != Kind.Kind {
		return
	}
	key := loop.Key{Namespace: old.Namespace, Name: ref.Name}
	if d, err := c.lister.Deployments(key.Namespace).Get(key.Name); err == nil && d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
		c.Enqueue(key)
	}
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	d, err := c.lister.Deployments(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if s := d.Spec.Selector; s == nil || len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
		c.events.Event(d, corev1.EventTypeWarning, "SelectingAll", "This deployment is selecting all pods. A non-empty selector is required.")
		return nil
	}
	sets, err := c.claim(ctx, d)
	if err != nil {
		return err
	}
	plan, err := Decide(Input{Deployment: d, Sets: sets, Running: c.running, Now: c.clock.Now()})
	if err != nil {
		return err
	}
	if plan.Recheck > 0 {
		c.EnqueueAfter(key, plan.Recheck)
	}
	return c.execute(ctx, d, plan)
}

func (c *controller) running(rs *appsv1.ReplicaSet) bool {
	list, err := owned.By[corev1.Pod](c.pods, rs.UID)
	if err != nil {
		return true // keep the promise of Recreate when in doubt
	}
	for _, pod := range list {
		if !pods.Finished(pod) {
			return true
		}
	}
	return false
}

func (c *controller) claim(ctx context.Context, d *appsv1.Deployment) ([]*appsv1.ReplicaSet, error) {
	selector, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
	if err != nil {
		return nil, fmt.Errorf("selector: %w", err)
	}
	candidates, err := owned.By[appsv1.ReplicaSet](c.sets, d.UID)
	if err != nil {
		return nil, err
	}
	free, err := owned.Orphans[appsv1.ReplicaSet](c.sets, d.Namespace)
	if err != nil {
		return nil, err
	}
	return owned.Claim(ctx, &owned.Claimer{
		Owner:    d,
		Kind:     Kind,
		Selector: selector,
		Live: func(ctx context.Context) (metav1.Object, error) {
			return c.client.AppsV1().Deployments(d.Namespace).Get(ctx, d.Name, metav1.GetOptions{})
		},
		Patch: func(ctx context.Context, name string, patch []byte) error {
			_, err := c.client.AppsV1().ReplicaSets(d.Namespace).Patch(ctx, name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
			return err
		},
	}, append(candidates, free...))
}

// execute carries the plan out. Every update names the version it was decided
// on, so what a stale cache suggested is refused and decided again.
func (c *controller) execute(ctx context.Context, d *appsv1.Deployment, plan Plan) error {
	if plan.Create != nil {
		if stop, err := c.create(ctx, d, plan.Create); stop || err != nil {
			return err
		}
	}
	for _, change := range plan.Update {
		if err := c.update(ctx, d, change); err != nil {
			return err
		}
	}
	for _, rs := range plan.Delete {
		if err := c.remove(ctx, rs); err != nil {
			return err
		}
	}
	if plan.Revision != "" {
		var err error
		if d, err = c.annotate(ctx, d, plan.Revision); err != nil {
			return err
		}
	}
	return c.updateStatus(ctx, d, plan.Status)
}

// create makes the ReplicaSet of a new template. stop tells that the pass ends
// here without an error.
func (c *controller) create(ctx context.Context, d *appsv1.Deployment, rs *appsv1.ReplicaSet) (stop bool, err error) {
	_, err = c.client.AppsV1().ReplicaSets(rs.Namespace).Create(ctx, rs, metav1.CreateOptions{})
	switch {
	case err == nil:
		if n := replicas(rs); n > 0 {
			c.events.Event(d, corev1.EventTypeNormal, "ScalingReplicaSet", scaleEvent(rs.Name, 0, n))
		}
		return false, nil
	case apierrors.IsAlreadyExists(err):
		return true, c.collide(ctx, d, rs)
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return true, nil
	}
	message := fmt.Sprintf("Failed to create new replica set %q: %v", rs.Name, err)
	if ctx.Err() == nil {
		c.events.Event(d, corev1.EventTypeWarning, reasonCreateFailed, message)
	}
	if deadline(d) {
		status := *d.Status.DeepCopy()
		setCondition(&status, appsv1.DeploymentProgressing, corev1.ConditionFalse, reasonCreateFailed, message, c.clock.Now())
		err = errors.Join(err, c.updateStatus(ctx, d, status))
	}
	return true, err
}

// collide is called when the name for a new ReplicaSet is taken: by ourselves,
// which the cache will soon show, or by another, which needs another hash.
func (c *controller) collide(ctx context.Context, d *appsv1.Deployment, rs *appsv1.ReplicaSet) error {
	live, err := c.client.AppsV1().ReplicaSets(rs.Namespace).Get(ctx, rs.Name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read replica set of the same name: %w", err)
	}
	ref := metav1.GetControllerOf(live)
	if ref != nil && ref.UID == d.UID && sameTemplate(&live.Spec.Template, &d.Spec.Template) {
		klog.FromContext(ctx).V(4).Info("cache is behind: replica set exists", "replicaset", klog.KObj(live))
		return nil // its watch event wakes us
	}
	status := *d.Status.DeepCopy()
	status.CollisionCount = ptr.To(ptr.Deref(status.CollisionCount, 0) + 1)
	klog.FromContext(ctx).Info("replica set name is taken, will hash again", "replicaset", klog.KObj(rs), "collisions", *status.CollisionCount)
	return c.updateStatus(ctx, d, status) // the change of status wakes us
}

func (c *controller) update(ctx context.Context, d *appsv1.Deployment, change Change) error {
	rs := change.Set
	if _, err := c.client.AppsV1().ReplicaSets(rs.Namespace).Update(ctx, rs, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("update replica set %s: %w", rs.Name, err)
	}
	if to := replicas(rs); to != change.From {
		c.events.Event(d, corev1.EventTypeNormal, "ScalingReplicaSet", scaleEvent(rs.Name, change.From, to))
	}
	return nil
}

func (c *controller) remove(ctx context.Context, rs *appsv1.ReplicaSet) error {
	err := c.client.AppsV1().ReplicaSets(rs.Namespace).Delete(ctx, rs.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &rs.UID, ResourceVersion: &rs.ResourceVersion},
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete old replica set %s: %w", rs.Name, err)
	}
	return nil
}

// annotate records the revision by a patch of metadata alone, which leaves the
// generation as it is. It returns the stored Deployment, which is the one that
// was decided on but for the revision: the status that is written next was
// computed from it.
func (c *controller) annotate(ctx context.Context, d *appsv1.Deployment, revision string) (*appsv1.Deployment, error) {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid":             d.UID,
		"resourceVersion": d.ResourceVersion,
		"annotations":     map[string]string{revisionAnnotation: revision},
	}})
	if err != nil {
		return nil, fmt.Errorf("encode revision patch: %w", err)
	}
	stored, err := c.client.AppsV1().Deployments(d.Namespace).Patch(ctx, d.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return nil, fmt.Errorf("record revision: %w", err)
	}
	return stored, nil
}

func (c *controller) updateStatus(ctx context.Context, d *appsv1.Deployment, status appsv1.DeploymentStatus) error {
	if apiequality.Semantic.DeepEqual(d.Status, status) {
		return nil
	}
	updated := d.DeepCopy()
	updated.Status = status
	_, err := c.client.AppsV1().Deployments(d.Namespace).UpdateStatus(ctx, updated, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("update status: %w", err)
	}
	return nil
}
