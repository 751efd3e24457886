package admission

import (
	"fmt"
	"io"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/initializer"
	policymutating "k8s.io/apiserver/pkg/admission/plugin/policy/mutating"
	policyvalidating "k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	webhookinit "k8s.io/apiserver/pkg/admission/plugin/webhook/initializer"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/mutating"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/validating"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/component-base/compatibility"
)

// Extensions is what the plugins need that ask what users have registered:
// webhooks and admission policies.
type Extensions struct {
	Client     kubernetes.Interface
	Dynamic    dynamic.Interface
	Informers  informers.SharedInformerFactory
	Mapper     meta.RESTMapper
	Authorizer authorizer.Authorizer
	Version    compatibility.EffectiveVersion
	Services   webhook.ServiceResolver
	Webhooks   webhook.AuthenticationInfoResolverWrapper
	// Stopped ends the plugins' work.
	Stopped <-chan struct{}
}

// questions are the resources that are not stored: no webhook may stand between a
// user and who or what one is allowed.
var questions = []schema.GroupResource{
	authenticationv1.Resource("selfsubjectreviews"),
	authenticationv1.Resource("tokenreviews"),
	authorizationv1.Resource("localsubjectaccessreviews"),
	authorizationv1.Resource("selfsubjectaccessreviews"),
	authorizationv1.Resource("selfsubjectrulesreviews"),
	authorizationv1.Resource("subjectaccessreviews"),
}

// plugins are the library's plugins, in order: what changes objects first.
func (e *Extensions) plugins() []plugin {
	return []plugin{
		{name: policymutating.PluginName, on: true, prepare: func(config io.Reader) (func() (admission.Interface, error), error) {
			made, err := policymutating.NewPlugin(config)
			return func() (admission.Interface, error) {
				schemas, err := newLateSchemas(e.Client, e.Informers.Admissionregistration().V1().MutatingAdmissionPolicies().Informer(), e.Stopped)
				if err != nil {
					return nil, fmt.Errorf("watch admission policies: %w", err)
				}
				return e.ready(made, schemas)
			}, err
		}},
		{name: mutating.PluginName, on: true, prepare: func(config io.Reader) (func() (admission.Interface, error), error) {
			made, err := mutating.NewMutatingWebhook(config)
			return func() (admission.Interface, error) { return e.ready(made, e.Client) }, err
		}},
		{name: policyvalidating.PluginName, on: true, prepare: func(config io.Reader) (func() (admission.Interface, error), error) {
			made, err := policyvalidating.NewPlugin(config)
			return func() (admission.Interface, error) { return e.ready(made, e.Client) }, err
		}},
		{name: validating.PluginName, on: true, prepare: func(config io.Reader) (func() (admission.Interface, error), error) {
			made, err := validating.NewValidatingAdmissionWebhook(config)
			return func() (admission.Interface, error) { return e.ready(made, e.Client) }, err
		}},
	}
}

// ready gives a plugin of the library's what it needs; it works from then on.
func (e *Extensions) ready(made admission.Interface, client kubernetes.Interface) (admission.Interface, error) {
	initializer.New(client, e.Dynamic, e.Informers, e.Authorizer, utilfeature.DefaultFeatureGate, e.Version, e.Stopped, e.Mapper).Initialize(made)
	webhookinit.NewPluginInitializer(e.Webhooks, e.Services).Initialize(made)
	if wants, ok := made.(initializer.WantsExcludedAdmissionResources); ok {
		wants.SetExcludedAdmissionResources(questions)
	}
	if checked, ok := made.(admission.InitializationValidator); ok {
		if err := checked.ValidateInitialization(); err != nil {
			return nil, err
		}
	}
	return made, nil
}
