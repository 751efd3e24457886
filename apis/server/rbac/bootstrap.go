package rbac

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	typed "k8s.io/client-go/kubernetes/typed/rbac/v1"
	"k8s.io/component-helpers/auth/rbac/reconciliation"
	"k8s.io/klog/v2"
)

// writers is how many roles are written at once: the store puts writes that
// meet into one entry of its log.
const writers = 16

// Bootstrap makes the roles that every cluster has, at each start: what is
// missing is added, what is not ours stays. A role is left alone when
// it says so in its annotation rbac.authorization.kubernetes.io/autoupdate.
type Bootstrap struct {
	client kubernetes.Interface
	done   atomic.Bool
}

// NewBootstrap makes a Bootstrap that writes through client, which has to be
// a member of system:masters: no other user holds all that is granted.
func NewBootstrap(client kubernetes.Interface) *Bootstrap { return &Bootstrap{client: client} }

// Done reports whether the roles were all there once.
func (b *Bootstrap) Done() bool { return b.done.Load() }

// Run blocks until the roles are there or ctx ends. The store may take no
// writes yet, and other servers may be at the same work.
func (b *Bootstrap) Run(ctx context.Context) error {
	backoff := wait.Backoff{Duration: 20 * time.Millisecond, Factor: 1.5, Jitter: 0.2, Steps: 10, Cap: time.Second}
	for {
		err := b.reconcile(ctx)
		if err == nil {
			b.done.Store(true)
			return nil
		}
		klog.FromContext(ctx).V(2).Info("Default roles not reconciled yet, trying again", "err", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(backoff.Step()):
		}
	}
}

func (b *Bootstrap) reconcile(ctx context.Context) error {
	api := b.client.RbacV1()
	roles, err := api.ClusterRoles().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list cluster roles: %w", err)
	}
	bindings, err := api.ClusterRoleBindings().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list cluster role bindings: %w", err)
	}
	knownRoles, knownBindings := map[string]*rbacv1.ClusterRole{}, map[string]*rbacv1.ClusterRoleBinding{}
	for i := range roles.Items {
		knownRoles[roles.Items[i].Name] = &roles.Items[i]
	}
	for i := range bindings.Items {
		knownBindings[bindings.Items[i].Name] = &bindings.Items[i]
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(writers)
	for _, role := range ClusterRoles() {
		group.Go(func() error {
			options := reconciliation.ReconcileRoleOptions{
				Role:    reconciliation.ClusterRoleRuleOwner{ClusterRole: &role},
				Confirm: true,
				Client:  roleWriter{ctx, api.ClusterRoles(), knownRoles},
			}
			if _, err := options.Run(); err != nil {
				return fmt.Errorf("cluster role %s: %w", role.Name, err)
			}
			return nil
		})
	}
	for _, role := range Roles() {
		group.Go(func() error {
			options := reconciliation.ReconcileRoleOptions{
				Role:    reconciliation.RoleRuleOwner{Role: &role},
				Confirm: true,
				Client:  namespacedWriter{ctx, api},
			}
			if _, err := options.Run(); err != nil {
				return fmt.Errorf("role %s/%s: %w", role.Namespace, role.Name, err)
			}
			return nil
		})
	}
	for _, binding := range ClusterRoleBindings() {
		group.Go(func() error {
			options := reconciliation.ReconcileRoleBindingOptions{
				RoleBinding: reconciliation.ClusterRoleBindingAdapter{ClusterRoleBinding: &binding},
				Confirm:     true,
				Client:      bindingWriter{ctx, api.ClusterRoleBindings(), knownBindings},
			}
			if _, err := options.Run(); err != nil {
				return fmt.Errorf("cluster role binding %s: %w", binding.Name, err)
			}
			return nil
		})
	}
	return group.Wait()
}

// roleWriter writes cluster roles of which it has read all before.
type roleWriter struct {
	ctx   context.Context
	api   typed.ClusterRoleInterface
	known map[string]*rbacv1.ClusterRole
}

// Get implements reconciliation.RuleOwnerModifier.
func (w roleWriter) Get(_, name string) (reconciliation.RuleOwner, error) {
	if role, ok := w.known[name]; ok {
		return reconciliation.ClusterRoleRuleOwner{ClusterRole: role.DeepCopy()}, nil
	}
	return nil, notFound("clusterroles", name)
}

// Create implements reconciliation.RuleOwnerModifier.
func (w roleWriter) Create(in reconciliation.RuleOwner) (reconciliation.RuleOwner, error) {
	role, err := w.api.Create(w.ctx, in.(reconciliation.ClusterRoleRuleOwner).ClusterRole, metav1.CreateOptions{})
	return reconciliation.ClusterRoleRuleOwner{ClusterRole: role}, retried(err)
}

// Update implements reconciliation.RuleOwnerModifier.
func (w roleWriter) Update(in reconciliation.RuleOwner) (reconciliation.RuleOwner, error) {
	role, err := w.api.Update(w.ctx, in.(reconciliation.ClusterRoleRuleOwner).ClusterRole, metav1.UpdateOptions{})
	return reconciliation.ClusterRoleRuleOwner{ClusterRole: role}, retried(err)
}

// namespacedWriter writes roles of namespaces.
type namespacedWriter struct {
	ctx context.Context
	api typed.RbacV1Interface
}

// Get implements reconciliation.RuleOwnerModifier.
func (w namespacedWriter) Get(namespace, name string) (reconciliation.RuleOwner, error) {
	role, err := w.api.Roles(namespace).Get(w.ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return reconciliation.RoleRuleOwner{Role: role}, nil
}

// Create implements reconciliation.RuleOwnerModifier.
func (w namespacedWriter) Create(in reconciliation.RuleOwner) (reconciliation.RuleOwner, error) {
	role, err := w.api.Roles(in.GetNamespace()).Create(w.ctx, in.(reconciliation.RoleRuleOwner).Role, metav1.CreateOptions{})
	return reconciliation.RoleRuleOwner{Role: role}, retried(err)
}

// Update implements reconciliation.RuleOwnerModifier.
func (w namespacedWriter) Update(in reconciliation.RuleOwner) (reconciliation.RuleOwner, error) {
	role, err := w.api.Roles(in.GetNamespace()).Update(w.ctx, in.(reconciliation.RoleRuleOwner).Role, metav1.UpdateOptions{})
	return reconciliation.RoleRuleOwner{Role: role}, retried(err)
}

// bindingWriter writes cluster role bindings of which it has read all before.
type bindingWriter struct {
	ctx   context.Context
	api   typed.ClusterRoleBindingInterface
	known map[string]*rbacv1.ClusterRoleBinding
}

// Get implements reconciliation.RoleBindingModifier.
func (w bindingWriter) Get(_, name string) (reconciliation.RoleBinding, error) {
	if binding, ok := w.known[name]; ok {
		return reconciliation.ClusterRoleBindingAdapter{ClusterRoleBinding: binding.DeepCopy()}, nil
	}
	return nil, notFound("clusterrolebindings", name)
}

// Delete implements reconciliation.RoleBindingModifier. A binding of another
// role under our name is replaced: its role cannot be changed.
func (w bindingWriter) Delete(_, name string, uid types.UID) error {
	return w.api.Delete(w.ctx, name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
}

// Create implements reconciliation.RoleBindingModifier.
func (w bindingWriter) Create(in reconciliation.RoleBinding) (reconciliation.RoleBinding, error) {
	binding, err := w.api.Create(w.ctx, in.(reconciliation.ClusterRoleBindingAdapter).ClusterRoleBinding, metav1.CreateOptions{})
	return reconciliation.ClusterRoleBindingAdapter{ClusterRoleBinding: binding}, retried(err)
}

// Update implements reconciliation.RoleBindingModifier.
func (w bindingWriter) Update(in reconciliation.RoleBinding) (reconciliation.RoleBinding, error) {
	binding, err := w.api.Update(w.ctx, in.(reconciliation.ClusterRoleBindingAdapter).ClusterRoleBinding, metav1.UpdateOptions{})
	return reconciliation.ClusterRoleBindingAdapter{ClusterRoleBinding: binding}, retried(err)
}

func notFound(plural, name string) error {
	return apierrors.NewNotFound(schema.GroupResource{Group: rbacv1.GroupName, Resource: plural}, name)
}

// errAgain is returned when another server wrote meanwhile: the next pass
// reads what it wrote.
var errAgain = errors.New("changed meanwhile")

// retried keeps the library from trying again with what was read before.
func retried(err error) error {
	if apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return fmt.Errorf("%w: %w", errAgain, errors.New(err.Error()))
	}
	return err
}
