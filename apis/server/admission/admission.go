// Package admission holds the ordered list of the plugins that judge and
// complete what is written, after authorization and before validation. One
// folder a plugin.
package admission

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/metrics"

	"github.com/clusterd/clusterd/apis/server/admission/namespacelifecycle"
	"github.com/clusterd/clusterd/apis/server/admission/noderestriction"
	"github.com/clusterd/clusterd/apis/server/admission/priority"
	"github.com/clusterd/clusterd/apis/server/admission/runtimeclass"
	"github.com/clusterd/clusterd/apis/server/admission/serviceaccount"
	"github.com/clusterd/clusterd/apis/server/admission/tolerations"
)

// Objects is what plugins look up. It is called on requests, from many
// goroutines, and may block on the store. A missing object is a NotFound
// StatusError.
type Objects interface {
	priority.Classes
	runtimeclass.Classes
	Namespace(ctx context.Context, name string) (*corev1.Namespace, error)
	Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error)
	ServiceAccount(ctx context.Context, namespace, name string) (*corev1.ServiceAccount, error)
}

// Options tune the plugins.
type Options struct {
	// TolerationSeconds is how long a pod stays bound to a node that is
	// NotReady or unreachable, unless it says otherwise itself.
	TolerationSeconds int64
}

// Chain is the plugins in the order in which they are asked. The first
// refusal ends the chain.
func Chain(objects Objects, options Options) admission.Interface {
	chain := admission.NewChainHandler(
		measured("NamespaceLifecycle", namespacelifecycle.New(objects)),
		measured("NodeRestriction", noderestriction.New(objects)),
		measured("ServiceAccount", serviceaccount.New(objects)),
		measured("Priority", priority.New(objects)),
		measured("DefaultTolerationSeconds", tolerations.New(options.TolerationSeconds)),
		measured("RuntimeClass", runtimeclass.New(objects)),
	)
	return metrics.WithStepMetrics(chain)
}

// measured makes the plugin's time and refusals a metric of its name.
func measured(name string, plugin admission.Interface) admission.Interface {
	return metrics.WithControllerMetrics(plugin, name)
}
