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
// one at which the namespace was created, or the last one deleted if there is none now
// (a webhook may grant rights in it all the same); 0 when the same is allowed in all
// namespaces, or the request is not about one namespace.
func (p *pastHandler) since(ctx context.Context, info *request.RequestInfo) (int64, error) {
	if info.Namespace == "" || p.store == nil {
		return 0, nil
	}
	key := keyOf(&request.RequestInfo{Resource: "namespaces", Name: info.Namespace})
	first, err := p.store.Created(ctx, key)
	if err != nil {
		return 0, err
	}
	if first == 0 {
		known, err := p.store.Changes(ctx, key, 1)
		if err != nil {
			return 0, err
		}
		if len(known.List) == 0 {
			return 0, nil // there was none as far back as anything can be seen
		}
		first = known.List[len(known.List)-1].Revision
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
	return first, nil
}

// present refuses what lists or watches from before the namespace was created: by
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

// begins is the revision that a request will show a namespace's objects of, as the
// library reads its parameters; 0: the present one.
func begins(info *request.RequestInfo, query url.Values) int64 {
	switch info.Verb {
	case "watch":
	case "list", "deletecollection": // which answers with what it has listed, a dry run even if that is gone
		if token := query.Get("continue"); token != "" {
			_, rev, err := storage.DecodeContinue(token, "/")
			if err != nil {
				return 0 // the library refuses it
			}
			return rev
		}
		switch metav1.ResourceVersionMatch(query.Get("resourceVersionMatch")) {
		case metav1.ResourceVersionMatchNotOlderThan:
			return 0
		case metav1.ResourceVersionMatchExact:
		default:
			// Without one, a list of a limit is exact; a deletion's always has one.
			limit, _ := strconv.ParseInt(query.Get("limit"), 10, 64) // what is no number is refused by the library
			if info.Verb == "list" && limit <= 0 {
				return 0
			}
		}
	default:
		return 0
	}
	rev, _ := strconv.ParseInt(query.Get("resourceVersion"), 10, 64)
	return rev
}

// before refuses a revision before since, as one that has left the history: clients
// that go on with a list or watch begin again then.
func before(rev, since int64, info *request.RequestInfo) error {
	if rev >= since {
		return nil
	}
	return apierrors.NewResourceExpired(fmt.Sprintf("what namespace %q holds begins at revision %d, after %d: to see what one of the same name held before takes the right to %s %s in all namespaces",
		info.Namespace, since, rev, info.Verb, schema.GroupResource{Group: info.APIGroup, Resource: info.Resource}))
}
