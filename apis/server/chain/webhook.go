package chain

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	authorizationcel "k8s.io/apiserver/pkg/authorization/cel"
	webhookutil "k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/apiserver/plugin/pkg/authorizer/webhook"
	webhookmetrics "k8s.io/apiserver/plugin/pkg/authorizer/webhook/metrics"
)

// defaultWebhook is upstream's --authorization-webhook-config-file with its
// other flags left as they are, but for the version, which is the current one.
func defaultWebhook(kubeconfig string) *apiserver.WebhookConfiguration {
	return &apiserver.WebhookConfiguration{
		AuthorizedTTL: metav1.Duration{Duration: 5 * time.Minute}, CacheAuthorizedRequests: true,
		UnauthorizedTTL: metav1.Duration{Duration: 30 * time.Second}, CacheUnauthorizedRequests: true,
		Timeout:                    metav1.Duration{Duration: 30 * time.Second},
		SubjectAccessReviewVersion: "v1",
		FailurePolicy:              apiserver.FailurePolicyNoOpinion,
		ConnectionInfo:             apiserver.WebhookConnectionInfo{Type: apiserver.AuthorizationWebhookConnectionInfoTypeKubeConfigFile, KubeConfigFile: &kubeconfig},
	}
}

// newWebhook makes the authorizer that posts SubjectAccessReviews.
func newWebhook(name string, c *apiserver.WebhookConfiguration) (authorizer.Authorizer, error) {
	config, err := webhookutil.LoadKubeconfig(*c.ConnectionInfo.KubeConfigFile, nil)
	if err != nil {
		return nil, fmt.Errorf("authorizer %s: kubeconfig %s: %w", name, *c.ConnectionInfo.KubeConfigFile, err)
	}
	config.Timeout = c.Timeout.Duration
	decisionOnError := authorizer.DecisionNoOpinion
	if c.FailurePolicy == apiserver.FailurePolicyDeny {
		decisionOnError = authorizer.DecisionDeny
	}
	// A decision that is not to be kept is kept for no time.
	allowed, refused := c.AuthorizedTTL.Duration, c.UnauthorizedTTL.Duration
	if !c.CacheAuthorizedRequests {
		allowed = 0
	}
	if !c.CacheUnauthorizedRequests {
		refused = 0
	}
	asked, err := webhook.New(config, c.SubjectAccessReviewVersion, allowed, refused, *webhook.DefaultRetryBackoff(), decisionOnError,
		c.MatchConditions, name, metrics{webhookmetrics.NoopRequestMetrics{}, webhookmetrics.NewWebhookMetrics(), authorizationcel.NewMatcherMetrics()}, authorizationcel.NewDefaultCompiler())
	if err != nil {
		return nil, fmt.Errorf("authorizer %s: %w", name, err)
	}
	return asked, nil
}

// metrics are the webhook's under upstream's names.
type metrics struct {
	webhookmetrics.RequestMetrics
	webhookmetrics.WebhookMetrics
	authorizationcel.MatcherMetrics
}

// unconditional is the part of an authorizer whose decisions do not depend on
// what a request carries.
type unconditional struct {
	z authorizer.UnconditionalAuthorizer
}

// ConditionsAwareAuthorize is Authorize.
func (u unconditional) ConditionsAwareAuthorize(ctx context.Context, a authorizer.Attributes) authorizer.ConditionsAwareDecision {
	return authorizer.ConditionsAwareDecisionFromParts(u.z.Authorize(ctx, a))
}

// EvaluateConditions denies.
func (unconditional) EvaluateConditions(context.Context, authorizer.ConditionsAwareDecision, authorizer.ConditionsData) (authorizer.Decision, string, error) {
	return authorizer.DecisionDeny, "", authorizer.ErrorConditionEvaluationNotSupported
}
