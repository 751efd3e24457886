package server

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/server/admission/namespacelifecycle"
	"github.com/clusterd/clusterd/apis/server/rbac"
)

// seedAtOnce is how many objects of a new cluster are created at once: the store puts
// writes that meet into one entry of its log.
const seedAtOnce = 32

// seed creates the objects that every cluster starts with, if the store has none of
// them, and returns when the loops that keep them may start. These compare and repair
// what they find, at each start; in a new cluster they would find nothing, and each of
// about 150 objects would be a request of its own through the whole handler chain, half
// of the CPU time of a server's first seconds. So seed writes to the stores, by the same
// strategies (defaults, validation), but without admission, audit and managed fields. A
// failure is left to the loops.
func (s *Server) seed(ctx context.Context, stores *stores) {
	defer close(s.seeded)
	fresh, err := stores.fresh(ctx)
	if err != nil || !fresh {
		return // err: ctx has ended
	}
	ctx = request.WithUser(ctx, &user.DefaultInfo{Name: user.APIServerUser, Groups: []string{user.SystemPrivilegedGroup}})
	if err := stores.seed(ctx); err != nil {
		klog.FromContext(ctx).V(2).Info("Objects of a new cluster not all created, the rest is created one by one", "err", err)
	}
	if err := s.seedServices(ctx); err != nil {
		klog.FromContext(ctx).V(2).Info("APIServices of a new cluster not all created, the rest is created one by one", "err", err)
	}
}

var clusterRoles = rbacv1.Resource("clusterroles")

// fresh reports whether no server has written the default roles yet. What this process
// knows is enough to deny it; to affirm it the newest state is read, which takes a
// leader. It returns an error when ctx ends.
func (s *stores) fresh(ctx context.Context) (bool, error) {
	var fresh bool
	backoff := wait.Backoff{Duration: 5 * time.Millisecond, Factor: 1.5, Jitter: 0.2, Steps: 14, Cap: time.Second}
	for {
		err := s.ready()
		for _, version := range []string{"0", ""} {
			if err != nil {
				break
			}
			var list runtime.Object
			list, err = s.byName[clusterRoles].List(lookup(ctx, clusterRoles, ""), &internalversion.ListOptions{ResourceVersion: version, Limit: 1})
			if err == nil {
				if fresh = meta.LenList(list) == 0; !fresh {
					return false, nil
				}
			}
		}
		if err == nil {
			return fresh, nil
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(backoff.Step()):
		}
	}
}

// seed creates what is missing of the default objects of our own kinds.
func (s *stores) seed(ctx context.Context) error {
	var first, rest []seedObject
	for _, name := range namespacelifecycle.Immortal {
		first = append(first, seedObject{corev1.Resource("namespaces"), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}})
	}
	rest = appendSeeds(rest, flowcontrolv1.Resource("prioritylevelconfigurations"), bootstrap.MandatoryPriorityLevelConfigurations)
	rest = appendSeeds(rest, flowcontrolv1.Resource("prioritylevelconfigurations"), bootstrap.SuggestedPriorityLevelConfigurations)
	rest = appendSeeds(rest, flowcontrolv1.Resource("flowschemas"), bootstrap.MandatoryFlowSchemas)
	rest = appendSeeds(rest, flowcontrolv1.Resource("flowschemas"), bootstrap.SuggestedFlowSchemas)
	rest = appendSeeds(rest, rbacv1.Resource("roles"), pointers(rbac.Roles()))
	rest = appendSeeds(rest, rbacv1.Resource("clusterrolebindings"), pointers(rbac.ClusterRoleBindings()))
	roles := appendSeeds(nil, clusterRoles, pointers(rbac.ClusterRoles()))
	// Cluster roles last: fresh asks for them, so that a start that was cut short is repeated.
	for _, seeds := range [][]seedObject{first, rest, roles} {
		group, ctx := errgroup.WithContext(ctx)
		group.SetLimit(seedAtOnce)
		for _, one := range seeds {
			group.Go(func() error { return s.create(ctx, one) })
		}
		if err := group.Wait(); err != nil {
			return err
		}
	}
	return nil
}

// seedObject is an object of a new cluster.
type seedObject struct {
	resource schema.GroupResource
	object   interface {
		runtime.Object
		metav1.Object
	}
}

func appendSeeds[T interface {
	runtime.Object
	metav1.Object
}](all []seedObject, resource schema.GroupResource, objects []T) []seedObject {
	for _, o := range objects {
		all = append(all, seedObject{resource, o})
	}
	return all
}

func pointers[T any](values []T) []*T {
	all := make([]*T, len(values))
	for i := range values {
		all[i] = &values[i]
	}
	return all
}

// create makes one object, unless it is there.
func (s *stores) create(ctx context.Context, one seedObject) error {
	obj := one.object.DeepCopyObject() // the library's are shared
	apis.Scheme.Default(obj)
	_, err := s.byName[one.resource].Create(lookup(ctx, one.resource, one.object.GetNamespace()), obj, rest.ValidateAllObjectFunc, &metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create %s %s: %w", one.resource, one.object.GetName(), err)
	}
	return nil
}

// whenSeeded runs a loop that keeps default objects once seed has returned.
func (s *Server) whenSeeded(run func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-s.seeded:
			return run(ctx)
		case <-ctx.Done():
			return nil
		}
	}
}
