package server

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"
)

// A right in a namespace is a right to what the present namespace of that name
// has held. One of the same name may have been deleted before, and belonged to
// others: what it held is shown to those who may read the resource in all
// namespaces.

// since is the first revision of which a request may see a namespace's objects: the
// one at which the namespace was created, or 0, when the same is allowed in all
// namespaces or the request is not about one namespace.
func (p *pastHandler) since(ctx context.Context, info *request.RequestInfo) (int64, error) {
	if info.Namespace == "" || p.store == nil {
		return 0, nil
	}
	created, err := p.store.Created(ctx, keyOf(&request.RequestInfo{Resource: "namespaces", Name: info.Namespace}))
	if err != nil || created == 0 {
		return created, err // of a namespace that is gone only rights in all namespaces are left
	}
	attributes, err := filters.GetAuthorizerAttributes(ctx)
	if err != nil {
		return 0, apierrors.NewInternalError(err)
	}
	everywhere := *attributes.(*authorizer.AttributesRecord)
	everywhere.Namespace = ""
	if decision, _, err := p.authorizer.Authorize(ctx, everywhere); err == nil && decision == authorizer.DecisionAllow {
		return 0, nil
	}
	return created, nil
}

// present refuses a list or watch that begins before the namespace was created: by
// resourceVersion, or by a continue token.
func (p *pastHandler) present(req *http.Request, info *request.RequestInfo, query url.Values) error {
	from := begins(info, query)
	if from <= 0 {
		return nil
	}
	since, err := p.since(req.Context(), info)
	if err != nil {
		return err
	}
	return before(from, since, info)
}

// begins is the revision that a list or watch asks for; 0: the present one.
func begins(info *request.RequestInfo, query url.Values) int64 {
	version := query.Get("resourceVersion")
	switch {
	case info.Verb == "list" && query.Get("continue") != "":
		_, rev, err := storage.DecodeContinue(query.Get("continue"), "/")
		if err != nil {
			return 0 // the library refuses it
		}
		return rev
	case info.Verb == "list" && query.Get("resourceVersionMatch") == string(metav1.ResourceVersionMatchExact), info.Verb == "watch":
		rev, _ := strconv.ParseInt(version, 10, 64)
		return rev
	}
	return 0
}

// before refuses a revision before since, as one that has left the history: clients
// that go on with a list or watch begin anew then.
func before(rev, since int64, info *request.RequestInfo) error {
	if rev >= since {
		return nil
	}
	return apierrors.NewResourceExpired(fmt.Sprintf("namespace %q was created at revision %d, after %d: to see what one of the same name held before takes the right to %s %s in all namespaces",
		info.Namespace, since, rev, info.Verb, schema.GroupResource{Group: info.APIGroup, Resource: info.Resource}))
}
