package history

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/sched/internal/owned"
	"github.com/clusterd/clusterd/sched/internal/podctl"
	"github.com/clusterd/clusterd/sched/loop"
)

// Keeper carries out what this package's functions say, for all owners of one
// kind.
type Keeper struct {
	kind   schema.GroupVersionKind
	client kubernetes.Interface
	cached cache.Indexer
}

// NewKeeper returns a Keeper and indexes the informer of revisions, whose
// changes wake the owner.
func NewKeeper(env loop.Env, kind schema.GroupVersionKind) (*Keeper, error) {
	informer := env.Informers.Apps().V1().ControllerRevisions().Informer()
	if err := owned.Index(informer); err != nil {
		return nil, fmt.Errorf("index revisions by controller: %w", err)
	}
	return &Keeper{kind: kind, client: env.Client, cached: informer.GetIndexer()}, nil
}

// Watch makes every change of an owner's revisions call wake.
func (k *Keeper) Watch(controller *loop.Controller, env loop.Env, wake func(loop.Key)) {
	loop.Watch(controller, env.Informers.Apps().V1().ControllerRevisions().Informer(), func(old, r *appsv1.ControllerRevision) {
		if ref := metav1.GetControllerOf(loop.Latest(old, r)); ref != nil && ref.Kind == k.kind.Kind && ref.APIVersion == k.kind.GroupVersion().String() {
			wake(loop.Key{Namespace: loop.Latest(old, r).Namespace, Name: ref.Name})
		}
	})
}

// Owner is what a Keeper has to know about the owner of revisions.
type Owner struct {
	podctl.Owner
	Selector   *metav1.LabelSelector
	Template   *corev1.PodTemplateSpec
	Collisions *int32
	// Live reads the owner from the server.
	Live func(ctx context.Context) (metav1.Object, error)
}

// ErrCollision is returned when another object has the name that the new
// revision would get: the owner has to count it in its status, which changes
// the next name.
type ErrCollision struct{ Name string }

// Error implements error.
func (e *ErrCollision) Error() string {
	return fmt.Sprintf("revision %s exists and is another's", e.Name)
}

// Sync returns the owner's revisions, oldest first, and the one that holds its
// template, which it makes or renumbers as needed.
func (k *Keeper) Sync(ctx context.Context, owner Owner) (all []*appsv1.ControllerRevision, update *appsv1.ControllerRevision, err error) {
	all, err = k.claim(ctx, owner)
	if err != nil {
		return nil, nil, err
	}
	Sort(all)
	if owner.GetDeletionTimestamp() != nil {
		if step := Find(all, owner.Template); step.Found != nil {
			return all, step.Found, nil
		}
		return all, nil, nil
	}
	step := Find(all, owner.Template)
	switch {
	case step.Found == nil:
		if update, err = k.create(ctx, owner, step.Number); err != nil {
			return nil, nil, err
		}
		all = append(all, update)
	case step.Found.Revision != step.Number:
		renumbered := step.Found.DeepCopy()
		renumbered.Revision = step.Number
		if update, err = k.client.AppsV1().ControllerRevisions(renumbered.Namespace).Update(ctx, renumbered, metav1.UpdateOptions{}); err != nil {
			return nil, nil, fmt.Errorf("renumber revision %s: %w", renumbered.Name, err)
		}
		for i := range all {
			if all[i].UID == update.UID {
				all[i] = update
			}
		}
		Sort(all)
	default:
		update = step.Found
	}
	return all, update, nil
}

func (k *Keeper) claim(ctx context.Context, owner Owner) ([]*appsv1.ControllerRevision, error) {
	selector, err := metav1.LabelSelectorAsSelector(owner.Selector)
	if err != nil {
		return nil, fmt.Errorf("selector: %w", err)
	}
	candidates, err := owned.By[appsv1.ControllerRevision](k.cached, owner.GetUID())
	if err != nil {
		return nil, err
	}
	free, err := owned.Orphans[appsv1.ControllerRevision](k.cached, owner.GetNamespace())
	if err != nil {
		return nil, err
	}
	return owned.Claim(ctx, &owned.Claimer{
		Owner:    owner,
		Kind:     k.kind,
		Selector: selector,
		Live:     owner.Live,
		Patch: func(ctx context.Context, name string, patch []byte) error {
			_, err := k.client.AppsV1().ControllerRevisions(owner.GetNamespace()).Patch(ctx, name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
			return err
		},
	}, append(candidates, free...))
}

func (k *Keeper) create(ctx context.Context, owner Owner, number int64) (*appsv1.ControllerRevision, error) {
	revision, err := New(owner, k.kind, owner.Template, number, owner.Collisions)
	if err != nil {
		return nil, err
	}
	api := k.client.AppsV1().ControllerRevisions(revision.Namespace)
	stored, err := api.Create(ctx, revision, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		if err != nil {
			err = fmt.Errorf("create revision %s: %w", revision.Name, err)
		}
		return stored, err
	}
	live, err := api.Get(ctx, revision.Name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("read revision of the same name: %w", err)
	}
	if ref := metav1.GetControllerOf(live); ref != nil && ref.UID == owner.GetUID() && Same(live, owner.Template) {
		return live, nil // ours: the cache is behind
	}
	return nil, &ErrCollision{Name: revision.Name}
}

// Truncate deletes revisions.
func (k *Keeper) Truncate(ctx context.Context, surplus []*appsv1.ControllerRevision) error {
	for _, r := range surplus {
		err := k.client.AppsV1().ControllerRevisions(r.Namespace).Delete(ctx, r.Name, metav1.DeleteOptions{
			Preconditions: &metav1.Preconditions{UID: &r.UID, ResourceVersion: &r.ResourceVersion},
		})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete old revision %s: %w", r.Name, err)
		}
	}
	return nil
}
