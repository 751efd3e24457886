package replicaset

import (
	"context"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/loop"
)

// replicationControllers are those of core/v1 in the form of ReplicaSets.
type replicationControllers struct {
	client  kubernetes.Interface
	lister  corelisters.ReplicationControllerLister
	informs cache.SharedIndexInformer
}

func newReplicationControllers(env loop.Env) *replicationControllers {
	informer := env.Informers.Core().V1().ReplicationControllers()
	return &replicationControllers{client: env.Client, lister: informer.Lister(), informs: informer.Informer()}
}

func (r *replicationControllers) kind() schema.GroupVersionKind {
	return corev1.SchemeGroupVersion.WithKind("ReplicationController")
}

func (r *replicationControllers) watch(c *loop.Controller, on func(old, now metav1.Object)) {
	loop.Watch(c, r.informs, func(old, rc *corev1.ReplicationController) { on(objectOrNil(old), objectOrNil(rc)) })
}

func (r *replicationControllers) get(key loop.Key) (*set, error) {
	rc, err := r.lister.ReplicationControllers(key.Namespace).Get(key.Name)
	if err != nil {
		return nil, err
	}
	return asSet(rc), nil
}

func (r *replicationControllers) list(namespace string) ([]*set, error) {
	list, err := r.lister.ReplicationControllers(namespace).List(labels.Everything())
	out := make([]*set, len(list))
	for i, rc := range list {
		out[i] = asSet(rc)
	}
	return out, err
}

func (r *replicationControllers) live(ctx context.Context, key loop.Key) (metav1.Object, error) {
	return r.client.CoreV1().ReplicationControllers(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
}

func (r *replicationControllers) updateStatus(ctx context.Context, s *set, status appsv1.ReplicaSetStatus) error {
	rc := s.owner.(*corev1.ReplicationController)
	converted := controllerStatus(status)
	if apiequality.Semantic.DeepEqual(converted, rc.Status) {
		return nil
	}
	rc = rc.DeepCopy()
	rc.Status = converted
	_, err := r.client.CoreV1().ReplicationControllers(rc.Namespace).UpdateStatus(ctx, rc, metav1.UpdateOptions{})
	return err
}

// siblings: nothing that ships makes ReplicationControllers for an owner of its
// own and moves pods between them.
func (r *replicationControllers) siblings(*set) []types.UID { return nil }

// asSet shows a ReplicationController as the ReplicaSet that asks for the same.
// What it points to belongs to the cache.
func asSet(rc *corev1.ReplicationController) *set {
	rs := &appsv1.ReplicaSet{
		ObjectMeta: rc.ObjectMeta,
		Spec: appsv1.ReplicaSetSpec{
			Replicas:        rc.Spec.Replicas,
			MinReadySeconds: rc.Spec.MinReadySeconds,
			Selector:        metav1.SetAsLabelSelector(rc.Spec.Selector),
			Template:        ptr.Deref(rc.Spec.Template, corev1.PodTemplateSpec{}),
		},
		Status: appsv1.ReplicaSetStatus{
			Replicas:             rc.Status.Replicas,
			FullyLabeledReplicas: rc.Status.FullyLabeledReplicas,
			ReadyReplicas:        rc.Status.ReadyReplicas,
			AvailableReplicas:    rc.Status.AvailableReplicas,
			ObservedGeneration:   rc.Status.ObservedGeneration,
		},
	}
	for _, c := range rc.Status.Conditions {
		rs.Status.Conditions = append(rs.Status.Conditions, appsv1.ReplicaSetCondition{
			Type: appsv1.ReplicaSetConditionType(c.Type), Status: c.Status, LastTransitionTime: c.LastTransitionTime, Reason: c.Reason, Message: c.Message,
		})
	}
	return &set{rs, rc}
}

// controllerStatus is the status as a ReplicationController can hold it.
func controllerStatus(status appsv1.ReplicaSetStatus) corev1.ReplicationControllerStatus {
	out := corev1.ReplicationControllerStatus{
		Replicas:             status.Replicas,
		FullyLabeledReplicas: status.FullyLabeledReplicas,
		ReadyReplicas:        status.ReadyReplicas,
		AvailableReplicas:    status.AvailableReplicas,
		ObservedGeneration:   status.ObservedGeneration,
	}
	for _, c := range status.Conditions {
		out.Conditions = append(out.Conditions, corev1.ReplicationControllerCondition{
			Type: corev1.ReplicationControllerConditionType(c.Type), Status: c.Status, LastTransitionTime: c.LastTransitionTime, Reason: c.Reason, Message: c.Message,
		})
	}
	return out
}
