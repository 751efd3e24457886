package certificates

import (
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/kind"
)

type podRequest = certificatesv1.PodCertificateRequest

// PodCertificateRequest is the kind PodCertificateRequest: a node asks a signer
// for the certificate of one of its pods (KEP-4317). Its spec is written once;
// the signer answers once, by the status.
func PodCertificateRequest() kind.Kind {
	doc := certificatesv1.PodCertificateRequestSpec{}.SwaggerDoc()
	return kind.Typed[*podRequest]{
		GVK:        certificatesv1.SchemeGroupVersion.WithKind("PodCertificateRequest"),
		Resource:   "podcertificaterequests",
		Singular:   "podcertificaterequest",
		Namespaced: true,

		New:     func() runtime.Object { return &podRequest{} },
		NewList: func() runtime.Object { return &certificatesv1.PodCertificateRequestList{} },

		Default: func(r *podRequest) {
			if r.Spec.MaxExpirationSeconds == nil {
				r.Spec.MaxExpirationSeconds = ptr.To[int32](defaultPodLifetime)
			}
		},
		PrepareCreate:  func(r *podRequest) { r.Status = certificatesv1.PodCertificateRequestStatus{} },
		PrepareUpdate:  func(r, old *podRequest) { r.Status = old.Status },
		Validate:       validatePodRequest,
		ValidateUpdate: validatePodRequestUpdate,

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("PodName", doc["podName"]),
			cells.Text("ServiceAccountName", doc["serviceAccountName"]),
			cells.Text("NodeName", doc["nodeName"]),
			cells.Text("SignerName", doc["signerName"]),
			cells.Text("State", certificatesv1.PodCertificateRequestStatus{}.SwaggerDoc()["conditions"]),
			cells.Age,
		},
		Row: func(r *podRequest, now time.Time) []any {
			state := "Pending"
			if c := Outcome(r); c != nil {
				state = c.Type
			}
			return []any{r.Name, r.Spec.PodName, r.Spec.ServiceAccountName, string(r.Spec.NodeName), r.Spec.SignerName, state, cells.Since(r.CreationTimestamp, now)}
		},
		Fields: func(r *podRequest) fields.Set {
			return fields.Set{"spec.signerName": r.Spec.SignerName, "spec.podName": r.Spec.PodName, "spec.nodeName": string(r.Spec.NodeName)}
		},

		Status: &kind.TypedStatus[*podRequest]{
			PrepareUpdate: func(r, old *podRequest) {
				r.Spec = old.Spec
				metav1.ResetObjectMetaForStatus(&r.ObjectMeta, &old.ObjectMeta)
				stampOutcome(r, old)
			},
			ValidateUpdate: func(r, old *podRequest) field.ErrorList { return validatePodStatus(r, old, time.Now()) },
		},
	}.Kind()
}

// Outcome is the condition by which a signer has answered: Issued, Denied or
// Failed. Nil: it has not.
func Outcome(r *certificatesv1.PodCertificateRequest) *metav1.Condition {
	for i := range r.Status.Conditions {
		switch c := &r.Status.Conditions[i]; c.Type {
		case certificatesv1.PodCertificateRequestConditionTypeIssued, certificatesv1.PodCertificateRequestConditionTypeDenied,
			certificatesv1.PodCertificateRequestConditionTypeFailed:
			return c
		}
	}
	return nil
}

// stampOutcome fills in when a condition was written, where its writer does not
// say.
func stampOutcome(r, old *podRequest) {
	for i := range r.Status.Conditions {
		c := &r.Status.Conditions[i]
		if !c.LastTransitionTime.IsZero() {
			continue
		}
		c.LastTransitionTime = metav1.Now()
		if was := Outcome(old); was != nil && was.Type == c.Type {
			c.LastTransitionTime = was.LastTransitionTime
		}
	}
}
