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
	// Quota reads the configuration of what holds requests to the quotas of their
	// namespaces, if that is wanted. What it returns is called when nothing else can
	// fail: it makes it, which begins to work at once.
	Quota func(config io.Reader) (func() (admission.Interface, error), error)
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
	// prepare does so in two steps, in place of make, for what works from when it is
	// made: it reads config and starts nothing.
	prepare func(config io.Reader) (func() (admission.Interface, error), error)
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
		{name: "NamespaceAutoProvision", on: false, make: plain(func() admission.Interface { return autoprovision.New(objects, x.Client) })},
		{name: "NamespaceLifecycle", on: true, make: plain(func() admission.Interface { return namespacelifecycle.New(objects) })},
		{name: "NamespaceExists", on: false, make: plain(func() admission.Interface { return namespaceexists.New(objects) })},
		{name: "LimitRanger", on: true, make: plain(func() admission.Interface { return limitranger.New(objects) })},
		{name: "ServiceAccount", on: true, make: plain(func() admission.Interface { return serviceaccount.New(objects) })},
		{name: "NodeRestriction", on: true, make: plain(func() admission.Interface { return noderestriction.New(objects) })},
		{name: "TaintNodesByCondition", on: true, make: plain(newnodes.New)},
		{name: "AlwaysPullImages", on: false, make: plain(alwayspull.New)},
		{name: "ImagePolicyWebhook", on: false, make: imagepolicy.New},
		{name: "PodSecurity", on: true, make: func(config io.Reader) (admission.Interface, error) { return podsecurity.New(objects, config) }},
		{name: "PodNodeSelector", on: false, make: func(config io.Reader) (admission.Interface, error) { return nodeselector.New(objects, config) }},
		{name: "Priority", on: true, make: plain(func() admission.Interface { return priority.New(objects) })},
		{name: "DefaultTolerationSeconds", on: true, make: plain(func() admission.Interface { return tolerations.New(options.TolerationSeconds) })},
		{name: "EventRateLimit", on: false, make: eventrate.New},
		{name: "DefaultStorageClass", on: true, make: plain(func() admission.Interface { return defaultstorageclass.New(objects) })},
		{name: "StorageObjectInUseProtection", on: true, make: plain(func() admission.Interface { return storageprotection.New() })},
		{name: "PodGroupProtection", on: true, make: plain(podgroups.NewProtection)},
		{name: "OwnerReferencesPermissionEnforcement", on: false, make: plain(func() admission.Interface { return ownerrefs.New(x.Authorizer, x.Mapper) })},
		{name: "PersistentVolumeClaimResize", on: true, make: plain(func() admission.Interface { return claimresize.New(objects) })},
		{name: "RuntimeClass", on: true, make: plain(func() admission.Interface { return runtimeclass.New(objects) })},
		{name: "PodGroupWorkloadExists", on: true, make: plain(func() admission.Interface { return podgroups.NewWorkloadExists(objects) })},
		{name: "CertificateApproval", on: true, make: plain(func() admission.Interface { return certificates.NewApproval(x.Authorizer) })},
		{name: "CertificateSigning", on: true, make: plain(func() admission.Interface { return certificates.NewSigning(x.Authorizer) })},
		// PodCertificateSigning is no plugin of upstream's, whose strategy does this.
		{name: "PodCertificateSigning", on: true, make: plain(func() admission.Interface { return certificates.NewPodSigning(x.Authorizer) })},
		{name: "ClusterTrustBundleAttest", on: true, make: plain(func() admission.Interface { return certificates.NewAttest(x.Authorizer) })},
		{name: "CertificateSubjectRestriction", on: true, make: plain(certificates.NewSubjectRestriction)},
		{name: "DefaultIngressClass", on: true, make: plain(func() admission.Interface { return defaultingressclass.New(objects) })},
		{name: "DenyServiceExternalIPs", on: false, make: plain(externalips.New)},
		{name: "PodTopologyLabels", on: true, make: plain(func() admission.Interface { return podtopology.New(objects) })},
		// Expressions is no plugin of upstream's, whose validation does this.
		{name: "Expressions", on: true, make: plain(func() admission.Interface { return expressions.New() })},
		// Devices is none either: upstream's validation and strategy do this.
		{name: "Devices", on: true, make: plain(func() admission.Interface { return devices.New(objects) })},
	},
		// What users have registered sees objects as they will be stored.
		x.plugins()...),
		// What any other refuses must not be counted.
		plugin{name: "ResourceQuota", on: true, prepare: options.Quota})
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
	made := map[string]admission.Interface{}
	var begin []func() error
	for _, p := range all {
		if !chosen[p.name] {
			continue
		}
		config, err := configs.ConfigFor(p.name)
		if err != nil {
			return nil, fmt.Errorf("admission plugin %s: %w", p.name, err)
		}
		if p.prepare == nil {
			made[p.name], err = p.make(config)
		} else if start, wrong := p.prepare(config); wrong != nil {
			err = wrong
		} else {
			begin = append(begin, func() (err error) {
				if made[p.name], err = start(); err != nil {
					return fmt.Errorf("admission plugin %s: %w", p.name, err)
				}
				return nil
			})
		}
		if err != nil {
			return nil, fmt.Errorf("admission plugin %s: %w", p.name, err)
		}
	}
	for _, start := range begin { // no configuration is wrong: nothing is left running for one that is
		if err := start(); err != nil {
			return nil, err
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
