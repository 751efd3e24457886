// Package chain puts authorizers into the order that an operator wants:
// --authorization-mode, or an AuthorizationConfiguration file that is read
// again when it changes. It decides nothing itself.
package chain

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/apis/apiserver/load"
	"k8s.io/apiserver/pkg/apis/apiserver/validation"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	authorizationcel "k8s.io/apiserver/pkg/authorization/cel"
	"k8s.io/apiserver/pkg/authorization/union"
	"k8s.io/klog/v2"
)

// The types of authorizers that can be in a chain.
const (
	Node    = "Node"
	RBAC    = "RBAC"
	ABAC    = "ABAC"
	Webhook = string(apiserver.TypeWebhook)
)

// DefaultModes are asked when nothing is configured.
var DefaultModes = []string{Node, RBAC}

// Options are what an operator says of the chain.
type Options struct {
	// Modes are types in the order in which they are asked. Default:
	// DefaultModes. Not with File.
	Modes []string
	// File is an AuthorizationConfiguration. Empty: Modes hold.
	File string
	// PolicyFile is the ABAC policy; required where ABAC is in the chain.
	PolicyFile string
	// WebhookKubeconfig says where the Webhook of Modes is asked.
	WebhookKubeconfig string
}

// Part is an authorizer that can list what it permits.
type Part interface {
	authorizer.Authorizer
	authorizer.RuleResolver
}

// Parts are the authorizers that the server brings.
type Parts struct {
	// First are asked before all that is configured, by name.
	First []union.NamedAuthorizer
	// Node and RBAC are what the types of these names stand for.
	Node, RBAC Part
}

// Chain asks authorizers in turn, until one has an opinion. It may be used by
// many goroutines, and while Run runs its order may change under it.
type Chain struct {
	options Options
	parts   Parts
	now     atomic.Pointer[order]
	// required are the types that the first file named: a later one may put
	// them elsewhere, it can neither add nor remove them.
	required sets.Set[string]
	read     []byte
}

// order is one state of the chain.
type order struct {
	authorizer.Authorizer
	authorizer.RuleResolver
}

var _ Part = &Chain{}

// New makes the chain. Its error names what is wrong in options or its files.
func New(options Options, parts Parts) (*Chain, error) {
	c := &Chain{options: options, parts: parts}
	configuration, data, err := c.configuration()
	if err != nil {
		return nil, err
	}
	next, err := c.order(configuration)
	if err != nil {
		return nil, err
	}
	c.required, c.read = fixedTypes(configuration), data
	c.now.Store(next)
	return c, nil
}

// reloadEvery is how often the file is looked at.
const reloadEvery = 5 * time.Second

// Run reads the file again whenever it has changed, until ctx ends. A file
// that is wrong is logged, and the order stays as it was.
func (c *Chain) Run(ctx context.Context) {
	if c.options.File == "" {
		return
	}
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		logger := klog.FromContext(ctx)
		changed, err := c.reload()
		if err != nil {
			logger.Error(err, "The authorization configuration is wrong, the one before still holds", "file", c.options.File)
		} else if changed {
			logger.Info("The authorization configuration has changed", "file", c.options.File)
		}
	}, reloadEvery)
}

// reload takes over a file that has changed. It tells of a wrong file once.
func (c *Chain) reload() (changed bool, err error) {
	data, err := os.ReadFile(c.options.File)
	if err != nil || bytes.Equal(data, c.read) {
		return false, err
	}
	c.read = data
	configuration, err := c.parse(data)
	if err != nil {
		return false, err
	}
	if types := fixedTypes(configuration); !types.Equal(c.required) {
		return false, fmt.Errorf("authorizers: the types %s were configured at start, the file has %s: only webhooks can be added or removed without a restart",
			strings.Join(sets.List(c.required), ", "), strings.Join(sets.List(types), ", "))
	}
	next, err := c.order(configuration)
	if err != nil {
		return false, err
	}
	c.now.Store(next)
	return true, nil
}

func fixedTypes(configuration *apiserver.AuthorizationConfiguration) sets.Set[string] {
	types := sets.New[string]()
	for _, a := range configuration.Authorizers {
		if a.Type != apiserver.TypeWebhook {
			types.Insert(string(a.Type))
		}
	}
	return types
}

// configuration is what options say, in the file's form; data is the file's.
func (c *Chain) configuration() (*apiserver.AuthorizationConfiguration, []byte, error) {
	o := c.options
	if o.File == "" {
		configuration, err := o.fromModes()
		return configuration, nil, err
	}
	if len(o.Modes) > 0 || o.WebhookKubeconfig != "" {
		return nil, nil, fmt.Errorf("authorization: the file %s says all, modes and a webhook cannot be given beside it", o.File)
	}
	data, err := os.ReadFile(o.File)
	if err != nil {
		return nil, nil, fmt.Errorf("read the authorization configuration: %w", err)
	}
	configuration, err := c.parse(data)
	if err != nil {
		return nil, nil, fmt.Errorf("authorization configuration %s: %w", o.File, err)
	}
	return configuration, data, nil
}

func (c *Chain) parse(data []byte) (*apiserver.AuthorizationConfiguration, error) {
	configuration, err := load.LoadFromData(data)
	if err != nil {
		return nil, err
	}
	return configuration, check(configuration)
}

// fromModes is the configuration that a list of types stands for.
func (o Options) fromModes() (*apiserver.AuthorizationConfiguration, error) {
	modes := o.Modes
	if len(modes) == 0 {
		modes = DefaultModes
	}
	configuration := &apiserver.AuthorizationConfiguration{}
	for _, mode := range modes {
		a := apiserver.AuthorizerConfiguration{Type: apiserver.AuthorizerType(mode), Name: strings.ToLower(mode)}
		if mode == Webhook {
			if o.WebhookKubeconfig == "" {
				return nil, fmt.Errorf("authorization mode %s: the kubeconfig of the service to ask is required", mode)
			}
			a.Webhook = defaultWebhook(o.WebhookKubeconfig)
		}
		configuration.Authorizers = append(configuration.Authorizers, a)
	}
	if o.WebhookKubeconfig != "" && !slices.Contains(modes, Webhook) {
		return nil, fmt.Errorf("authorization webhook %s: it is asked only if %s is among the modes (%s)", o.WebhookKubeconfig, Webhook, strings.Join(modes, ","))
	}
	if err := check(configuration); err != nil {
		return nil, fmt.Errorf("authorization modes %s: %w", strings.Join(modes, ","), err)
	}
	return configuration, nil
}

// check refuses what would not work. Node and RBAC have to be there: what
// agents and the cluster's own loops may do is written there.
func check(configuration *apiserver.AuthorizationConfiguration) error {
	known := sets.New(Node, RBAC, ABAC, Webhook)
	if faults := validation.ValidateAuthorizationConfiguration(authorizationcel.NewDefaultCompiler(), nil, configuration, known, sets.New(Webhook)); len(faults) > 0 {
		return faults.ToAggregate()
	}
	types := fixedTypes(configuration)
	for _, needed := range DefaultModes {
		if !types.Has(needed) {
			return field.Required(field.NewPath("authorizers"), fmt.Sprintf("an authorizer of type %s: nodes and the cluster's own controllers have their rights by Node and RBAC", needed))
		}
	}
	for i, a := range configuration.Authorizers {
		if a.Webhook != nil && a.Webhook.ConnectionInfo.Type == apiserver.AuthorizationWebhookConnectionInfoTypeInCluster {
			return field.Invalid(field.NewPath("authorizers").Index(i).Child("webhook", "connectionInfo", "type"), a.Webhook.ConnectionInfo.Type,
				"this server is not a pod and has no such configuration: use KubeConfigFile")
		}
	}
	return nil
}

// order makes the authorizers of a configuration.
func (c *Chain) order(configuration *apiserver.AuthorizationConfiguration) (*order, error) {
	all := slices.Clone(c.parts.First)
	for _, a := range configuration.Authorizers {
		var part authorizer.Authorizer
		var err error
		switch string(a.Type) {
		case Node:
			part = c.parts.Node
		case RBAC:
			part = c.parts.RBAC
		case ABAC:
			if c.options.PolicyFile == "" {
				return nil, fmt.Errorf("authorizer %s: ABAC needs a policy file", a.Name)
			}
			part, err = readABAC(c.options.PolicyFile)
		default:
			part, err = newWebhook(a.Name, a.Webhook)
		}
		if err != nil {
			return nil, err
		}
		all = append(all, union.NamedAuthorizer{AuthorizerName: a.Name, Authorizer: part})
	}
	if c.options.PolicyFile != "" && !fixedTypes(configuration).Has(ABAC) {
		return nil, fmt.Errorf("ABAC policy %s: it is read only if %s is among the authorizers", c.options.PolicyFile, ABAC)
	}
	chained, err := union.New(all...)
	if err != nil {
		return nil, fmt.Errorf("chain of authorizers: %w", err)
	}
	var lists []authorizer.RuleResolver
	for _, part := range all {
		if resolver, ok := part.Authorizer.(authorizer.RuleResolver); ok {
			lists = append(lists, resolver)
		}
	}
	return &order{chained, union.NewRuleResolvers(lists...)}, nil
}

// Authorize asks the authorizers in turn.
func (c *Chain) Authorize(ctx context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	return c.now.Load().Authorize(ctx, a)
}

// ConditionsAwareAuthorize is Authorize: no authorizer here decides by content.
func (c *Chain) ConditionsAwareAuthorize(ctx context.Context, a authorizer.Attributes) authorizer.ConditionsAwareDecision {
	return authorizer.ConditionsAwareDecisionFromParts(c.Authorize(ctx, a))
}

// EvaluateConditions denies: there are no conditional decisions.
func (c *Chain) EvaluateConditions(context.Context, authorizer.ConditionsAwareDecision, authorizer.ConditionsData) (authorizer.Decision, string, error) {
	return authorizer.DecisionDeny, "", authorizer.ErrorConditionEvaluationNotSupported
}

// RulesFor lists what u may do in namespace. A webhook makes the list
// incomplete: it can be asked about one request, not about all.
func (c *Chain) RulesFor(ctx context.Context, u user.Info, namespace string) ([]authorizer.ResourceRuleInfo, []authorizer.NonResourceRuleInfo, bool, error) {
	return c.now.Load().RulesFor(ctx, u, namespace)
}
