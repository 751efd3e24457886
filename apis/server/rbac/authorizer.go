// Package rbac decides by the stored Roles, ClusterRoles and their bindings who
// may do what, keeps their writers from granting more than they hold, and makes
// the roles that every cluster has. It denies nothing: where no rule permits it
// has no opinion.
package rbac

import (
	"context"
	"fmt"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// Policy is what is stored. It is called on every request, from many
// goroutines, must not block, and its results are read-only. A missing role is
// a NotFound StatusError.
type Policy interface {
	ClusterRole(name string) (*rbacv1.ClusterRole, error)
	Role(namespace, name string) (*rbacv1.Role, error)
	// ClusterBindings and Bindings are those that name u or a group of u.
	ClusterBindings(u user.Info) []*rbacv1.ClusterRoleBinding
	Bindings(u user.Info, namespace string) []*rbacv1.RoleBinding
}

// Authorizer decides by a Policy. It also lists rules for `kubectl auth can-i
// --list`.
type Authorizer struct{ policy Policy }

var (
	_ authorizer.Authorizer   = &Authorizer{}
	_ authorizer.RuleResolver = &Authorizer{}
)

// NewAuthorizer makes an authorizer over policy.
func NewAuthorizer(policy Policy) *Authorizer { return &Authorizer{policy: policy} }

// Authorize allows what a rule permits and says which binding gave the rule.
func (z *Authorizer) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	var by string
	faults := z.visit(a.GetUser(), a.GetNamespace(), func(rule *rbacv1.PolicyRule, source func() string) bool {
		if !Allows(a, rule) {
			return true
		}
		by = source()
		return false
	})
	if by != "" {
		return authorizer.DecisionAllow, "RBAC: allowed by " + by, nil
	}
	if len(faults) > 0 {
		// A binding of a role that does not exist grants nothing and says so:
		// it is the usual mistake.
		return authorizer.DecisionNoOpinion, fmt.Sprintf("RBAC: %v", errors.NewAggregate(faults)), nil
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// ConditionsAwareAuthorize is Authorize: no rule depends on content.
func (z *Authorizer) ConditionsAwareAuthorize(ctx context.Context, a authorizer.Attributes) authorizer.ConditionsAwareDecision {
	return authorizer.ConditionsAwareDecisionFromParts(z.Authorize(ctx, a))
}

// EvaluateConditions denies: this authorizer makes no conditional decisions.
func (z *Authorizer) EvaluateConditions(context.Context, authorizer.ConditionsAwareDecision, authorizer.ConditionsData) (authorizer.Decision, string, error) {
	return authorizer.DecisionDeny, "", authorizer.ErrorConditionEvaluationNotSupported
}

// RulesFor lists what u may do in namespace.
func (z *Authorizer) RulesFor(_ context.Context, u user.Info, namespace string) ([]authorizer.ResourceRuleInfo, []authorizer.NonResourceRuleInfo, bool, error) {
	var resources []authorizer.ResourceRuleInfo
	var paths []authorizer.NonResourceRuleInfo
	rules, err := z.Rules(u, namespace)
	for _, rule := range rules {
		if len(rule.Resources) > 0 {
			resources = append(resources, &authorizer.DefaultResourceRuleInfo{
				Verbs: rule.Verbs, APIGroups: rule.APIGroups, Resources: rule.Resources, ResourceNames: rule.ResourceNames})
		}
		if len(rule.NonResourceURLs) > 0 {
			paths = append(paths, &authorizer.DefaultNonResourceRuleInfo{Verbs: rule.Verbs, NonResourceURLs: rule.NonResourceURLs})
		}
	}
	return resources, paths, false, err
}

// Rules lists the rules that u has in namespace ("": in the whole cluster).
// With an error the list is incomplete.
func (z *Authorizer) Rules(u user.Info, namespace string) ([]rbacv1.PolicyRule, error) {
	var rules []rbacv1.PolicyRule
	faults := z.visit(u, namespace, func(rule *rbacv1.PolicyRule, _ func() string) bool {
		rules = append(rules, *rule)
		return true
	})
	return rules, errors.NewAggregate(faults)
}

// rolesOf are the rules of the role that a binding in namespace refers to.
func (z *Authorizer) rolesOf(ref rbacv1.RoleRef, namespace string) ([]rbacv1.PolicyRule, error) {
	switch ref.Kind {
	case "ClusterRole":
		role, err := z.policy.ClusterRole(ref.Name)
		if err != nil {
			return nil, err
		}
		return role.Rules, nil
	case "Role":
		role, err := z.policy.Role(namespace, ref.Name)
		if err != nil {
			return nil, err
		}
		return role.Rules, nil
	}
	return nil, fmt.Errorf("unsupported role reference kind: %q", ref.Kind)
}

// visit calls see for every rule of u until it returns false, and returns what
// could not be resolved.
func (z *Authorizer) visit(u user.Info, namespace string, see func(rule *rbacv1.PolicyRule, source func() string) bool) []error {
	if u == nil {
		return nil
	}
	var faults []error
	for _, binding := range z.policy.ClusterBindings(u) {
		rules, err := z.rolesOf(binding.RoleRef, "")
		if err != nil {
			faults = append(faults, err)
		}
		source := func() string {
			return fmt.Sprintf("ClusterRoleBinding %q of %s %q to %s", binding.Name, binding.RoleRef.Kind, binding.RoleRef.Name, subject(u, binding.Subjects, ""))
		}
		for i := range rules {
			if !see(&rules[i], source) {
				return nil
			}
		}
	}
	if namespace == "" {
		return faults
	}
	for _, binding := range z.policy.Bindings(u, namespace) {
		rules, err := z.rolesOf(binding.RoleRef, namespace)
		if err != nil {
			faults = append(faults, err)
		}
		source := func() string {
			return fmt.Sprintf("RoleBinding \"%s/%s\" of %s %q to %s", binding.Name, binding.Namespace, binding.RoleRef.Kind, binding.RoleRef.Name, subject(u, binding.Subjects, namespace))
		}
		for i := range rules {
			if !see(&rules[i], source) {
				return nil
			}
		}
	}
	return faults
}

// subject describes which of subjects u is.
func subject(u user.Info, subjects []rbacv1.Subject, namespace string) string {
	keys := keysOf(u)
	for _, s := range subjects {
		key := keyOf(s, namespace)
		for _, k := range keys {
			if k != key {
				continue
			}
			if s.Kind == rbacv1.ServiceAccountKind {
				return fmt.Sprintf("ServiceAccount \"%s/%s\"", s.Name, orElse(s.Namespace, namespace))
			}
			return fmt.Sprintf("%s %q", s.Kind, s.Name)
		}
	}
	return fmt.Sprintf("User %q", u.GetName())
}

func orElse(a, b string) string {
	if a == "" {
		return b
	}
	return a
}
