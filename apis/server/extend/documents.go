package extend

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	restful "github.com/emicklei/go-restful/v3"
	crdlisters "k8s.io/apiextensions-apiserver/pkg/client/listers/apiextensions/v1"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/util/responsewriter"
	"k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/handler3"
)

// Documents are the OpenAPI documents of version 3 of the servers of the chain behind
// the front. They are asked for when a client asks. The library's way is that the front
// asks each of them once a second what there is.
type Documents struct {
	servers []*lateOpenAPI // the front's next one comes last
}

// Install puts the documents of a server in place, which is behind all that are
// installed later. Its configuration has to have SkipOpenAPIInstallation. definitions are
// custom kinds that it serves; nil: none.
func (d *Documents) Install(server *genericapiserver.GenericAPIServer, v2 *common.Config, v3 *common.OpenAPIV3Config, definitions crdlisters.CustomResourceDefinitionLister) {
	l := newLateOpenAPI(server.Handler.GoRestfulContainer, v2, v3, definitions)
	l.install(server.Handler.NonGoRestfulMux)
	d.servers = append(d.servers, l)
}

func newLateOpenAPI(container *restful.Container, v2 *common.Config, v3 *common.OpenAPIV3Config, definitions crdlisters.CustomResourceDefinitionLister) *lateOpenAPI {
	return &lateOpenAPI{
		container: container, v2: v2, v3: v3, definitions: definitions,
		groups: map[string]http.Handler{}, custom: map[string]customGroup{},
	}
}

// Before is front, but for requests for documents of version 3: to what front knows of
// its own kinds and of the APIs of others it adds those of the servers behind it. A group
// version that front knows is front's: requests for its objects are, too.
func (d *Documents) Before(front http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		path, below := strings.CutPrefix(req.URL.Path, openAPIv3+"/")
		if req.URL.Path != openAPIv3 && !below || req.Method != http.MethodGet && req.Method != http.MethodHead {
			front.ServeHTTP(w, req)
			return
		}
		known, err := frontDocuments(front, req)
		if err != nil {
			responsewriters.InternalError(w, req, err)
			return
		}
		if !below {
			d.list(w, req, known)
			return
		}
		if _, ok := known[path]; !ok {
			for _, server := range slices.Backward(d.servers) {
				if document := server.groupDocument(path); document != nil {
					document.ServeHTTP(w, req)
					return
				}
			}
		}
		front.ServeHTTP(w, req)
	})
}

// frontDocuments are the documents that front knows, by group version.
func frontDocuments(front http.Handler, req *http.Request) (map[string]handler3.OpenAPIV3DiscoveryGroupVersion, error) {
	ask := req.Clone(req.Context())
	ask.Method, ask.URL.Path, ask.URL.RawQuery, ask.Header = http.MethodGet, openAPIv3, "", http.Header{"Accept": {"application/json"}}
	answer := responsewriter.NewInMemoryResponseWriter()
	front.ServeHTTP(answer, ask)
	if answer.RespCode() != http.StatusOK {
		return nil, fmt.Errorf("the list of OpenAPI documents of other APIs: status %d: %s", answer.RespCode(), answer.Data())
	}
	var known handler3.OpenAPIV3Discovery
	if err := json.Unmarshal(answer.Data(), &known); err != nil {
		return nil, fmt.Errorf("the list of OpenAPI documents of other APIs: %w", err)
	}
	return known.Paths, nil
}

// list names all documents.
func (d *Documents) list(w http.ResponseWriter, req *http.Request, known map[string]handler3.OpenAPIV3DiscoveryGroupVersion) {
	all := handler3.OpenAPIV3Discovery{Paths: map[string]handler3.OpenAPIV3DiscoveryGroupVersion{}}
	for _, server := range d.servers {
		if err := server.list(all.Paths); err != nil {
			responsewriters.InternalError(w, req, err)
			return
		}
	}
	maps.Copy(all.Paths, known)
	text, err := json.Marshal(all)
	if err != nil {
		responsewriters.InternalError(w, req, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	http.ServeContent(w, req, "", time.Time{}, bytes.NewReader(text))
}

// documented is a server behind the front, for what the library makes of its documents.
// Those of version 2 are asked for when a client asks, those of version 3 once a second
// of every server that has a handler: so none has one when that is set up, which is the
// last thing, after the document of version 2 has its path. Documents stands in.
type documented struct {
	genericapiserver.DelegationTarget
	// without says that no server has a handler any more.
	without func() bool
}

// UnprotectedHandler implements genericapiserver.DelegationTarget.
func (d *documented) UnprotectedHandler() http.Handler {
	if d.without() {
		return nil
	}
	return d.DelegationTarget.UnprotectedHandler()
}

// NextDelegate implements genericapiserver.DelegationTarget.
func (d *documented) NextDelegate() genericapiserver.DelegationTarget {
	next := d.DelegationTarget.NextDelegate()
	if next == nil {
		return nil
	}
	return &documented{next, d.without}
}
