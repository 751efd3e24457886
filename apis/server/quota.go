package server

import (
	"errors"
	"fmt"
	"io"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/resourcequota"
	"k8s.io/apiserver/pkg/admission/plugin/resourcequota/apis/resourcequota/validation"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/apis/quota"
)

// quotaWorkers is how many namespaces' quotas are compared at once.
const quotaWorkers = 5

var errNoSums = errors.New("admission adds up what comes and counts nothing: the loop quota does")

// newQuota is the library's plugin, which writes what a request will use into
// the quotas' status before it lets the request pass, at the version that it
// compared with: two servers cannot give the same room twice.
// config is a ResourceQuota Configuration, which names what may only be used where a
// quota covers it; nil: nothing is named.
func newQuota(c *genericapiserver.RecommendedConfig, client kubernetes.Interface, stores *stores, config io.Reader) (admission.Interface, error) {
	limited, err := resourcequota.LoadConfiguration(config)
	if err != nil {
		return nil, fmt.Errorf("resource quota: %w", err)
	}
	if faults := validation.ValidateConfiguration(limited); len(faults) > 0 {
		return nil, fmt.Errorf("resource quota: %w", faults.ToAggregate())
	}
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
	plugin.SetExternalKubeClientSet(client)
	plugin.SetExternalKubeInformerFactory(c.SharedInformerFactory)
	plugin.SetQuotaConfiguration(quota.Configuration(resources, func(schema.GroupResource, string) ([]runtime.Object, error) {
		return nil, errNoSums
	}))
	if err := plugin.ValidateInitialization(); err != nil {
		return nil, fmt.Errorf("resource quota: %w", err)
	}
	return plugin, nil
}
