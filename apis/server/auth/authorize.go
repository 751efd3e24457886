package auth

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// NodeAuthorizer decides for nodes, by the pods bound to them. It also lists
// their rules for `kubectl auth can-i --list`.
type NodeAuthorizer struct{ pods Pods }

var (
	_ authorizer.Authorizer   = &NodeAuthorizer{}
	_ authorizer.RuleResolver = &NodeAuthorizer{}
)

// NewNodeAuthorizer makes an authorizer that asks pods what is bound to a node.
func NewNodeAuthorizer(pods Pods) *NodeAuthorizer { return &NodeAuthorizer{pods: pods} }

// Authorize allows, or has no opinion: nothing is forbidden that another
// authorizer beside this one could not permit.
func (z *NodeAuthorizer) Authorize(ctx context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if node, ok := NodeName(a.GetUser()); ok {
		return z.authorizeNode(ctx, node, a)
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// ConditionsAwareAuthorize is Authorize: no decision depends on content.
func (z *NodeAuthorizer) ConditionsAwareAuthorize(ctx context.Context, a authorizer.Attributes) authorizer.ConditionsAwareDecision {
	return authorizer.ConditionsAwareDecisionFromParts(z.Authorize(ctx, a))
}

// EvaluateConditions denies: this authorizer makes no conditional decisions.
func (z *NodeAuthorizer) EvaluateConditions(context.Context, authorizer.ConditionsAwareDecision, authorizer.ConditionsData) (authorizer.Decision, string, error) {
	return authorizer.DecisionDeny, "", authorizer.ErrorConditionEvaluationNotSupported
}

// RulesFor lists what a node may do in namespace whatever runs on it. The list
// is incomplete: what else it may read depends on its pods.
func (z *NodeAuthorizer) RulesFor(_ context.Context, u user.Info, namespace string) ([]authorizer.ResourceRuleInfo, []authorizer.NonResourceRuleInfo, bool, error) {
	node, ok := NodeName(u)
	if !ok {
		return nil, nil, false, nil
	}
	var resources []authorizer.ResourceRuleInfo
	for _, rule := range nodeRules(node) {
		if rule.Namespace == "" || rule.Namespace == namespace {
			resources = append(resources, &authorizer.DefaultResourceRuleInfo{
				Verbs: rule.Verbs, APIGroups: rule.Groups, Resources: rule.Resources, ResourceNames: rule.Names})
		}
	}
	return resources, nil, true, nil
}

// Masters lets members of system:masters do anything, whatever is stored: it is
// how a cluster with broken roles is repaired.
type Masters struct{}

var (
	_ authorizer.Authorizer   = Masters{}
	_ authorizer.RuleResolver = Masters{}
)

// Authorize allows members of system:masters.
func (Masters) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if isMaster(a.GetUser()) {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// ConditionsAwareAuthorize is Authorize: no decision depends on content.
func (m Masters) ConditionsAwareAuthorize(ctx context.Context, a authorizer.Attributes) authorizer.ConditionsAwareDecision {
	return authorizer.ConditionsAwareDecisionFromParts(m.Authorize(ctx, a))
}

// EvaluateConditions denies: this authorizer makes no conditional decisions.
func (Masters) EvaluateConditions(context.Context, authorizer.ConditionsAwareDecision, authorizer.ConditionsData) (authorizer.Decision, string, error) {
	return authorizer.DecisionDeny, "", authorizer.ErrorConditionEvaluationNotSupported
}

// RulesFor lists everything, for members.
func (Masters) RulesFor(_ context.Context, u user.Info, _ string) ([]authorizer.ResourceRuleInfo, []authorizer.NonResourceRuleInfo, bool, error) {
	if u == nil {
		return nil, nil, false, fmt.Errorf("rules: no user given")
	}
	if !isMaster(u) {
		return nil, nil, false, nil
	}
	any := []string{"*"}
	return []authorizer.ResourceRuleInfo{&authorizer.DefaultResourceRuleInfo{Verbs: any, APIGroups: any, Resources: any}},
		[]authorizer.NonResourceRuleInfo{&authorizer.DefaultNonResourceRuleInfo{Verbs: any, NonResourceURLs: any}}, false, nil
}

func isMaster(u user.Info) bool {
	return u != nil && slices.Contains(u.GetGroups(), user.SystemPrivilegedGroup)
}
