package certificates

import (
	"context"
	"fmt"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

var bundles = certificatesv1.SchemeGroupVersion.WithResource("clustertrustbundles").GroupResource()

type attest struct {
	*admission.Handler
	z authorizer.Authorizer
}

var _ admission.ValidationInterface = &attest{}

// NewAttest makes ClusterTrustBundleAttest: who writes the bundle of a signer
// needs the right to attest for it.
func NewAttest(z authorizer.Authorizer) admission.Interface {
	return &attest{admission.NewHandler(admission.Create, admission.Update), z}
}

// Validate asks for the right. A client that leaves the spec as it is, as the garbage
// collector does, needs none.
func (p *attest) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != bundles || a.GetSubresource() != "" {
		return nil
	}
	now, ok := a.GetObject().(*certificatesv1.ClusterTrustBundle)
	if !ok {
		return admission.NewForbidden(a, fmt.Errorf("not a ClusterTrustBundle: a %T", a.GetObject()))
	}
	if was, ok := a.GetOldObject().(*certificatesv1.ClusterTrustBundle); ok && equality.Semantic.DeepEqual(now.Spec, was.Spec) {
		return nil
	}
	if now.Spec.SignerName == "" || may(ctx, p.z, a.GetUserInfo(), "attest", now.Spec.SignerName) {
		return nil
	}
	return admission.NewForbidden(a, fmt.Errorf("user not permitted to attest for signerName %q: it takes the verb attest on signers.%s of this name", now.Spec.SignerName, requests.Group))
}
