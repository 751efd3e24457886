package gateway

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// Group is the API group of the kinds.
const Group = gatewayv1.GroupName

// The resources of the kinds.
const (
	Classes    = "gatewayclasses"
	Gateways   = "gateways"
	HTTPRoutes = "httproutes"
	GRPCRoutes = "grpcroutes"
	Grants     = "referencegrants"
	Policies   = "backendtlspolicies"
)

// Resources are those of the kinds that are looked at.
var Resources = []string{Classes, Gateways, HTTPRoutes, GRPCRoutes, Grants, Policies}

// Versions are those in which the kinds may be served, the best first: CRDs of
// before 1.5 have ReferenceGrants in v1beta1 alone, with the same fields.
var Versions = []string{"v1", "v1beta1"}

// Version returns that of a resource at a server that serves the lists; false:
// it does not serve the resource so that it can be looked at.
func Version(resource string, served []*metav1.APIResourceList) (schema.GroupVersionResource, bool) {
	for _, v := range Versions {
		if v != "v1" && resource != Grants {
			break
		}
		gv := schema.GroupVersion{Group: Group, Version: v}
		for _, list := range served {
			if list != nil && list.GroupVersion == gv.String() && slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == resource }) {
				return gv.WithResource(resource), true
			}
		}
	}
	return schema.GroupVersionResource{}, false
}

// Typed makes an object of a dynamic client one of its Go type, without what is
// not looked at. One that cannot be made so is left as it is: it is not served,
// and keeps no other from being so.
func Typed(obj any) (any, error) {
	u, ok := obj.(*unstructured.Unstructured)
	if !ok {
		return obj, nil
	}
	var out metav1.Object
	switch u.GetKind() {
	case "GatewayClass":
		out = &gatewayv1.GatewayClass{}
	case "Gateway":
		out = &gatewayv1.Gateway{}
	case HTTPRoute:
		out = &gatewayv1.HTTPRoute{}
	case GRPCRoute:
		out = &gatewayv1.GRPCRoute{}
	case "ReferenceGrant":
		out = &gatewayv1.ReferenceGrant{}
	case "BackendTLSPolicy":
		out = &gatewayv1.BackendTLSPolicy{}
	default:
		return obj, nil
	}
	u.SetManagedFields(nil)
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, out); err != nil {
		return obj, nil //nolint:nilerr // see above
	}
	return out, nil
}

// List are the objects of a type among those of a cache.
func List[T any](all []any) (out []*T) {
	for _, obj := range all {
		if o, ok := obj.(*T); ok {
			out = append(out, o)
		}
	}
	return out
}
