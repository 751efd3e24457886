package auth

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// Authorizer decides by the fixed grants and, for nodes, by the pods bound to
// them. It also lists the rules of a user for `kubectl auth can-i --list`.
type Authorizer struct{ pods Pods }

var (
	_ authorizer.Authorizer   = &Authorizer{}
	_ authorizer.RuleResolver = &Authorizer{}
)

// NewAuthorizer makes an authorizer that asks pods what is bound to a node.
func NewAuthorizer(pods Pods) *Authorizer { return &Authorizer{pods: pods} }

// Authorize allows, or has no opinion: nothing is forbidden that another
// authorizer beside this one could not permit.
func (z *Authorizer) Authorize(ctx context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	u := a.GetUser()
	if u == nil {
		return authorizer.DecisionNoOpinion, "no user", nil
	}
	if slices.Contains(u.GetGroups(), user.SystemPrivilegedGroup) {
		return authorizer.DecisionAllow, "", nil
	}
	for _, rule := range rulesOf(u) {
		if rule.allows(a) {
			return authorizer.DecisionAllow, "", nil
		}
	}
	if node, ok := NodeName(u); ok {
		return z.authorizeNode(ctx, node, a)
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// ConditionsAwareAuthorize is Authorize: no decision depends on content.
func (z *Authorizer) ConditionsAwareAuthorize(ctx context.Context, a authorizer.Attributes) authorizer.ConditionsAwareDecision {
	return authorizer.ConditionsAwareDecisionFromParts(z.Authorize(ctx, a))
}

// EvaluateConditions denies: this authorizer makes no conditional decisions.
func (z *Authorizer) EvaluateConditions(context.Context, authorizer.ConditionsAwareDecision, authorizer.ConditionsData) (authorizer.Decision, string, error) {
	return authorizer.DecisionDeny, "", authorizer.ErrorConditionEvaluationNotSupported
}

// RulesFor lists what u may do in namespace. For nodes the list is incomplete:
// what they may read depends on their pods.
func (z *Authorizer) RulesFor(_ context.Context, u user.Info, namespace string) ([]authorizer.ResourceRuleInfo, []authorizer.NonResourceRuleInfo, bool, error) {
	if u == nil {
		return nil, nil, false, fmt.Errorf("rules of nobody: no user given")
	}
	rules := rulesOf(u)
	if slices.Contains(u.GetGroups(), user.SystemPrivilegedGroup) {
		rules = append(rules,
			Rule{Verbs: any_, Groups: any_, Resources: any_},
			Rule{Verbs: any_, Paths: any_})
	}
	var resources []authorizer.ResourceRuleInfo
	var paths []authorizer.NonResourceRuleInfo
	for _, rule := range rules {
		switch {
		case len(rule.Paths) > 0:
			paths = append(paths, &authorizer.DefaultNonResourceRuleInfo{Verbs: rule.Verbs, NonResourceURLs: rule.Paths})
		case rule.Namespace == "" || rule.Namespace == namespace:
			resources = append(resources, &authorizer.DefaultResourceRuleInfo{
				Verbs: rule.Verbs, APIGroups: rule.Groups, Resources: rule.Resources, ResourceNames: rule.Names})
		}
	}
	_, incomplete := NodeName(u)
	return resources, paths, incomplete, nil
}
