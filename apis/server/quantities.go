package server

import (
	"bytes"
	"io"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/server/quantity"
)

// withQuantities refuses writes that hold quantities nothing can compute with, before
// they are decoded. limit is how large a body may be, in bytes; what is larger is left
// to the handlers, which refuse it.
func withQuantities(next http.Handler, stores *stores, limit int64) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		info, ok := request.RequestInfoFrom(req.Context())
		if !ok || !info.IsResourceRequest || req.Body == nil || req.Body == http.NoBody ||
			req.Method != http.MethodPost && req.Method != http.MethodPut && req.Method != http.MethodPatch {
			next.ServeHTTP(w, req)
			return
		}
		store := stores.byName[schema.GroupResource{Group: info.APIGroup, Resource: info.Resource}]
		if store == nil {
			next.ServeHTTP(w, req) // not stored as a type of ours
			return
		}
		body, err := io.ReadAll(io.LimitReader(req.Body, limit+1))
		if err == nil && int64(len(body)) <= limit {
			if wrong := quantity.Check(req.Header.Get("Content-Type"), body, store.New()); wrong != nil {
				gv := schema.GroupVersion{Group: info.APIGroup, Version: info.APIVersion}
				refused := apierrors.NewInvalid(store.Kind().GVK.GroupKind(), info.Name, field.ErrorList{wrong})
				responsewriters.ErrorNegotiated(refused, apis.Codecs, gv, w, req)
				return
			}
		}
		req = req.WithContext(req.Context()) // a copy
		req.Body = again{io.MultiReader(bytes.NewReader(body), failing{req.Body, err}), req.Body}
		next.ServeHTTP(w, req)
	})
}

// again is a body of which a part was read before.
type again struct {
	io.Reader
	io.Closer
}

// failing reads on, unless reading has failed before.
type failing struct {
	io.Reader
	err error
}

// Read implements io.Reader.
func (f failing) Read(b []byte) (int, error) {
	if f.err != nil {
		return 0, f.err
	}
	return f.Reader.Read(b)
}
