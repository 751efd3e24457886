// Package storagemigration carries out StorageVersionMigrations: it writes each
// object of a resource once, unchanged, so that the store holds all of them in
// the form in which it would store them today: the storage version of a custom
// kind, the newest key of what is encrypted.
package storagemigration

import (
	"context"
	"fmt"
	"slices"
	"time"

	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	storagemigrationlisters "k8s.io/client-go/listers/storagemigration/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/internal/served"
	"github.com/clusterd/clusterd/sched/loop"
)

const (
	// settle is how long a migration waits before the first write: every server
	// has seen by then how the resource is stored since its definition changed.
	settle = 5 * time.Second
	// unknownFor is how long a resource may be unknown until the migration fails;
	// lookAgain is how often it is looked for.
	unknownFor = time.Minute
	lookAgain  = 2 * time.Second
	// page is how many objects are listed at a time.
	page = 500

	manager = "storage-version-migrator-controller"
)

var definitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

type controller struct {
	*loop.Controller
	client     kubernetes.Interface
	metadata   metadata.Interface
	custom     dynamic.Interface
	migrations storagemigrationlisters.StorageVersionMigrationLister
	clock      clock.PassiveClock
	// again looks at a key after some time.
	again func(key loop.Key, in time.Duration)
}

// New returns the loop. Its keys are names of StorageVersionMigrations, of which
// one is carried out at a time: they only ever make more writes.
func New(env loop.Env, metadata metadata.Interface, custom dynamic.Interface) loop.Loop {
	migrations := env.Informers.Storagemigration().V1().StorageVersionMigrations()
	c := &controller{client: env.Client, metadata: metadata, custom: custom, migrations: migrations.Lister(), clock: env.Clock}
	c.Controller = loop.New("storagemigration", env, 1, c.reconcile)
	c.again = c.EnqueueAfter
	loop.Watch(c.Controller, migrations.Informer(), func(_, m *storagemigrationv1.StorageVersionMigration) {
		if m != nil && !ended(m) {
			c.Enqueue(loop.KeyOf(m))
		}
	})
	return c.Loop()
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	m, err := c.migrations.Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	step, wait := next(m, c.clock.Now())
	switch step {
	case over:
		return nil
	case settleDown:
		c.again(key, wait)
		return nil
	case announce:
		if err := c.patchDefinition(ctx, m, func(d *unstructured.Unstructured) ([]byte, error) { return begun(d, m.Name, c.clock.Now()) }); err != nil {
			return err
		}
		_, err := c.write(ctx, runs(m, "The migration is running", c.clock.Now()))
		return err
	}

	resource, fault, err := c.resourceOf(ctx, m)
	switch {
	case err != nil:
		return err
	case fault != "":
		return c.end(ctx, m, fault, "")
	case resource.Empty():
		c.again(key, lookAgain)
		return nil
	}
	if step == mark {
		return c.mark(ctx, m, resource)
	}
	return c.rewrite(ctx, m, resource)
}

// resourceOf is what m is about. If that is not known for sure, either fault says
// why there is no such thing, or the resource is empty: it may come.
func (c *controller) resourceOf(ctx context.Context, m *storagemigrationv1.StorageVersionMigration) (schema.GroupVersionResource, string, error) {
	all, failed := served.Resources(ctx, c.client.Discovery())
	i := slices.IndexFunc(all, func(r served.Resource) bool {
		return r.Group == m.Spec.Resource.Group && r.Resource == m.Spec.Resource.Resource
	})
	switch {
	case i >= 0 && all[i].Can("list") && all[i].Can("patch"):
		return all[i].GroupVersionResource, "", nil
	case i >= 0:
		return schema.GroupVersionResource{}, fmt.Sprintf("spec.resource: %s cannot be listed and patched: what is not stored cannot be migrated", m.Spec.Resource.String()), nil
	case len(failed) > 0:
		return schema.GroupVersionResource{}, "", fmt.Errorf("find %s: %w", m.Spec.Resource.String(), failed[0])
	case c.clock.Since(m.CreationTimestamp.Time) < unknownFor:
		return schema.GroupVersionResource{}, "", nil
	}
	return schema.GroupVersionResource{}, fmt.Sprintf("spec.resource: the server knows no %s: give the plural name and the group, as kubectl api-resources does", m.Spec.Resource.String()), nil
}

// mark notes the present revision: what is written later needs no migration, and
// a new leader goes on where the one before was.
func (c *controller) mark(ctx context.Context, m *storagemigrationv1.StorageVersionMigration, resource schema.GroupVersionResource) error {
	list, err := c.metadata.Resource(resource).List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return fmt.Errorf("list %s: %w", resource.GroupResource(), err)
	}
	if _, err := newer(list.ResourceVersion, list.ResourceVersion); err != nil {
		return c.end(ctx, m, fmt.Sprintf("the resource versions of %s have no order: %v", resource.GroupResource(), err), "")
	}
	m = m.DeepCopy()
	m.Status.ResourceVersion = list.ResourceVersion
	_, err = c.write(ctx, m)
	return err
}

// rewrite writes every object that was written last before the mark.
func (c *controller) rewrite(ctx context.Context, m *storagemigrationv1.StorageVersionMigration, resource schema.GroupVersionResource) error {
	api := c.metadata.Resource(resource)
	done := 0
	for from := ""; ; {
		list, err := api.List(ctx, metav1.ListOptions{Limit: page, Continue: from})
		if err != nil {
			return fmt.Errorf("list %s: %w", resource.GroupResource(), err)
		}
		for i := range list.Items {
			object := &list.Items[i]
			if after, err := newer(object.ResourceVersion, m.Status.ResourceVersion); err != nil || after {
				if err != nil {
					return c.end(ctx, m, fmt.Sprintf("%s %s: %v", resource.GroupResource(), klog.KObj(object), err), "")
				}
				continue
			}
			patch, err := touch(object.ResourceVersion)
			if err != nil {
				return err
			}
			_, err = api.Namespace(object.Namespace).Patch(ctx, object.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: manager})
			switch {
			case err == nil:
				done++
			case apierrors.IsConflict(err), apierrors.IsNotFound(err):
				// Another client has written or deleted it.
			case final(err):
				return c.end(ctx, m, fmt.Sprintf("%s %s cannot be written, mend or delete it and make another StorageVersionMigration: %v", resource.GroupResource(), klog.KObj(object), err), "")
			default:
				err = fmt.Errorf("write %s %s: %w", resource.GroupResource(), klog.KObj(object), err)
				// What is in the way is said where its author looks; it passes, or is mended.
				if _, failed := c.write(ctx, runs(m, fmt.Sprintf("The migration is running; transient error: %v", err), c.clock.Now())); failed != nil {
					klog.FromContext(ctx).V(2).Info("migration not described", "migration", m.Name, "err", failed)
				}
				return err
			}
		}
		if from = list.Continue; from == "" {
			return c.end(ctx, m, "", fmt.Sprintf("Migration completed: %d objects written, the others had been written since it began", done))
		}
		if m, err = c.write(ctx, runs(m, fmt.Sprintf("The migration is running, %d objects written", done), c.clock.Now())); err != nil || m == nil {
			return err
		}
	}
}

// end tells the definition, if there is one, and then the migration that it is over.
func (c *controller) end(ctx context.Context, m *storagemigrationv1.StorageVersionMigration, fault, message string) error {
	err := c.patchDefinition(ctx, m, func(d *unstructured.Unstructured) ([]byte, error) { return finished(d, fault == "", c.clock.Now()) })
	if err != nil {
		return err
	}
	_, err = c.write(ctx, ends(m, fault, message, c.clock.Now()))
	return err
}

// patchDefinition patches the status of the definition whose objects m is about,
// if they have one. A conflict is decided again.
func (c *controller) patchDefinition(ctx context.Context, m *storagemigrationv1.StorageVersionMigration, decide func(*unstructured.Unstructured) ([]byte, error)) error {
	if m.Spec.Resource.Group == "" {
		return nil
	}
	api := c.custom.Resource(definitions)
	definition, err := api.Get(ctx, m.Spec.Resource.Resource+"."+m.Spec.Resource.Group, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the CustomResourceDefinition of %s: %w", m.Spec.Resource.String(), err)
	}
	patch, err := decide(definition)
	if patch == nil || err != nil {
		return err
	}
	_, err = api.Patch(ctx, definition.GetName(), types.MergePatchType, patch, metav1.PatchOptions{FieldManager: manager}, "status")
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("status of CustomResourceDefinition %s: %w", definition.GetName(), err)
	}
	return nil
}

// write writes m's status; nil: m is gone.
func (c *controller) write(ctx context.Context, m *storagemigrationv1.StorageVersionMigration) (*storagemigrationv1.StorageVersionMigration, error) {
	updated, err := c.client.StoragemigrationV1().StorageVersionMigrations().UpdateStatus(ctx, m, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("status of StorageVersionMigration %s: %w", m.Name, err)
	}
	return updated, nil
}
