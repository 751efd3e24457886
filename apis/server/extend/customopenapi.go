package extend

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	crdlisters "k8s.io/apiextensions-apiserver/pkg/client/listers/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/controller/openapi/builder"
	crdfeatures "k8s.io/apiextensions-apiserver/pkg/features"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/server/mux"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/klog/v2"
	"k8s.io/kube-openapi/pkg/cached"
	"k8s.io/kube-openapi/pkg/handler"
	"k8s.io/kube-openapi/pkg/handler3"
	"k8s.io/kube-openapi/pkg/spec3"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

// customGroup is the document of version 3 of one group version of custom kinds,
// as it is until one of its definitions changes.
type customGroup struct {
	hash    string
	handler http.Handler
}

// served is a custom kind in one of its versions.
type served struct {
	*apiextensionsv1.CustomResourceDefinition
	version string
}

// customGroups are the established custom kinds by the path of their group
// version's document, each list in the order of names.
func customGroups(lister crdlisters.CustomResourceDefinitionLister) (map[string][]served, error) {
	all, err := lister.List(labels.Everything())
	if err != nil {
		return nil, err
	}
	groups := map[string][]served{}
	for _, definition := range all {
		if !apihelpers.IsCRDConditionTrue(definition, apiextensionsv1.Established) {
			continue
		}
		for _, version := range definition.Spec.Versions {
			if version.Served {
				path := "apis/" + definition.Spec.Group + "/" + version.Name
				groups[path] = append(groups[path], served{definition, version.Name})
			}
		}
	}
	for _, definitions := range groups {
		slices.SortFunc(definitions, func(a, b served) int { return strings.Compare(a.Name, b.Name) })
	}
	return groups, nil
}

// customHash changes with what definitions say.
func customHash(definitions []served) string {
	sum := sha256.New()
	fmt.Fprintln(sum, buildHash())
	for _, d := range definitions {
		fmt.Fprintln(sum, d.Name, d.version, d.UID, d.Generation)
	}
	return strings.ToUpper(hex.EncodeToString(sum.Sum(nil)))
}

// customDocument is nil if no custom kind is of that group version. l.building is
// held.
func (l *lateOpenAPI) customDocument(path string) http.Handler {
	if l.definitions == nil {
		return nil
	}
	groups, err := customGroups(l.definitions)
	definitions := groups[path]
	if err != nil || len(definitions) == 0 {
		delete(l.custom, path)
		return nil
	}
	hash := customHash(definitions)
	if known := l.custom[path]; known.hash == hash {
		return known.handler
	}
	var specs []*spec3.OpenAPI
	for _, d := range definitions {
		one, err := builder.BuildOpenAPIV3(d.CustomResourceDefinition, d.version, documentOptions(false))
		if err != nil {
			klog.InfoS("A custom kind has no OpenAPI document", "definition", d.Name, "version", d.version, "err", err)
			continue
		}
		specs = append(specs, one)
	}
	merged, err := builder.MergeSpecsV3(specs...)
	if err != nil {
		klog.InfoS("Custom kinds have no OpenAPI document", "path", path, "err", err)
		return nil
	}
	service, paths := handler3.NewOpenAPIService(), mux.NewPathRecorderMux("openapi-v3-custom")
	if err := service.RegisterOpenAPIV3VersionedService(openAPIv3, paths); err != nil {
		klog.InfoS("Custom kinds have no OpenAPI document", "path", path, "err", err)
		return nil
	}
	service.UpdateGroupVersion(path, merged)
	l.custom[path] = customGroup{hash, paths}
	return paths
}

func documentOptions(v2 bool) builder.Options {
	return builder.Options{V2: v2, IncludeSelectableFields: utilfeature.DefaultFeatureGate.Enabled(crdfeatures.CustomResourceFieldSelectors)}
}

// mergedDocument is the document of version 2 of the definitions' own kind and of
// the custom kinds.
type mergedDocument struct {
	fixed       *spec.Swagger
	definitions crdlisters.CustomResourceDefinitionLister

	mu   sync.Mutex
	hash string
	last *spec.Swagger
}

// value is the document, built again when a definition has changed since it was
// last asked for.
func (m *mergedDocument) value() cached.Value[*spec.Swagger] {
	return cached.Func(func() (*spec.Swagger, string, error) {
		groups, err := customGroups(m.definitions)
		if err != nil {
			return nil, "", err
		}
		var all []served
		for _, definitions := range groups {
			all = append(all, definitions...)
		}
		slices.SortFunc(all, func(a, b served) int {
			return strings.Compare(a.Name+" "+a.version, b.Name+" "+b.version)
		})
		m.mu.Lock()
		defer m.mu.Unlock()
		hash := customHash(all)
		if m.last != nil && m.hash == hash {
			return m.last, m.hash, nil
		}
		var specs []*spec.Swagger
		for _, d := range all {
			one, err := builder.BuildOpenAPIV2(d.CustomResourceDefinition, d.version, documentOptions(true))
			if err != nil {
				klog.InfoS("A custom kind is missing from the OpenAPI document", "definition", d.Name, "version", d.version, "err", err)
				continue
			}
			// As those of the fixed part: documents that differ in them do not merge.
			one.Definitions = handler.PruneDefaults(one.Definitions)
			specs = append(specs, one)
		}
		merged, err := builder.MergeSpecs(m.fixed, specs...)
		if err != nil {
			return nil, "", fmt.Errorf("merge the documents of custom kinds: %w", err)
		}
		m.last, m.hash = merged, hash
		return merged, hash, nil
	})
}
