package noderestriction

import (
	"context"
	"fmt"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"
)

// podCertificate lets a node ask for certificates of its pods only: of those
// that run on it, for the account they run as, and from the signers that their
// volumes name. Everything that a signer relies on is compared with what is
// stored; what an old copy can make differ is a conflict, to be tried again.
func (p *plugin) podCertificate(ctx context.Context, node string, a admission.Attributes) error {
	if a.GetOperation() != admission.Create || a.GetSubresource() != "" {
		return refuse(a, "node %q may only create podcertificaterequests", node)
	}
	request, ok := a.GetObject().(*certificatesv1.PodCertificateRequest)
	if !ok {
		return refuse(a, "unexpected type %T", a.GetObject())
	}
	spec, name := &request.Spec, a.GetNamespace()+"/"+request.Spec.PodName
	if string(spec.NodeName) != node {
		return refuse(a, "PodCertificateRequest.Spec.NodeName=%q, which is not the requesting node %q", spec.NodeName, node)
	}
	pod, err := p.objects.Pod(ctx, a.GetNamespace(), spec.PodName)
	if errors.IsNotFound(err) {
		return err
	}
	if err != nil {
		return admission.NewForbidden(a, err)
	}
	differs := func(format string, args ...any) error {
		return errors.NewConflict(a.GetResource().GroupResource(), a.GetName(), fmt.Errorf("PodCertificateRequest for pod %q "+format, append([]any{name}, args...)...))
	}
	_, mirrored := pod.Annotations[corev1.MirrorPodAnnotationKey]
	switch {
	case pod.Spec.NodeName != node:
		return refuse(a, "pod %q is not running on node %q named in the PodCertificateRequest", name, node)
	case mirrored:
		return refuse(a, "pod %q is a mirror pod", name)
	case pod.UID != spec.PodUID:
		return differs("contains pod UID (%q) which differs from running pod %q", spec.PodUID, pod.UID)
	case pod.Spec.ServiceAccountName != spec.ServiceAccountName:
		return refuse(a, "PodCertificateRequest for pod %q contains serviceAccountName (%q) that differs from running pod (%q)", name, spec.ServiceAccountName, pod.Spec.ServiceAccountName)
	case !asksSigner(pod, spec.SignerName):
		return refuse(a, "signer %q not found in pod spec volume", spec.SignerName)
	}
	account, err := p.objects.ServiceAccount(ctx, a.GetNamespace(), spec.ServiceAccountName)
	switch {
	case errors.IsNotFound(err):
		return err
	case err != nil:
		return admission.NewForbidden(a, err)
	case account.UID != spec.ServiceAccountUID:
		return differs("names service account UID %q, which differs from the running service account (%q)", spec.ServiceAccountUID, account.UID)
	}
	own, err := p.objects.Node(ctx, node)
	switch {
	case errors.IsNotFound(err):
		return err
	case err != nil:
		return admission.NewForbidden(a, err)
	case own.UID != spec.NodeUID:
		return differs("names node UID %q, inconsistent with the running node (%q)", spec.NodeUID, own.UID)
	}
	return nil
}

// asksSigner reports whether a volume of the pod holds a certificate of the
// signer.
func asksSigner(pod *corev1.Pod, signer string) bool {
	for i := range pod.Spec.Volumes {
		projected := pod.Spec.Volumes[i].Projected
		if projected == nil {
			continue
		}
		for _, source := range projected.Sources {
			if source.PodCertificate != nil && source.PodCertificate.SignerName == signer {
				return true
			}
		}
	}
	return false
}
