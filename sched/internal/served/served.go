// Package served asks the API server which kinds it serves.
package served

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
)

// Resource is one kind the server serves, in its preferred version.
type Resource struct {
	schema.GroupVersionResource
	Kind       string
	Namespaced bool
	Verbs      []string
}

// Can reports whether the kind has the verb.
func (r Resource) Can(verb string) bool { return slices.Contains(r.Verbs, verb) }

// Resources returns all kinds, without subresources. Groups that did not
// answer are missing from them and named in failed, one error a group; if the
// server did not answer at all, there are no resources and one error.
func Resources(ctx context.Context, d discovery.DiscoveryInterfaces) (resources []Resource, failed []error) {
	lists, err := d.ServerPreferredResourcesWithContext(ctx)
	if err != nil {
		var groups *discovery.ErrGroupDiscoveryFailed
		if !errors.As(err, &groups) {
			return nil, []error{fmt.Errorf("discover kinds: %w", err)}
		}
		for gv, err := range groups.Groups {
			failed = append(failed, fmt.Errorf("%s: %w", gv, err))
		}
	}
	for _, list := range lists {
		if list == nil {
			continue
		}
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			failed = append(failed, fmt.Errorf("group version %q: %w", list.GroupVersion, err))
			continue
		}
		for i := range list.APIResources {
			resources = append(resources, resource(gv, &list.APIResources[i])...)
		}
	}
	return resources, failed
}

func resource(gv schema.GroupVersion, r *metav1.APIResource) []Resource {
	if strings.Contains(r.Name, "/") {
		return nil
	}
	if r.Group != "" {
		gv.Group = r.Group
	}
	if r.Version != "" {
		gv.Version = r.Version
	}
	return []Resource{{GroupVersionResource: gv.WithResource(r.Name), Kind: r.Kind, Namespaced: r.Namespaced, Verbs: r.Verbs}}
}
