package certificates

import (
	"context"
	"fmt"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

var podRequests = certificatesv1.SchemeGroupVersion.WithResource("podcertificaterequests").GroupResource()

type podSigning struct {
	*admission.Handler
	z authorizer.Authorizer
}

var _ admission.ValidationInterface = &podSigning{}

// NewPodSigning makes PodCertificateSigning: who answers the request for a
// pod's certificate needs the right to sign for its signer. Upstream asks for
// it in the kind's strategy, and for certificates alone; a refusal is as final.
func NewPodSigning(z authorizer.Authorizer) admission.Interface {
	return &podSigning{admission.NewHandler(admission.Update), z}
}

// Validate asks for the right. The signer is the stored one.
func (p *podSigning) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != podRequests || a.GetSubresource() != "status" {
		return nil
	}
	now, ok := a.GetObject().(*certificatesv1.PodCertificateRequest)
	was, had := a.GetOldObject().(*certificatesv1.PodCertificateRequest)
	if !ok || !had {
		return admission.NewForbidden(a, fmt.Errorf("not a PodCertificateRequest: a %T", a.GetObject()))
	}
	signer := was.Spec.SignerName
	if equality.Semantic.DeepEqual(now.Status, was.Status) || may(ctx, p.z, a.GetUserInfo(), "sign", signer) {
		return nil
	}
	return admission.NewForbidden(a, fmt.Errorf("User %q is not permitted to %q for signer %q: it takes the verb sign on signers.%s of this name", //nolint:staticcheck // upstream's words
		a.GetUserInfo().GetName(), "sign", signer, requests.Group))
}
