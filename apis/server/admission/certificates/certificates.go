// Package certificates implements CertificateApproval, CertificateSigning and
// CertificateSubjectRestriction: approving or signing a CertificateSigningRequest requires
// the verb approve or sign on its signer, and requests for the client signer with the
// subject of a node, a server or a privileged group are refused.
package certificates

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"github.com/clusterd/clusterd/apis/certificates"
)

// requests is the resource that the plugins look at.
var requests = certificatesv1.SchemeGroupVersion.WithResource("certificatesigningrequests").GroupResource()

// ErrWrongObject is returned for an object that is no
// CertificateSigningRequest under the name of that resource.
var ErrWrongObject = errors.New("not a CertificateSigningRequest")

type request = certificatesv1.CertificateSigningRequest

// objects are those of the request: as they will be, and as they were (nil at
// a create).
func objects(a admission.Attributes) (now, was *request, err error) {
	now, ok := a.GetObject().(*request)
	if !ok {
		return nil, nil, ErrWrongObject
	}
	if a.GetOldObject() != nil {
		if was, ok = a.GetOldObject().(*request); !ok {
			return nil, nil, ErrWrongObject
		}
	}
	return now, was, nil
}

// may reports whether the user has a right for a signer: by its name, or for all
// of its domain ("example.com/*").
func may(ctx context.Context, z authorizer.Authorizer, who user.Info, verb, signer string) bool {
	domain, _, _ := strings.Cut(signer, "/")
	for _, name := range []string{signer, domain + "/*"} {
		decision, _, err := z.Authorize(ctx, authorizer.AttributesRecord{
			User: who, Verb: verb, ResourceRequest: true, Name: name,
			APIGroup: requests.Group, APIVersion: "*", Resource: "signers",
		})
		if err == nil && decision == authorizer.DecisionAllow {
			return true
		}
	}
	return false
}

// guard is what approval and signing have in common.
type guard struct {
	*admission.Handler
	z           authorizer.Authorizer
	subresource string
	verb        string
	// concerns says whether the change needs the right.
	concerns func(now, was *request) bool
}

var _ admission.ValidationInterface = &guard{}

// NewApproval makes CertificateApproval.
func NewApproval(z authorizer.Authorizer) admission.Interface {
	return &guard{admission.NewHandler(admission.Update), z, "approval", "approve", func(_, _ *request) bool { return true }}
}

// NewSigning makes CertificateSigning: a status whose certificate and
// conditions stay as they are is not a signature.
func NewSigning(z authorizer.Authorizer) admission.Interface {
	return &guard{admission.NewHandler(admission.Update), z, "status", "sign", func(now, was *request) bool {
		return !slices.Equal(now.Status.Certificate, was.Status.Certificate) ||
			!equality.Semantic.DeepEqual(now.Status.Conditions, was.Status.Conditions)
	}}
}

// Validate asks for the right. The signer is the stored one: the request may
// name another.
func (g *guard) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != requests || a.GetSubresource() != g.subresource {
		return nil
	}
	now, was, err := objects(a)
	if err != nil {
		return admission.NewForbidden(a, err)
	}
	if was == nil || !g.concerns(now, was) || may(ctx, g.z, a.GetUserInfo(), g.verb, was.Spec.SignerName) {
		return nil
	}
	return admission.NewForbidden(a, fmt.Errorf("user not permitted to %s requests with signerName %q: it takes the verb %s on signers.%s of this name", g.verb, was.Spec.SignerName, g.verb, requests.Group))
}

type subject struct{ *admission.Handler }

var _ admission.ValidationInterface = &subject{}

// NewSubjectRestriction makes CertificateSubjectRestriction. Upstream's refuses
// system:masters; here nodes and servers are recognized by their certificates
// as well, and get theirs by joining.
func NewSubjectRestriction() admission.Interface {
	return &subject{admission.NewHandler(admission.Create)}
}

// Validate looks at the subject of what is asked of the API's own signer.
func (*subject) Validate(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != requests || a.GetSubresource() != "" {
		return nil
	}
	now, _, err := objects(a)
	if err != nil {
		return admission.NewForbidden(a, err)
	}
	if now.Spec.SignerName != certificatesv1.KubeAPIServerClientSignerName {
		return nil
	}
	parsed, err := certificates.ParseRequest(now.Spec.Request)
	if err != nil {
		return nil // validation says what is wrong
	}
	if err := certificates.CheckClient(parsed.Subject.CommonName, parsed.Subject.Organization); err != nil {
		return admission.NewForbidden(a, err)
	}
	return nil
}
