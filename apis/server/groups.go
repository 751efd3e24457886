package server

import (
	"context"
	"fmt"
	"net/http"
	"net/url"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/server/body"
	"github.com/clusterd/clusterd/apis/server/components"
	"github.com/clusterd/clusterd/apis/server/rbac"
	"github.com/clusterd/clusterd/apis/server/resource"
	"github.com/clusterd/clusterd/apis/server/review"
	"github.com/clusterd/clusterd/apis/server/subresource"
	"github.com/clusterd/clusterd/apis/server/tokens"
	"github.com/clusterd/clusterd/apis/server/usage"
)

// groupSet is what each group version serves, in the order of the kinds: the
// order of discovery.
type groupSet struct {
	order []schema.GroupVersion
	// resources is by group version and by path below it: "pods", "pods/log".
	resources map[schema.GroupVersion]map[string]rest.Storage
}

func (g *groupSet) add(version schema.GroupVersion, path string, storage rest.Storage) {
	if g.resources[version] == nil {
		g.resources[version] = map[string]rest.Storage{}
		g.order = append(g.order, version)
	}
	g.resources[version][path] = storage
}

// ownTransport makes the calls of this server's own: what a node uses is measured for
// all who may read it.
func ownTransport(t func(context.Context, string) (http.RoundTripper, *url.URL, error)) usage.Transport {
	if t == nil {
		return nil
	}
	return func(ctx context.Context, node string) (http.RoundTripper, *url.URL, error) {
		return t(request.WithUser(ctx, nil), node)
	}
}

// installGroups makes every resource and subresource answer under its path,
// and returns the group versions in the order of discovery.
func installGroups(server *genericapiserver.GenericAPIServer, config Config, stores *stores, s *Server) ([]schema.GroupVersion, error) {
	groups := &groupSet{resources: map[schema.GroupVersion]map[string]rest.Storage{}}
	for _, store := range stores.list {
		addKind(groups, store, s.authorization)
	}
	groups.add(corev1.SchemeGroupVersion, "componentstatuses", components.New(config.Components))
	addPods(groups, stores, s.authorization.chain, subresource.NodeTransport(config.NodeTransport))
	addReviews(groups, s.authorization.chain, s.authorization.rules)
	groups.add(corev1.SchemeGroupVersion, "serviceaccounts/token", tokens.NewRequest(s.accounts.issuer, s.accounts.audiences, stores))
	groups.add(authenticationv1.SchemeGroupVersion, "tokenreviews", review.NewToken(s.tokens, s.accounts.audiences))
	addUsage(groups, stores, ownTransport(config.NodeTransport))

	var named []*genericapiserver.APIGroupInfo
	byGroup := map[string]*genericapiserver.APIGroupInfo{}
	serializer := body.Serializer(apis.Codecs, apis.Scheme)
	for _, version := range groups.order {
		if info := byGroup[version.Group]; info != nil {
			info.PrioritizedVersions = append(info.PrioritizedVersions, version)
			info.VersionedResourcesStorageMap[version.Version] = groups.resources[version]
			continue
		}
		info := genericapiserver.NewDefaultAPIGroupInfo(version.Group, apis.Scheme, apis.ParameterCodec, apis.Codecs)
		info.NegotiatedSerializer = serializer
		info.PrioritizedVersions = []schema.GroupVersion{version}
		info.VersionedResourcesStorageMap[version.Version] = groups.resources[version]
		byGroup[version.Group] = &info
		if version.Group != "" {
			named = append(named, &info)
			continue
		}
		if err := server.InstallLegacyAPIGroup(genericapiserver.DefaultLegacyAPIPrefix, &info); err != nil {
			return nil, fmt.Errorf("install the core group: %w", err)
		}
	}
	if err := server.InstallAPIGroups(named...); err != nil {
		return nil, fmt.Errorf("install the API groups: %w", err)
	}
	return groups.order, nil
}

// addKind adds a kind with the subresources that its Kind declares.
func addKind(groups *groupSet, store *resource.Store, z *authorization) {
	kind := store.Kind()
	addVersion(groups, store, z, kind.GVK.GroupVersion())
	for _, view := range kind.Views {
		addVersion(groups, store, z, kind.ViewGVK(view).GroupVersion())
	}
}

// addVersion adds one version that a kind is served in.
func addVersion(groups *groupSet, store *resource.Store, z *authorization, version schema.GroupVersion) {
	kind := store.Kind()
	path := kind.Resource
	if kind.GVK == corev1.SchemeGroupVersion.WithKind("Namespace") {
		namespaces := resource.NewNamespaces(store)
		groups.add(version, path, namespaces)
		groups.add(version, path+"/finalize", resource.NewFinalize(namespaces))
	} else if guarded := rbac.Guard(store, z.rbac, z.chain); guarded != nil {
		groups.add(version, path, guarded)
	} else {
		groups.add(version, path, store)
	}
	if kind.Status != nil {
		groups.add(version, path+"/status", resource.NewStatus(store))
	}
	if kind.Scale != nil {
		groups.add(version, path+"/scale", resource.NewScale(store))
	}
	for _, part := range kind.Parts {
		groups.add(version, path+"/"+part.Name, resource.NewPart(store, part))
	}
}

// addPods adds what can be asked of pods and of the agents of nodes.
func addPods(groups *groupSet, stores *stores, z authorizer.UnconditionalAuthorizer, transport subresource.NodeTransport) {
	v1 := corev1.SchemeGroupVersion
	pods := stores.core("pods")
	binding := subresource.NewBinding(pods.Store)
	groups.add(v1, "bindings", subresource.NewLegacyBinding(binding))
	groups.add(v1, "pods/binding", binding)
	groups.add(v1, "pods/eviction", subresource.NewEviction(pods.Store, stores.byName[policyv1.Resource("poddisruptionbudgets")].Store))
	groups.add(v1, "pods/log", subresource.NewLog(pods, transport))
	groups.add(v1, "pods/exec", subresource.NewExec(pods, z, transport))
	groups.add(v1, "pods/attach", subresource.NewAttach(pods, z, transport))
	groups.add(v1, "pods/portforward", subresource.NewPortForward(pods, z, transport))
	groups.add(v1, "pods/proxy", subresource.NewPodProxy(pods))
	groups.add(v1, "services/proxy", subresource.NewServiceProxy(stores.core("services"), stores.byName[discoveryv1.Resource("endpointslices")]))
	groups.add(v1, "nodes/proxy", subresource.NewNodeProxy(stores.core("nodes"), z, transport))
}

// addUsage adds what nodes and pods use. It comes last: "nodes" and "pods" are
// those of the core group unless configured otherwise.
func addUsage(groups *groupSet, stores *stores, transport usage.Transport) {
	source := usage.NewSource(transport)
	groups.add(metricsv1beta1.SchemeGroupVersion, "nodes", usage.NewNodes(stores.core("nodes"), source))
	groups.add(metricsv1beta1.SchemeGroupVersion, "pods", usage.NewPods(stores.core("pods"), source))
}

// addReviews adds the kinds that are questions.
func addReviews(groups *groupSet, z authorizer.UnconditionalAuthorizer, rules authorizer.RuleResolver) {
	groups.add(authenticationv1.SchemeGroupVersion, "selfsubjectreviews", review.NewSelfSubject())
	v1 := authorizationv1.SchemeGroupVersion
	groups.add(v1, "selfsubjectaccessreviews", review.NewSelfAccess(z))
	groups.add(v1, "subjectaccessreviews", review.NewAccess(z))
	groups.add(v1, "localsubjectaccessreviews", review.NewLocalAccess(z))
	if rules != nil {
		groups.add(v1, "selfsubjectrulesreviews", review.NewSelfRules(rules))
	}
}
