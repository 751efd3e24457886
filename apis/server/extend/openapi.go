package extend

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/url"
	"runtime/debug"
	"strings"
	"sync"

	restful "github.com/emicklei/go-restful/v3"
	crdlisters "k8s.io/apiextensions-apiserver/pkg/client/listers/apiextensions/v1"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/server/routes"
	"k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/handler3"
)

const (
	openAPIv2 = "/openapi/v2"
	openAPIv3 = "/openapi/v3"
)

// lateOpenAPI serves the OpenAPI documents of a server's kinds and builds each
// when it is first asked for: version 2 as a whole, version 3 for one group
// version at a time. The library would build all of them at start.
type lateOpenAPI struct {
	container *restful.Container
	v2        *common.Config
	v3        *common.OpenAPIV3Config
	// definitions are the custom kinds that it serves too; nil: none.
	definitions crdlisters.CustomResourceDefinitionLister
	// building keeps two documents from being built at a time: the
	// configurations are shared.
	building sync.Mutex
	whole    http.Handler            // nil until asked for
	groups   map[string]http.Handler // by path below openAPIv3
	custom   map[string]customGroup  // the same of custom kinds
}

// install puts the document of version 2 in place; those of version 3 are asked for by
// Documents.
func (l *lateOpenAPI) install(paths *mux.PathRecorderMux) {
	paths.HandleFunc(openAPIv2, func(w http.ResponseWriter, req *http.Request) { l.document().ServeHTTP(w, req) })
}

// document is the handler of the document of version 2.
func (l *lateOpenAPI) document() http.Handler {
	l.building.Lock()
	defer l.building.Unlock()
	if l.whole == nil {
		paths := mux.NewPathRecorderMux("openapi-v2")
		service, fixed := routes.OpenAPI{Config: l.v2}.InstallV2(l.container, paths)
		if l.definitions != nil {
			service.UpdateSpecLazy((&mergedDocument{fixed: fixed, definitions: l.definitions}).value())
		}
		l.whole = paths
	}
	return l.whole
}

// list adds the documents of version 3 to paths, as they are now. What the library lists
// as hashes, for which all documents have to be built, is here that of the build: a
// client that asks for a document with it is redirected to the hash of the content.
func (l *lateOpenAPI) list(paths map[string]handler3.OpenAPIV3DiscoveryGroupVersion) error {
	add := func(path, hash string) {
		location := url.URL{Path: openAPIv3 + "/" + path, RawQuery: "hash=" + hash}
		paths[path] = handler3.OpenAPIV3DiscoveryGroupVersion{ServerRelativeURL: location.String()}
	}
	if l.definitions != nil {
		groups, err := customGroups(l.definitions)
		if err != nil {
			return err
		}
		for path, definitions := range groups {
			add(path, customHash(definitions))
		}
	}
	for _, service := range l.container.RegisteredWebServices() {
		add(below(service), buildHash())
	}
	return nil
}

// groupDocument is nil if nothing is served below that path.
func (l *lateOpenAPI) groupDocument(path string) http.Handler {
	l.building.Lock()
	defer l.building.Unlock()
	if known := l.groups[path]; known != nil {
		return known
	}
	if custom := l.customDocument(path); custom != nil {
		return custom
	}
	for _, service := range l.container.RegisteredWebServices() {
		if below(service) != path {
			continue
		}
		only := restful.NewContainer()
		only.Add(service)
		paths := mux.NewPathRecorderMux("openapi-v3")
		routes.OpenAPI{V3Config: l.v3}.InstallV3(only, paths)
		l.groups[path] = paths
		return paths
	}
	return nil
}

// below is the path of a service's document below openAPIv3.
func below(service *restful.WebService) string {
	return strings.TrimPrefix(service.RootPath(), "/")
}

// buildHash differs between builds that may have different documents.
var buildHash = sync.OnceValue(func() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	sum := sha256.Sum256([]byte(info.String()))
	return strings.ToUpper(hex.EncodeToString(sum[:]))
})
