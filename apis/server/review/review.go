// Package review serves the virtual kinds by which a client asks who it is and
// what it, or another user, may do. Nothing is stored: an answer is the request,
// filled in.
package review

import (
	"context"
	"fmt"
	"slices"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
)

// Storage answers one virtual kind.
type Storage[T runtime.Object] struct {
	kind       string
	singular   string
	namespaced bool
	new        func() T
	// check is what is wrong with asked, which came in that namespace; nil:
	// nothing can be.
	check func(asked T, namespace string) field.ErrorList
	// answer fills in the status of asked, for the user who asks.
	answer func(ctx context.Context, who user.Info, asked T) error
}

// The kinds served. The type arguments are the wire types.
type (
	// SelfSubject is `kubectl auth whoami`.
	SelfSubject = Storage[*authenticationv1.SelfSubjectReview]
	// SelfAccess is `kubectl auth can-i`.
	SelfAccess = Storage[*authorizationv1.SelfSubjectAccessReview]
	// Access is SelfAccess about any user.
	Access = Storage[*authorizationv1.SubjectAccessReview]
	// LocalAccess is Access within one namespace.
	LocalAccess = Storage[*authorizationv1.LocalSubjectAccessReview]
	// SelfRules is `kubectl auth can-i --list`.
	SelfRules = Storage[*authorizationv1.SelfSubjectRulesReview]
)

var (
	_ rest.Creater              = &SelfSubject{}
	_ rest.Scoper               = &SelfSubject{}
	_ rest.SingularNameProvider = &SelfSubject{}
)

// New returns an empty object of the kind.
func (s *Storage[T]) New() runtime.Object { return s.new() }

// Destroy does nothing: nothing is stored.
func (s *Storage[T]) Destroy() {}

// NamespaceScoped reports whether the question is asked within a namespace.
func (s *Storage[T]) NamespaceScoped() bool { return s.namespaced }

// GetSingularName is the name of the kind in discovery.
func (s *Storage[T]) GetSingularName() string { return s.singular }

// Create answers obj.
func (s *Storage[T]) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc, _ *metav1.CreateOptions) (runtime.Object, error) {
	asked, ok := obj.(T)
	if !ok {
		return nil, errors.NewBadRequest(fmt.Sprintf("expected a %s, got %T", s.singular, obj))
	}
	who, ok := request.UserFrom(ctx)
	if !ok {
		return nil, errors.NewBadRequest("no user present on request")
	}
	if s.check != nil {
		namespace, _ := request.NamespaceFrom(ctx)
		if faults := s.check(asked, namespace); len(faults) > 0 {
			return nil, errors.NewInvalid(authorizationv1.SchemeGroupVersion.WithKind(s.kind).GroupKind(), "", faults)
		}
	}
	if validate != nil {
		if err := validate(ctx, obj.DeepCopyObject()); err != nil {
			return nil, err
		}
	}
	if err := s.answer(ctx, who, asked); err != nil {
		return nil, err
	}
	return asked, nil
}

// NewSelfSubject says who the client is.
func NewSelfSubject() *SelfSubject {
	return &SelfSubject{
		kind:     "SelfSubjectReview",
		singular: "selfsubjectreview",
		new:      func() *authenticationv1.SelfSubjectReview { return &authenticationv1.SelfSubjectReview{} },
		answer: func(_ context.Context, who user.Info, asked *authenticationv1.SelfSubjectReview) error {
			asked.Status.UserInfo = userInfo(who)
			return nil
		},
	}
}

// NewSelfAccess says whether the client may do something.
func NewSelfAccess(z authorizer.UnconditionalAuthorizer) *SelfAccess {
	return &SelfAccess{
		kind:     "SelfSubjectAccessReview",
		singular: "selfsubjectaccessreview",
		new: func() *authorizationv1.SelfSubjectAccessReview {
			return &authorizationv1.SelfSubjectAccessReview{}
		},
		check: func(asked *authorizationv1.SelfSubjectAccessReview, _ string) field.ErrorList {
			return append(checkAttributes(asked.Spec.ResourceAttributes, asked.Spec.NonResourceAttributes), checkMeta(asked.ObjectMeta, "must be empty")...)
		},
		answer: func(ctx context.Context, who user.Info, asked *authorizationv1.SelfSubjectAccessReview) error {
			asked.Status = decide(ctx, z, who, asked.Spec.ResourceAttributes, asked.Spec.NonResourceAttributes)
			return nil
		},
	}
}

// NewAccess answers whether a user may do something.
func NewAccess(z authorizer.UnconditionalAuthorizer) *Access {
	return &Access{
		kind:     "SubjectAccessReview",
		singular: "subjectaccessreview",
		new:      func() *authorizationv1.SubjectAccessReview { return &authorizationv1.SubjectAccessReview{} },
		check: func(asked *authorizationv1.SubjectAccessReview, _ string) field.ErrorList {
			return append(checkSpec(asked.Spec), checkMeta(asked.ObjectMeta, "must be empty")...)
		},
		answer: func(ctx context.Context, _ user.Info, asked *authorizationv1.SubjectAccessReview) error {
			asked.Status = decideSpec(ctx, z, asked.Spec)
			return nil
		},
	}
}

// NewLocalAccess answers whether a user may do something in one namespace.
func NewLocalAccess(z authorizer.UnconditionalAuthorizer) *LocalAccess {
	return &LocalAccess{
		kind:       "LocalSubjectAccessReview",
		singular:   "localsubjectaccessreview",
		namespaced: true,
		new: func() *authorizationv1.LocalSubjectAccessReview {
			return &authorizationv1.LocalSubjectAccessReview{}
		},
		check: checkLocal,
		answer: func(ctx context.Context, _ user.Info, asked *authorizationv1.LocalSubjectAccessReview) error {
			asked.Status = decideSpec(ctx, z, asked.Spec)
			return nil
		},
	}
}

// NewSelfRules lists what the client may do in a namespace.
func NewSelfRules(resolver authorizer.RuleResolver) *SelfRules {
	return &SelfRules{
		kind:     "SelfSubjectRulesReview",
		singular: "selfsubjectrulesreview",
		new: func() *authorizationv1.SelfSubjectRulesReview {
			return &authorizationv1.SelfSubjectRulesReview{}
		},
		answer: func(ctx context.Context, who user.Info, asked *authorizationv1.SelfSubjectRulesReview) error {
			if asked.Spec.Namespace == "" {
				return errors.NewBadRequest("no namespace on request")
			}
			resources, paths, incomplete, err := resolver.RulesFor(ctx, who, asked.Spec.Namespace)
			asked.Status = authorizationv1.SubjectRulesReviewStatus{
				ResourceRules:    []authorizationv1.ResourceRule{},
				NonResourceRules: []authorizationv1.NonResourceRule{},
				Incomplete:       incomplete,
			}
			if err != nil {
				asked.Status.EvaluationError = err.Error()
			}
			for _, r := range resources {
				asked.Status.ResourceRules = append(asked.Status.ResourceRules, authorizationv1.ResourceRule{
					Verbs: r.GetVerbs(), APIGroups: r.GetAPIGroups(), Resources: r.GetResources(), ResourceNames: r.GetResourceNames(),
				})
			}
			for _, r := range paths {
				asked.Status.NonResourceRules = append(asked.Status.NonResourceRules, authorizationv1.NonResourceRule{
					Verbs: r.GetVerbs(), NonResourceURLs: r.GetNonResourceURLs(),
				})
			}
			return nil
		},
	}
}

func decideSpec(ctx context.Context, z authorizer.UnconditionalAuthorizer, spec authorizationv1.SubjectAccessReviewSpec) authorizationv1.SubjectAccessReviewStatus {
	who := &user.DefaultInfo{Name: spec.User, UID: spec.UID, Groups: slices.Clone(spec.Groups), Extra: map[string][]string{}}
	for key, values := range spec.Extra {
		who.Extra[key] = values
	}
	return decide(ctx, z, who, spec.ResourceAttributes, spec.NonResourceAttributes)
}

func decide(ctx context.Context, z authorizer.UnconditionalAuthorizer, who user.Info, resource *authorizationv1.ResourceAttributes, path *authorizationv1.NonResourceAttributes) authorizationv1.SubjectAccessReviewStatus {
	question := attributes(who, resource, path)
	decision, reason, err := z.Authorize(ctx, question)
	status := authorizationv1.SubjectAccessReviewStatus{
		Allowed: decision == authorizer.DecisionAllow,
		Denied:  decision == authorizer.DecisionDeny,
		Reason:  reason,
	}
	status.EvaluationError = evaluationError(err, question)
	return status
}

// attributes puts the question as the authorizer is asked it.
func attributes(who user.Info, resource *authorizationv1.ResourceAttributes, path *authorizationv1.NonResourceAttributes) authorizer.AttributesRecord {
	if path != nil {
		return authorizer.AttributesRecord{User: who, Verb: path.Verb, Path: path.Path}
	}
	record := authorizer.AttributesRecord{
		User: who, ResourceRequest: true,
		Verb: resource.Verb, Namespace: resource.Namespace,
		APIGroup: resource.Group, APIVersion: resource.Version,
		Resource: resource.Resource, Subresource: resource.Subresource, Name: resource.Name,
	}
	if s := resource.FieldSelector; s != nil {
		record.FieldSelectorRequirements, record.FieldSelectorParsingErr = fieldRequirements(s)
	}
	if s := resource.LabelSelector; s != nil {
		record.LabelSelectorRequirements, record.LabelSelectorParsingErr = labelRequirements(s)
	}
	return record
}
