package tokens

import (
	"context"
	"fmt"
	"slices"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
)

// Bounds of what may be asked for, in seconds, and what is given unasked.
const (
	minSeconds     int64 = 600
	maxSeconds     int64 = 1 << 32
	defaultSeconds int64 = 3600
	// podSeconds is what the server itself asks for in pods: such a token
	// lives on for a year as long as its pod does, for programs that read
	// their token once, and is renewed long before by those that do not.
	podSeconds = PodSeconds
	extended   = 365 * 24 * time.Hour
)

// PodSeconds is the lifetime of the tokens that admission puts into pods.
const PodSeconds int64 = 3607

// Request is the subresource serviceaccounts/token.
type Request struct {
	issuer    *Issuer
	audiences []string
	objects   Objects
}

var (
	_ rest.NamedCreater                   = &Request{}
	_ rest.GroupVersionKindProvider       = &Request{}
	_ rest.SubresourceObjectMetaPreserver = &Request{}
)

// NewRequest serves tokens of issuer, meant for audiences unless asked
// otherwise.
func NewRequest(issuer *Issuer, audiences []string, objects Objects) *Request {
	return &Request{issuer: issuer, audiences: audiences, objects: objects}
}

// New implements rest.Storage.
func (r *Request) New() runtime.Object { return &authenticationv1.TokenRequest{} }

// Destroy implements rest.Storage: nothing is stored.
func (r *Request) Destroy() {}

// GroupVersionKind implements rest.GroupVersionKindProvider.
func (r *Request) GroupVersionKind(schema.GroupVersion) schema.GroupVersionKind {
	return authenticationv1.SchemeGroupVersion.WithKind("TokenRequest")
}

// PreserveRequestObjectMetaSystemFieldsOnSubresourceCreate keeps the uid of the
// service account that the client means.
func (r *Request) PreserveRequestObjectMetaSystemFieldsOnSubresourceCreate() bool { return true }

// Create issues a token of the service account called name.
func (r *Request) Create(ctx context.Context, name string, obj runtime.Object, validate rest.ValidateObjectFunc, options *metav1.CreateOptions) (runtime.Object, error) {
	asked, ok := obj.(*authenticationv1.TokenRequest)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("expected a TokenRequest, got %T", obj))
	}
	account, err := r.account(ctx, name)
	if err != nil {
		return nil, err
	}
	switch {
	case asked.Name == "":
		asked.Name = account.Name
	case asked.Name != account.Name:
		return nil, invalid(name, field.Invalid(field.NewPath("metadata", "name"), asked.Name, "must match the service account name if specified"))
	}
	switch {
	case asked.Namespace == "":
		asked.Namespace = account.Namespace
	case asked.Namespace != account.Namespace:
		return nil, invalid(name, field.Invalid(field.NewPath("metadata", "namespace"), asked.Namespace, "must match the service account namespace if specified"))
	}
	switch {
	case asked.UID == "":
		asked.UID = account.UID
	case asked.UID != account.UID:
		return nil, apierrors.NewConflict(schema.GroupResource{Group: authenticationv1.GroupName, Resource: "TokenRequest"}, name,
			fmt.Errorf("the UID in the token request (%s) does not match the UID of the service account (%s)", asked.UID, account.UID))
	}
	if asked.CreationTimestamp.IsZero() {
		asked.CreationTimestamp = metav1.NewTime(r.issuer.now())
	}
	// Admission judges whom the token was asked for: who named no audience
	// asked for this server.
	if validate != nil {
		if err := validate(ctx, obj.DeepCopyObject()); err != nil {
			return nil, err
		}
	}
	if asked.Spec.ExpirationSeconds == nil {
		seconds := defaultSeconds
		asked.Spec.ExpirationSeconds = &seconds
	}
	if len(asked.Spec.Audiences) == 0 {
		asked.Spec.Audiences = slices.Clone(r.audiences)
	}
	if faults := validateRequest(asked); len(faults) > 0 {
		return nil, invalid(asked.Name, faults...)
	}
	grant, err := r.grant(ctx, account, asked)
	if err != nil {
		return nil, err
	}
	asked.Status = authenticationv1.TokenRequestStatus{
		ExpirationTimestamp: metav1.NewTime(r.issuer.now().Add(time.Duration(*asked.Spec.ExpirationSeconds) * time.Second)),
	}
	if options != nil && len(options.DryRun) > 0 {
		return asked, nil
	}
	token, id, err := r.issuer.Issue(ctx, grant)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	audit.AddAuditAnnotation(ctx, serviceaccount.IssuedCredentialIDAuditAnnotationKey, "JTI="+id)
	asked.Status.Token = token
	return asked, nil
}

func (r *Request) account(ctx context.Context, name string) (*corev1.ServiceAccount, error) {
	namespace, ok := request.NamespaceFrom(ctx)
	if !ok {
		return nil, apierrors.NewBadRequest("no namespace on the request")
	}
	return r.objects.ServiceAccount(ctx, namespace, name)
}

func invalid(name string, faults ...*field.Error) error {
	return apierrors.NewInvalid(authenticationv1.SchemeGroupVersion.WithKind("TokenRequest").GroupKind(), name, faults)
}

func validateRequest(asked *authenticationv1.TokenRequest) field.ErrorList {
	at := field.NewPath("spec", "expirationSeconds")
	switch seconds := *asked.Spec.ExpirationSeconds; {
	case seconds < minSeconds:
		return field.ErrorList{field.Invalid(at, seconds, "may not specify a duration less than 10 minutes")}
	case seconds > maxSeconds:
		return field.ErrorList{field.Invalid(at, seconds, "may not specify a duration larger than 2^32 seconds")}
	}
	return nil
}

// grant is what the token will say.
func (r *Request) grant(ctx context.Context, account *corev1.ServiceAccount, asked *authenticationv1.TokenRequest) (Grant, error) {
	now := r.issuer.now()
	grant := Grant{
		Namespace: account.Namespace, Account: refTo(account), Audiences: asked.Spec.Audiences,
		Expires: now.Add(time.Duration(*asked.Spec.ExpirationSeconds) * time.Second),
	}
	bound := asked.Spec.BoundObjectRef
	if bound == nil {
		return grant, nil
	}
	group, _ := schema.ParseGroupVersion(bound.APIVersion)
	if group != corev1.SchemeGroupVersion {
		return grant, cannotBind(bound)
	}
	switch bound.Kind {
	case "Pod":
		pod, err := r.objects.BoundPod(ctx, account.Namespace, bound.Name)
		if err != nil {
			return grant, err
		}
		if err := sameUID(bound, pod, "pods"); err != nil {
			return grant, err
		}
		if pod.Spec.ServiceAccountName != account.Name {
			return grant, apierrors.NewBadRequest(fmt.Sprintf("cannot bind token for serviceaccount %q to pod running with different serviceaccount name.", account.Name))
		}
		ref := refTo(pod)
		grant.Pod = &ref
		if pod.Spec.NodeName != "" {
			grant.Node = &Ref{Name: pod.Spec.NodeName}
			if node, err := r.objects.BoundNode(ctx, pod.Spec.NodeName); err == nil {
				*grant.Node = refTo(node)
			} else if !apierrors.IsNotFound(err) {
				return grant, err
			}
		}
		if *asked.Spec.ExpirationSeconds == podSeconds && forUs(asked.Spec.Audiences, r.audiences) {
			grant.WarnAfter, grant.Expires = grant.Expires, now.Add(extended)
		}
	case "Secret":
		secret, err := r.objects.BoundSecret(ctx, account.Namespace, bound.Name)
		if err != nil {
			return grant, err
		}
		if err := sameUID(bound, secret, "secrets"); err != nil {
			return grant, err
		}
		ref := refTo(secret)
		grant.Secret = &ref
	case "Node":
		node, err := r.objects.BoundNode(ctx, bound.Name)
		if err != nil {
			return grant, err
		}
		if err := sameUID(bound, node, "nodes"); err != nil {
			return grant, err
		}
		ref := refTo(node)
		grant.Node = &ref
	default:
		return grant, cannotBind(bound)
	}
	return grant, nil
}

func cannotBind(ref *authenticationv1.BoundObjectReference) error {
	return apierrors.NewBadRequest(fmt.Sprintf("cannot bind token to object of type %s/%s: a token can be bound to a Pod, a Secret or a Node of v1", ref.APIVersion, ref.Kind))
}

func sameUID(ref *authenticationv1.BoundObjectReference, object metav1.Object, resource string) error {
	if ref.UID == "" || ref.UID == object.GetUID() {
		return nil
	}
	return apierrors.NewConflict(corev1.Resource(resource), ref.Name, fmt.Errorf("the UID in the bound object reference (%s) does not match the UID in record. The object might have been deleted and then recreated", ref.UID))
}

func refTo(object metav1.Object) Ref {
	return Ref{Name: object.GetName(), UID: string(object.GetUID())}
}

// forUs reports whether a token is meant for this server and no other: another
// one that it is shown does not learn of the pod's end.
func forUs(audiences, ours []string) bool {
	return !slices.ContainsFunc(audiences, func(a string) bool { return !slices.Contains(ours, a) })
}
