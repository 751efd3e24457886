package server

import (
	"errors"
	"net/http"
	"reflect"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/server/body"
)

// withChecks refuses writes whose bodies would cost more than a server has; see package
// body. It is asked with a seat, as looking takes time, and of bodies that were read
// before (bodies.go): those of long-running requests are not, nor those of APIs that
// others serve, which have bounds of their own. limit is how large a body may be, in
// bytes; what is larger has been read in part only, and the library refuses it.
func withChecks(next http.Handler, stores *stores, ofOthers func(schema.GroupVersion) bool, limit int64) http.Handler {
	patched := typesOf(stores)
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		in, _ := req.Context().Value(incomingKey{}).(*incoming)
		info, ok := request.RequestInfoFrom(req.Context())
		if in == nil || in.data == nil || !ok || !info.IsResourceRequest {
			next.ServeHTTP(w, req)
			return
		}
		version := schema.GroupVersion{Group: info.APIGroup, Version: info.APIVersion}
		if ofOthers(version) {
			next.ServeHTTP(w, req)
			return
		}
		var t reflect.Type
		if info.Subresource != "scale" { // which is decoded to a type of its own
			t = patched[version.WithResource(info.Resource)]
		}
		err := body.Check(in.contentType, in.data, t, limit)
		if err == nil {
			next.ServeHTTP(w, req)
			return
		}
		var wrong *field.Error
		var refused *apierrors.StatusError
		switch {
		case errors.As(err, &wrong):
			kind := schema.GroupKind{Group: info.APIGroup, Kind: t.Name()}
			refused = apierrors.NewInvalid(kind, info.Name, field.ErrorList{wrong})
		case errors.Is(err, body.ErrTooLarge):
			refused = apierrors.NewRequestEntityTooLargeError(err.Error())
		default:
			refused = apierrors.NewBadRequest(err.Error())
		}
		responsewriters.ErrorNegotiated(refused, apis.Codecs, version, w, req)
	})
}

// typesOf are the types of the kinds that are stored, in each version they are served in.
func typesOf(stores *stores) map[schema.GroupVersionResource]reflect.Type {
	all := map[schema.GroupVersionResource]reflect.Type{}
	known := apis.Scheme.AllKnownTypes()
	for _, store := range stores.list {
		kind := store.Kind()
		versions := []schema.GroupVersionKind{kind.GVK}
		for _, view := range kind.Views {
			versions = append(versions, kind.ViewGVK(view))
		}
		for _, gvk := range versions {
			all[gvk.GroupVersion().WithResource(kind.Resource)] = known[gvk]
		}
	}
	return all
}
