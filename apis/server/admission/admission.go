// Package admission holds the ordered list of the plugins that judge and
// complete what is written, after authorization and before validation. One
// folder a plugin.
package admission

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/metrics"

	"github.com/clusterd/clusterd/apis/server/admission/claimresize"
	"github.com/clusterd/clusterd/apis/server/admission/defaultstorageclass"
	"github.com/clusterd/clusterd/apis/server/admission/expressions"
	"github.com/clusterd/clusterd/apis/server/admission/limitranger"
	"github.com/clusterd/clusterd/apis/server/admission/namespacelifecycle"
	"github.com/clusterd/clusterd/apis/server/admission/noderestriction"
	"github.com/clusterd/clusterd/apis/server/admission/podsecurity"
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
	claimresize.Classes
	Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error)
	ServiceAccount(ctx context.Context, namespace, name string) (*corev1.ServiceAccount, error)
}

// Options tune the plugins.
type Options struct {
	// TolerationSeconds is how long a pod stays bound to a node that is
	// NotReady or unreachable, unless it says otherwise itself.
	TolerationSeconds int64
	// Quota holds requests to the quotas of their namespaces; nil: there are
	// none.
	Quota admission.Interface
	// Extensions is what users have registered.
	Extensions *Extensions
}

// Chain is the plugins in the order in which they are asked, upstream's. The
// first refusal ends the chain.
func Chain(objects Objects, options Options) (admission.Interface, error) {
	extensions, err := options.Extensions.plugins()
	if err != nil {
		return nil, err
	}
	security, err := podsecurity.New(objects)
	if err != nil {
		return nil, err
	}
	plugins := []admission.Interface{
		measured("NamespaceLifecycle", namespacelifecycle.New(objects)),
		measured("LimitRanger", limitranger.New(objects)),
		measured("ServiceAccount", serviceaccount.New(objects)),
		measured("NodeRestriction", noderestriction.New(objects)),
		measured("PodSecurity", security),
		measured("Priority", priority.New(objects)),
		measured("DefaultTolerationSeconds", tolerations.New(options.TolerationSeconds)),
		measured("RuntimeClass", runtimeclass.New(objects)),
		measured("DefaultStorageClass", defaultstorageclass.New(objects)),
		measured("StorageObjectInUseProtection", storageprotection.New()),
		measured("PersistentVolumeClaimResize", claimresize.New(objects)),
		measured("Expressions", expressions.New()),
	}
	// What users have registered sees objects as they will be stored.
	plugins = append(plugins, extensions...)
	if options.Quota != nil {
		// What any other refuses must not be counted.
		plugins = append(plugins, measured("ResourceQuota", options.Quota))
	}
	return metrics.WithStepMetrics(admission.NewChainHandler(plugins...)), nil
}

// measured makes the plugin's time and refusals a metric of its name.
func measured(name string, plugin admission.Interface) admission.Interface {
	return metrics.WithControllerMetrics(plugin, name)
}
