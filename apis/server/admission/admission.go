// Package admission holds the ordered list of the plugins that judge and
// complete what is written, after authorization and before validation. One
// folder a plugin.
package admission

import (
	"errors"
	"fmt"
	"io"

	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/metrics"

	"github.com/clusterd/clusterd/apis/server/admission/alwayspull"
	"github.com/clusterd/clusterd/apis/server/admission/autoprovision"
	"github.com/clusterd/clusterd/apis/server/admission/certificates"
	"github.com/clusterd/clusterd/apis/server/admission/claimresize"
	"github.com/clusterd/clusterd/apis/server/admission/defaultingressclass"
	"github.com/clusterd/clusterd/apis/server/admission/defaultstorageclass"
	"github.com/clusterd/clusterd/apis/server/admission/devices"
	"github.com/clusterd/clusterd/apis/server/admission/eventrate"
	"github.com/clusterd/clusterd/apis/server/admission/expressions"
	"github.com/clusterd/clusterd/apis/server/admission/externalips"
	"github.com/clusterd/clusterd/apis/server/admission/imagepolicy"
	"github.com/clusterd/clusterd/apis/server/admission/limitranger"
	"github.com/clusterd/clusterd/apis/server/admission/namespaceexists"
	"github.com/clusterd/clusterd/apis/server/admission/namespacelifecycle"
	"github.com/clusterd/clusterd/apis/server/admission/newnodes"
	"github.com/clusterd/clusterd/apis/server/admission/noderestriction"
	"github.com/clusterd/clusterd/apis/server/admission/nodeselector"
	"github.com/clusterd/clusterd/apis/server/admission/ownerrefs"
	"github.com/clusterd/clusterd/apis/server/admission/podgroups"
	"github.com/clusterd/clusterd/apis/server/admission/podsecurity"
	"github.com/clusterd/clusterd/apis/server/admission/podtopology"
	"github.com/clusterd/clusterd/apis/server/admission/priority"
	"github.com/clusterd/clusterd/apis/server/admission/runtimeclass"
	"github.com/clusterd/clusterd/apis/server/admission/serviceaccount"
	"github.com/clusterd/clusterd/apis/server/admission/storageprotection"
	"github.com/clusterd/clusterd/apis/server/admission/tolerations"
)

// Objects is what plugins look up. It is called on requests, from many
// goroutines, and may block on the store. A missing object is a NotFound
// StatusError.
type Objects interface {
	limitranger.Objects
	podsecurity.Objects
	priority.Classes
	runtimeclass.Classes
	defaultstorageclass.Classes
	defaultingressclass.Classes
	claimresize.Classes
	noderestriction.Objects
	podgroups.Workloads
}

// Options tune the plugins.
type Options struct {
	// Set says which plugins there are.
	Set Set
	// TolerationSeconds is how long a pod stays bound to a node that is
	// NotReady or unreachable, unless it says otherwise itself.
	TolerationSeconds int64
	// Quota makes what holds requests to the quotas of their namespaces. It is
	// called last, and only if it is wanted: what it makes begins to work at once.
	Quota func(config io.Reader) (admission.Interface, error)
	// Extensions is what users have registered.
	Extensions *Extensions
}

// plugin is one entry of the ordered list.
type plugin struct {
	name string
	// on is whether it is enabled by default.
	on bool
	// make builds it; config is what the operator wrote for it, nil: nothing.
	make func(config io.Reader) (admission.Interface, error)
}

// plain is a plugin that has no configuration.
func plain(make func() admission.Interface) func(io.Reader) (admission.Interface, error) {
	return func(config io.Reader) (admission.Interface, error) {
		if config != nil {
			return nil, errors.New("it takes no configuration")
		}
		return make(), nil
	}
}

// list is all plugins in the order in which they are asked, upstream's.
func list(objects Objects, options Options) []plugin {
	x := options.Extensions
	return append(append([]plugin{
		{"NamespaceAutoProvision", false, plain(func() admission.Interface { return autoprovision.New(objects, x.Client) })},
		{"NamespaceLifecycle", true, plain(func() admission.Interface { return namespacelifecycle.New(objects) })},
		{"NamespaceExists", false, plain(func() admission.Interface { return namespaceexists.New(objects) })},
		{"LimitRanger", true, plain(func() admission.Interface { return limitranger.New(objects) })},
		{"ServiceAccount", true, plain(func() admission.Interface { return serviceaccount.New(objects) })},
		{"NodeRestriction", true, plain(func() admission.Interface { return noderestriction.New(objects) })},
		{"TaintNodesByCondition", true, plain(newnodes.New)},
		{"AlwaysPullImages", false, plain(alwayspull.New)},
		{"ImagePolicyWebhook", false, imagepolicy.New},
		{"PodSecurity", true, func(config io.Reader) (admission.Interface, error) { return podsecurity.New(objects, config) }},
		{"PodNodeSelector", false, func(config io.Reader) (admission.Interface, error) { return nodeselector.New(objects, config) }},
		{"Priority", true, plain(func() admission.Interface { return priority.New(objects) })},
		{"DefaultTolerationSeconds", true, plain(func() admission.Interface { return tolerations.New(options.TolerationSeconds) })},
		{"EventRateLimit", false, eventrate.New},
		{"DefaultStorageClass", true, plain(func() admission.Interface { return defaultstorageclass.New(objects) })},
		{"StorageObjectInUseProtection", true, plain(func() admission.Interface { return storageprotection.New() })},
		{"PodGroupProtection", true, plain(podgroups.NewProtection)},
		{"OwnerReferencesPermissionEnforcement", false, plain(func() admission.Interface { return ownerrefs.New(x.Authorizer, x.Mapper) })},
		{"PersistentVolumeClaimResize", true, plain(func() admission.Interface { return claimresize.New(objects) })},
		{"RuntimeClass", true, plain(func() admission.Interface { return runtimeclass.New(objects) })},
		{"PodGroupWorkloadExists", true, plain(func() admission.Interface { return podgroups.NewWorkloadExists(objects) })},
		{"CertificateApproval", true, plain(func() admission.Interface { return certificates.NewApproval(x.Authorizer) })},
		{"CertificateSigning", true, plain(func() admission.Interface { return certificates.NewSigning(x.Authorizer) })},
		// PodCertificateSigning is no plugin of upstream's, whose strategy does this.
		{"PodCertificateSigning", true, plain(func() admission.Interface { return certificates.NewPodSigning(x.Authorizer) })},
		{"ClusterTrustBundleAttest", true, plain(func() admission.Interface { return certificates.NewAttest(x.Authorizer) })},
		{"CertificateSubjectRestriction", true, plain(certificates.NewSubjectRestriction)},
		{"DefaultIngressClass", true, plain(func() admission.Interface { return defaultingressclass.New(objects) })},
		{"DenyServiceExternalIPs", false, plain(externalips.New)},
		{"PodTopologyLabels", true, plain(func() admission.Interface { return podtopology.New(objects) })},
		// Expressions is no plugin of upstream's, whose validation does this.
		{"Expressions", true, plain(func() admission.Interface { return expressions.New() })},
		// Devices is none either: upstream's validation and strategy do this.
		{"Devices", true, plain(func() admission.Interface { return devices.New(objects) })},
	},
		// What users have registered sees objects as they will be stored.
		x.plugins()...),
		// What any other refuses must not be counted.
		plugin{"ResourceQuota", true, options.Quota})
}

// Chain is the plugins that options ask for. The first refusal ends the chain.
// Webhooks and policies that are to see later ones' changes are asked again.
func Chain(objects Objects, options Options) (admission.Interface, error) {
	all := list(objects, options)
	chosen, err := options.Set.choose(all)
	if err != nil {
		return nil, err
	}
	configs, err := options.Set.configs(all)
	if err != nil {
		return nil, err
	}
	// Those of the library's that ask for policies and webhooks begin to work when they
	// are made, so they are made when nothing else can fail.
	working := map[string]bool{}
	for _, p := range options.Extensions.plugins() {
		working[p.name] = true
	}
	made := map[string]admission.Interface{}
	for _, last := range []bool{false, true} {
		for _, p := range all {
			if !chosen[p.name] || working[p.name] != last {
				continue
			}
			config, err := configs.ConfigFor(p.name)
			if err != nil {
				return nil, fmt.Errorf("admission plugin %s: %w", p.name, err)
			}
			if made[p.name], err = p.make(config); err != nil {
				return nil, fmt.Errorf("admission plugin %s: %w", p.name, err)
			}
		}
	}
	var plugins []admission.Interface
	for _, p := range all {
		if chosen[p.name] {
			plugins = append(plugins, metrics.WithControllerMetrics(made[p.name], p.name))
		}
	}
	return metrics.WithStepMetrics(again{admission.NewChainHandler(plugins...)}), nil
}
