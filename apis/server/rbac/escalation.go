package rbac

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/component-helpers/auth/rbac/validation"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/apis/server/resource"
)

// Guarded is the store of a kind that grants: a write passes only if its
// author holds all that it grants, or may "escalate" the role or "bind" the
// role that is bound.
type Guarded struct {
	*resource.Store
	check func(ctx context.Context, obj, old runtime.Object) error
}

// Guard puts the check of its kind before store; nil: the kind grants nothing.
func Guard(store *resource.Store, rules *Authorizer, z authorizer.UnconditionalAuthorizer) *Guarded {
	g := guard{rules: rules, authorizer: z}
	checks := map[string]func(context.Context, runtime.Object, runtime.Object) error{
		"Role": g.role, "ClusterRole": g.clusterRole, "RoleBinding": g.binding, "ClusterRoleBinding": g.clusterBinding,
	}
	gvk := store.Kind().GVK
	check, ok := checks[gvk.Kind]
	if gvk.Group != rbacv1.GroupName || !ok {
		return nil
	}
	return &Guarded{Store: store, check: check}
}

// Create implements rest.Creater.
func (s *Guarded) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc, options *metav1.CreateOptions) (runtime.Object, error) {
	if err := s.check(ctx, obj, nil); err != nil {
		return nil, err
	}
	return s.Store.Create(ctx, obj, validate, options)
}

// Update implements rest.Updater; it also serves patches and applies.
func (s *Guarded) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc, update rest.ValidateObjectUpdateFunc, forceCreate bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	checked := rest.WrapUpdatedObjectInfo(info, func(ctx context.Context, obj, old runtime.Object) (runtime.Object, error) {
		return obj, s.check(ctx, obj, old)
	})
	return s.Store.Update(ctx, name, checked, create, update, forceCreate, options)
}

// guard is the checks.
type guard struct {
	rules      *Authorizer
	authorizer authorizer.UnconditionalAuthorizer
}

func (g guard) role(ctx context.Context, obj, old runtime.Object) error {
	role := obj.(*rbacv1.Role)
	was, _ := old.(*rbacv1.Role)
	if was != nil && (equality.Semantic.DeepEqual(was.Rules, role.Rules) || onlyOwnersChanged(role, was)) {
		return nil
	}
	name := rbacv1.Resource("roles")
	if free, err := g.may(ctx, "escalate", name, role.Namespace, role.Name); free || err != nil {
		return err
	}
	return g.holds(ctx, role.Rules, namespaceOf(ctx, role.Namespace), name, role.Name)
}

func (g guard) clusterRole(ctx context.Context, obj, old runtime.Object) error {
	role := obj.(*rbacv1.ClusterRole)
	was, _ := old.(*rbacv1.ClusterRole)
	if was != nil && (equality.Semantic.DeepEqual(was.Rules, role.Rules) && equality.Semantic.DeepEqual(was.AggregationRule, role.AggregationRule) || onlyOwnersChanged(role, was)) {
		return nil
	}
	name := rbacv1.Resource("clusterroles")
	if free, err := g.may(ctx, "escalate", name, "", role.Name); free || err != nil {
		return err
	}
	// Who chooses which roles flow into another one grants whatever they will
	// ever hold.
	if role.AggregationRule != nil || was != nil && was.AggregationRule != nil {
		if err := g.holds(ctx, everything, "", name, role.Name); err != nil {
			return apierrors.NewForbidden(name, role.Name, errors.New("must have cluster-admin privileges to use an aggregationRule"))
		}
	}
	return g.holds(ctx, role.Rules, "", name, role.Name)
}

// everything is the whole authority over a cluster.
var everything = []rbacv1.PolicyRule{
	{Verbs: []string{"*"}, APIGroups: []string{"*"}, Resources: []string{"*"}},
	{Verbs: []string{"*"}, NonResourceURLs: []string{"*"}},
}

func (g guard) binding(ctx context.Context, obj, old runtime.Object) error {
	binding := obj.(*rbacv1.RoleBinding)
	was, _ := old.(*rbacv1.RoleBinding)
	if was != nil && (sameGrant(binding.RoleRef, was.RoleRef, binding.Subjects, was.Subjects) || onlyOwnersChanged(binding, was)) {
		return nil
	}
	return g.binds(ctx, binding.RoleRef, namespaceOf(ctx, binding.Namespace), rbacv1.Resource("rolebindings"), binding.Name)
}

func (g guard) clusterBinding(ctx context.Context, obj, old runtime.Object) error {
	binding := obj.(*rbacv1.ClusterRoleBinding)
	was, _ := old.(*rbacv1.ClusterRoleBinding)
	if was != nil && (sameGrant(binding.RoleRef, was.RoleRef, binding.Subjects, was.Subjects) || onlyOwnersChanged(binding, was)) {
		return nil
	}
	return g.binds(ctx, binding.RoleRef, "", rbacv1.Resource("clusterrolebindings"), binding.Name)
}

func sameGrant(role, oldRole rbacv1.RoleRef, subjects, oldSubjects []rbacv1.Subject) bool {
	return role == oldRole && equality.Semantic.DeepEqual(subjects, oldSubjects)
}

func (g guard) binds(ctx context.Context, ref rbacv1.RoleRef, namespace string, binding schema.GroupResource, name string) error {
	of, in := rbacv1.Resource("clusterroles"), namespace
	if ref.Kind == "Role" {
		of = rbacv1.Resource("roles")
	}
	if free, err := g.may(ctx, "bind", of, in, ref.Name); free || err != nil {
		return err
	}
	rules, err := g.rules.rolesOf(ref, namespace)
	if err != nil && !apierrors.IsNotFound(err) {
		return apierrors.NewInternalError(err)
	}
	if err != nil {
		return err
	}
	return g.holds(ctx, rules, namespace, binding, name)
}

// may reports whether the author of the request has a verb that waives the
// check: it is asked of the whole chain of authorizers, so that a webhook may
// give it too.
func (g guard) may(ctx context.Context, verb string, what schema.GroupResource, namespace, name string) (bool, error) {
	u, ok := request.UserFrom(ctx)
	if !ok {
		return false, apierrors.NewForbidden(what, name, errors.New("no user on the request"))
	}
	if slices.Contains(u.GetGroups(), user.SystemPrivilegedGroup) {
		return true, nil
	}
	decision, _, err := g.authorizer.Authorize(ctx, authorizer.AttributesRecord{
		User: u, Verb: verb, APIGroup: what.Group, APIVersion: "*", Resource: what.Resource,
		Namespace: namespace, Name: name, ResourceRequest: true,
	})
	if decision == authorizer.DecisionAllow {
		return true, nil
	}
	if err != nil {
		// Not knowing is no leave: the check follows.
		klog.FromContext(ctx).V(2).Info("Could not authorize", "verb", verb, "resource", what, "name", name, "err", err)
	}
	return false, nil
}

// holds is nil if the author of the request holds all of rules in namespace.
func (g guard) holds(ctx context.Context, rules []rbacv1.PolicyRule, namespace string, what schema.GroupResource, name string) error {
	u, ok := request.UserFrom(ctx)
	if !ok {
		return apierrors.NewForbidden(what, name, errors.New("no user on the request"))
	}
	own, err := g.rules.Rules(u, namespace)
	covered, missing := validation.Covers(own, rules)
	if covered {
		return nil
	}
	said := make([]string, len(missing))
	for i, rule := range missing {
		said[i] = compact(rule)
	}
	slices.Sort(said)
	message := fmt.Sprintf("user %q (groups=%q) is attempting to grant RBAC permissions not currently held:\n%s", u.GetName(), u.GetGroups(), strings.Join(slices.Compact(said), "\n"))
	if err != nil {
		message += fmt.Sprintf("; resolution errors: %v", err)
	}
	return apierrors.NewForbidden(what, name, errors.New(message))
}

// compact writes a rule on one line, without what it leaves empty.
func compact(rule rbacv1.PolicyRule) string {
	var parts []string
	for _, field := range []struct {
		name   string
		values []string
	}{
		{"APIGroups", rule.APIGroups}, {"Resources", rule.Resources}, {"ResourceNames", rule.ResourceNames},
		{"NonResourceURLs", rule.NonResourceURLs}, {"Verbs", rule.Verbs},
	} {
		if len(field.values) > 0 {
			parts = append(parts, fmt.Sprintf("%s:%s", field.name, quoted(field.values)))
		}
	}
	return "{" + strings.Join(parts, ", ") + "}"
}

func quoted(values []string) string {
	q := make([]string, len(values))
	for i, v := range values {
		q[i] = fmt.Sprintf("%q", v)
	}
	return "[" + strings.Join(q, ", ") + "]"
}

// onlyOwnersChanged lets the garbage collector, which holds none of what it
// collects, write owners and finalizers.
func onlyOwnersChanged(obj, old runtime.Object) bool {
	now, was := obj.DeepCopyObject(), old.DeepCopyObject()
	for _, o := range []runtime.Object{now, was} {
		m, err := meta.Accessor(o)
		if err != nil {
			return false
		}
		m.SetOwnerReferences(nil)
		m.SetFinalizers(nil)
		m.SetManagedFields(nil)
		m.SetResourceVersion("")
	}
	return equality.Semantic.DeepEqual(now, was)
}

// namespaceOf is the namespace of the request, or of an object that says so.
func namespaceOf(ctx context.Context, object string) string {
	if ns, ok := request.NamespaceFrom(ctx); ok && ns != "" {
		return ns
	}
	return object
}
