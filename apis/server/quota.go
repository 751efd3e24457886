package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/resourcequota"
	"k8s.io/apiserver/pkg/admission/plugin/resourcequota/apis/resourcequota/validation"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/kubernetes"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/clusterd/clusterd/apis/quota"
	"github.com/clusterd/clusterd/apis/server/resource"
)

// quotaWorkers is how many namespaces' quotas are compared at once.
const quotaWorkers = 5

var errNoSums = errors.New("admission adds up what comes and counts nothing: the loop quota does")

// newQuota is the library's plugin, which writes what a request will use into
// the quotas' status before it lets the request pass, at the version that it
// compared with: two servers cannot give the same room twice.
// config is a ResourceQuota Configuration, which names what may only be used where a
// quota covers it; nil: nothing is named. It is read at once; the plugin works from when
// it is made.
func newQuota(c *genericapiserver.RecommendedConfig, client kubernetes.Interface, stores *stores, config io.Reader) (func() (admission.Interface, error), error) {
	limited, err := resourcequota.LoadConfiguration(config)
	if err != nil {
		return nil, fmt.Errorf("resource quota: %w", err)
	}
	if faults := validation.ValidateConfiguration(limited); len(faults) > 0 {
		return nil, fmt.Errorf("resource quota: %w", faults.ToAggregate())
	}
	return func() (admission.Interface, error) {
		plugin, err := resourcequota.NewResourceQuota(limited, quotaWorkers)
		if err != nil {
			return nil, fmt.Errorf("resource quota: %w", err)
		}
		var resources []schema.GroupResource
		for _, store := range stores.list {
			if store.Kind().Namespaced {
				resources = append(resources, store.DefaultQualifiedResource)
			}
		}
		plugin.SetDrainedNotification(c.DrainedNotify())
		sums := quotaSums{status: resource.NewStatus(stores.core("resourcequotas")), timeout: c.RequestTimeout, drained: c.DrainedNotify()}
		plugin.SetExternalKubeClientSet(quotaClient{client, sums})
		plugin.SetExternalKubeInformerFactory(c.SharedInformerFactory)
		plugin.SetQuotaConfiguration(quota.Configuration(resources, func(schema.GroupResource, string) ([]runtime.Object, error) {
			return nil, errNoSums
		}))
		if err := plugin.ValidateInitialization(); err != nil {
			return nil, fmt.Errorf("resource quota: %w", err)
		}
		return plugin, nil
	}, nil
}

// quotaSums writes the sums of quotas that admission has made. A request to this server
// of its own would come to the same write, by way of the whole chain, and costs as much
// as the pod's creation that it is a part of.
type quotaSums struct {
	status  *resource.Status
	timeout time.Duration
	drained <-chan struct{}
}

var quotaWriter = &user.DefaultInfo{Name: user.APIServerUser, Groups: []string{user.SystemPrivilegedGroup}}

func (s quotaSums) write(q *corev1.ResourceQuota) (*corev1.ResourceQuota, error) {
	// Once all requests are over, there is none that waits for this.
	ctx, cancel := context.WithTimeout(wait.ContextForChannel(s.drained), s.timeout)
	defer cancel()
	ctx = request.WithNamespace(request.WithUser(ctx, quotaWriter), q.Namespace)
	// The plugin goes on to use q.
	written, _, err := s.status.Update(ctx, q.Name, rest.DefaultUpdatedObjectInfo(q.DeepCopy()), rest.ValidateAllObjectFunc, rest.ValidateAllObjectUpdateFunc, false, &metav1.UpdateOptions{})
	if err != nil {
		return nil, err
	}
	now, ok := written.(*corev1.ResourceQuota)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("a quota was written as a %T", written))
	}
	return now, nil
}

// quotaClient is a client of this server, but for the status of quotas.
type quotaClient struct {
	kubernetes.Interface
	sums quotaSums
}

// CoreV1 implements kubernetes.Interface.
func (c quotaClient) CoreV1() corev1client.CoreV1Interface {
	return quotaCore{c.Interface.CoreV1(), c.sums}
}

type quotaCore struct {
	corev1client.CoreV1Interface
	sums quotaSums
}

// ResourceQuotas implements corev1client.CoreV1Interface.
func (c quotaCore) ResourceQuotas(namespace string) corev1client.ResourceQuotaInterface {
	return quotas{c.CoreV1Interface.ResourceQuotas(namespace), c.sums}
}

type quotas struct {
	corev1client.ResourceQuotaInterface
	sums quotaSums
}

// UpdateStatus implements corev1client.ResourceQuotaInterface.
func (q quotas) UpdateStatus(_ context.Context, quota *corev1.ResourceQuota, _ metav1.UpdateOptions) (*corev1.ResourceQuota, error) {
	return q.sums.write(quota)
}
