package server_test

import (
	"context"
	"net/http"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/server/servertest"
)

// TestWrongReviews: a question that cannot be answered is a 422 that names the
// field; one that is understood in part is answered, and says so.
func TestWrongReviews(t *testing.T) {
	s := servertest.Start(t, nil)
	api := s.Client.AuthorizationV1()
	pods := func() *authorizationv1.ResourceAttributes {
		return &authorizationv1.ResourceAttributes{Namespace: "default", Verb: "list", Resource: "pods"}
	}
	path := &authorizationv1.NonResourceAttributes{Verb: "get", Path: "/x"}
	access := func(change func(*authorizationv1.SubjectAccessReview)) func(context.Context) (*authorizationv1.SubjectAccessReviewStatus, error) {
		return func(ctx context.Context) (*authorizationv1.SubjectAccessReviewStatus, error) {
			review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: "jane", ResourceAttributes: pods()}}
			change(review)
			answer, err := api.SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
			if err != nil {
				return nil, err
			}
			return &answer.Status, nil
		}
	}
	fieldSelector := func(selector authorizationv1.FieldSelectorAttributes) func(context.Context) (*authorizationv1.SubjectAccessReviewStatus, error) {
		return access(func(r *authorizationv1.SubjectAccessReview) { r.Spec.ResourceAttributes.FieldSelector = &selector })
	}
	labelSelector := func(selector authorizationv1.LabelSelectorAttributes) func(context.Context) (*authorizationv1.SubjectAccessReviewStatus, error) {
		return access(func(r *authorizationv1.SubjectAccessReview) { r.Spec.ResourceAttributes.LabelSelector = &selector })
	}
	isNode := metav1.FieldSelectorRequirement{Key: "spec.nodeName", Operator: metav1.FieldSelectorOpIn, Values: []string{"n1"}}

	for name, test := range map[string]struct {
		ask   func(context.Context) (*authorizationv1.SubjectAccessReviewStatus, error)
		field string
	}{
		"about nobody":    {access(func(r *authorizationv1.SubjectAccessReview) { r.Spec.User = "" }), "spec.user"},
		"about nothing":   {access(func(r *authorizationv1.SubjectAccessReview) { r.Spec.ResourceAttributes = nil }), "spec.resourceAttributes"},
		"about two":       {access(func(r *authorizationv1.SubjectAccessReview) { r.Spec.NonResourceAttributes = path }), "spec.nonResourceAttributes"},
		"with labels":     {access(func(r *authorizationv1.SubjectAccessReview) { r.Labels = map[string]string{"a": "b"} }), "metadata"},
		"empty fields":    {fieldSelector(authorizationv1.FieldSelectorAttributes{}), "spec.resourceAttributes.fieldSelector.requirements"},
		"empty labels":    {labelSelector(authorizationv1.LabelSelectorAttributes{}), "spec.resourceAttributes.labelSelector.requirements"},
		"two selectors":   {fieldSelector(authorizationv1.FieldSelectorAttributes{RawSelector: "a=b", Requirements: []metav1.FieldSelectorRequirement{isNode}}), "spec.resourceAttributes.fieldSelector.rawSelector"},
		"in, but nothing": {fieldSelector(authorizationv1.FieldSelectorAttributes{Requirements: []metav1.FieldSelectorRequirement{{Key: "a", Operator: metav1.FieldSelectorOpIn}}}), "spec.resourceAttributes.fieldSelector.requirements[0].values"},
		"of oneself, named": {func(ctx context.Context) (*authorizationv1.SubjectAccessReviewStatus, error) {
			_, err := api.SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{ObjectMeta: meta("x"), Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: pods()}}, metav1.CreateOptions{})
			return nil, err
		}, "metadata"},
		"of another namespace": {func(ctx context.Context) (*authorizationv1.SubjectAccessReviewStatus, error) {
			_, err := api.LocalSubjectAccessReviews("kube-system").Create(ctx, &authorizationv1.LocalSubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: "jane", ResourceAttributes: pods()}}, metav1.CreateOptions{})
			return nil, err
		}, "spec.resourceAttributes.namespace"},
		"of a path in a namespace": {func(ctx context.Context) (*authorizationv1.SubjectAccessReviewStatus, error) {
			_, err := api.LocalSubjectAccessReviews("default").Create(ctx, &authorizationv1.LocalSubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: "jane", NonResourceAttributes: path}}, metav1.CreateOptions{})
			return nil, err
		}, "spec.nonResourceAttributes"},
	} {
		_, err := test.ask(t.Context())
		if status, ok := err.(apierrors.APIStatus); !ok || status.Status().Code != http.StatusUnprocessableEntity || !hasCause(status, test.field) {
			t.Errorf("%s: %v, want a 422 about %s", name, err, test.field)
		}
	}

	for name, test := range map[string]struct {
		ask  func(context.Context) (*authorizationv1.SubjectAccessReviewStatus, error)
		want string
	}{
		"understood":             {fieldSelector(authorizationv1.FieldSelectorAttributes{Requirements: []metav1.FieldSelectorRequirement{isNode}}), ""},
		"a raw selector, broken": {fieldSelector(authorizationv1.FieldSelectorAttributes{RawSelector: "a==b==c,,"}), "spec.resourceAttributes.fieldSelector ignored due to parse error"},
		"partly of newer clients": {fieldSelector(authorizationv1.FieldSelectorAttributes{Requirements: []metav1.FieldSelectorRequirement{isNode, {Key: "a", Operator: "Near", Values: []string{"b"}}}}),
			"spec.resourceAttributes.fieldSelector partially ignored due to parse error"},
		"labels of newer clients": {labelSelector(authorizationv1.LabelSelectorAttributes{Requirements: []metav1.LabelSelectorRequirement{{Key: "a", Operator: "Near", Values: []string{"b"}}}}),
			"spec.resourceAttributes.labelSelector ignored due to parse error"},
	} {
		status, err := test.ask(t.Context())
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if status.Allowed || (test.want == "") != (status.EvaluationError == "") || !strings.Contains(status.EvaluationError, test.want) {
			t.Errorf("%s: %+v, want the evaluation error %q", name, status, test.want)
		}
	}
}

func hasCause(status apierrors.APIStatus, field string) bool {
	details := status.Status().Details
	if details == nil {
		return false
	}
	for _, cause := range details.Causes {
		if cause.Field == field {
			return true
		}
	}
	return false
}
