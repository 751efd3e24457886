package rbac

import (
	"context"

	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// Loops lets the leader's loops do what their roles permit, before anybody
// else is asked: an authorizer elsewhere that hangs or refuses must not keep
// the cluster from mending itself.
type Loops struct {
	rbac  *Authorizer
	names map[string]bool
}

var _ authorizer.Authorizer = &Loops{}

// NewLoops makes the authorizer that asks rbac about the loops alone.
func NewLoops(rbac *Authorizer) *Loops {
	l := &Loops{rbac: rbac, names: map[string]bool{user.KubeControllerManager: true}}
	for _, c := range controllers {
		name := c.user
		if c.account != "" {
			name = serviceaccount.MakeUsername(systemNamespace, c.account)
		}
		l.names[name] = true
	}
	return l
}

// Authorize allows what the roles of a loop permit, and has no opinion of
// anything else.
func (l *Loops) Authorize(ctx context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if u := a.GetUser(); u == nil || !l.names[u.GetName()] {
		return authorizer.DecisionNoOpinion, "", nil
	}
	if decision, reason, err := l.rbac.Authorize(ctx, a); decision == authorizer.DecisionAllow {
		return decision, reason, err
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// ConditionsAwareAuthorize is Authorize: no decision depends on content.
func (l *Loops) ConditionsAwareAuthorize(ctx context.Context, a authorizer.Attributes) authorizer.ConditionsAwareDecision {
	return authorizer.ConditionsAwareDecisionFromParts(l.Authorize(ctx, a))
}

// EvaluateConditions denies: this authorizer makes no conditional decisions.
func (*Loops) EvaluateConditions(context.Context, authorizer.ConditionsAwareDecision, authorizer.ConditionsData) (authorizer.Decision, string, error) {
	return authorizer.DecisionDeny, "", authorizer.ErrorConditionEvaluationNotSupported
}
