package replicaset

import (
	"context"

	appsv1 "k8s.io/api/apps/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/sched/internal/owned"
	"github.com/clusterd/clusterd/sched/internal/podctl"
	"github.com/clusterd/clusterd/sched/loop"
)

// set is what pods are kept for, in the form of a ReplicaSet. It belongs to the
// cache: it is not changed.
type set struct {
	*appsv1.ReplicaSet
	owner podctl.Owner // as users know it: owner references and events name it
}

// sets are all sets of one kind: in the cache, but for live and updateStatus.
// All may be called concurrently. Errors are the API's.
type sets interface {
	kind() schema.GroupVersionKind
	watch(c *loop.Controller, on func(old, now metav1.Object))
	get(key loop.Key) (*set, error)
	list(namespace string) ([]*set, error)
	// live reads the set from the server.
	live(ctx context.Context, key loop.Key) (metav1.Object, error)
	// updateStatus writes the status unless the set shows it already.
	updateStatus(ctx context.Context, s *set, status appsv1.ReplicaSetStatus) error
	// siblings are the other sets with the same controller.
	siblings(s *set) []types.UID
}

// replicaSets are those of apps/v1.
type replicaSets struct {
	client  kubernetes.Interface
	lister  appslisters.ReplicaSetLister
	informs cache.SharedIndexInformer
}

func newReplicaSets(env loop.Env) (*replicaSets, error) {
	informer := env.Informers.Apps().V1().ReplicaSets()
	if err := owned.Index(informer.Informer()); err != nil {
		return nil, err
	}
	return &replicaSets{client: env.Client, lister: informer.Lister(), informs: informer.Informer()}, nil
}

func (r *replicaSets) kind() schema.GroupVersionKind { return Kind }

func (r *replicaSets) watch(c *loop.Controller, on func(old, now metav1.Object)) {
	loop.Watch(c, r.informs, func(old, rs *appsv1.ReplicaSet) { on(objectOrNil(old), objectOrNil(rs)) })
}

func (r *replicaSets) get(key loop.Key) (*set, error) {
	rs, err := r.lister.ReplicaSets(key.Namespace).Get(key.Name)
	if err != nil {
		return nil, err
	}
	return &set{rs, rs}, nil
}

func (r *replicaSets) list(namespace string) ([]*set, error) {
	list, err := r.lister.ReplicaSets(namespace).List(labels.Everything())
	out := make([]*set, len(list))
	for i, rs := range list {
		out[i] = &set{rs, rs}
	}
	return out, err
}

func (r *replicaSets) live(ctx context.Context, key loop.Key) (metav1.Object, error) {
	return r.client.AppsV1().ReplicaSets(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
}

func (r *replicaSets) updateStatus(ctx context.Context, s *set, status appsv1.ReplicaSetStatus) error {
	if apiequality.Semantic.DeepEqual(status, s.Status) {
		return nil
	}
	updated := s.ReplicaSet.DeepCopy()
	updated.Status = status
	_, err := r.client.AppsV1().ReplicaSets(s.Namespace).UpdateStatus(ctx, updated, metav1.UpdateOptions{})
	return err
}

func (r *replicaSets) siblings(s *set) (out []types.UID) {
	ref := metav1.GetControllerOf(s)
	if ref == nil {
		return nil
	}
	all, err := owned.By[appsv1.ReplicaSet](r.informs.GetIndexer(), ref.UID)
	if err != nil {
		return nil
	}
	for _, other := range all {
		if other.UID != s.UID {
			out = append(out, other.UID)
		}
	}
	return out
}

// objectOrNil keeps a nil pointer from becoming an interface that is not nil.
func objectOrNil[T any, P interface {
	*T
	metav1.Object
}](o P) metav1.Object {
	if o == nil {
		return nil
	}
	return o
}
