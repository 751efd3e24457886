package certificates

import (
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/kind"
)

// request is the kind's Go type.
type request = certificatesv1.CertificateSigningRequest

// CertificateSigningRequest is the kind CertificateSigningRequest. Its spec is
// written once; approvers write conditions (/approval), signers the certificate
// (/status).
func CertificateSigningRequest() kind.Kind {
	doc := certificatesv1.CertificateSigningRequestSpec{}.SwaggerDoc()
	return kind.Typed[*request]{
		GVK:        certificatesv1.SchemeGroupVersion.WithKind("CertificateSigningRequest"),
		Resource:   "certificatesigningrequests",
		Singular:   "certificatesigningrequest",
		ShortNames: []string{"csr"},

		New:     func() runtime.Object { return &request{} },
		NewList: func() runtime.Object { return &certificatesv1.CertificateSigningRequestList{} },

		PrepareCreate: func(r *request) { r.Status = certificatesv1.CertificateSigningRequestStatus{} },
		Requested:     noteRequester,
		PrepareUpdate: func(r, old *request) {
			r.Spec = old.Spec
			r.Status = old.Status
		},
		Validate: func(r *request) field.ErrorList {
			return append(validateMeta(r), validateSpec(&r.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(r, old *request) field.ErrorList {
			return apivalidation.ValidateObjectMetaUpdate(&r.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Age,
			cells.Text("SignerName", doc["signerName"]),
			cells.Text("Requestor", doc["username"]),
			cells.Text("RequestedDuration", doc["expirationSeconds"]),
			cells.Text("Condition", certificatesv1.CertificateSigningRequestStatus{}.SwaggerDoc()["conditions"]),
		},
		Row:    row,
		Fields: func(r *request) fields.Set { return fields.Set{"spec.signerName": r.Spec.SignerName} },

		Status: &kind.TypedStatus[*request]{
			PrepareUpdate: func(r, old *request) {
				r.Spec = old.Spec
				// The approver and the signer differ.
				r.Status.Conditions = keepDecisions(r.Status.Conditions, old.Status.Conditions)
				stamp(r, old)
			},
			ValidateUpdate: validateStatusUpdate,
		},
		Parts: []kind.TypedPart[*request]{{
			Name: "approval",
			PrepareUpdate: func(r, old *request) {
				conditions := r.Status.Conditions
				r.Spec = old.Spec
				r.Status = *old.Status.DeepCopy()
				r.Status.Conditions = conditions
				stamp(r, old)
			},
			ValidateUpdate: validateApproval,
			Fields:         [][]string{{"status", "conditions"}},
		}},
		UnconditionalUpdate: true,
	}.Kind()
}

// noteRequester takes who asks from the request: approvers decide by it.
func noteRequester(r *request, by authenticationv1.UserInfo) {
	r.Spec.Username, r.Spec.UID, r.Spec.Groups, r.Spec.Extra = by.Username, by.UID, by.Groups, nil
	if len(by.Extra) > 0 {
		r.Spec.Extra = make(map[string]certificatesv1.ExtraValue, len(by.Extra))
		for key, values := range by.Extra {
			r.Spec.Extra[key] = certificatesv1.ExtraValue(values)
		}
	}
}

func isDecision(c *certificatesv1.CertificateSigningRequestCondition) bool {
	return c.Type == certificatesv1.CertificateApproved || c.Type == certificatesv1.CertificateDenied
}

// keepDecisions takes the decisions from old, which signers may not change. Approvers
// may change all conditions.
func keepDecisions(conditions, old []certificatesv1.CertificateSigningRequestCondition) []certificatesv1.CertificateSigningRequestCondition {
	var result []certificatesv1.CertificateSigningRequestCondition
	for i := range old {
		if isDecision(&old[i]) {
			result = append(result, old[i])
		}
	}
	for i := range conditions {
		if !isDecision(&conditions[i]) {
			result = append(result, conditions[i])
		}
	}
	return result
}

// stamp fills in the times of conditions that have none.
func stamp(r, old *request) {
	now := metav1.Now()
	for i := range r.Status.Conditions {
		c := &r.Status.Conditions[i]
		if c.LastUpdateTime.IsZero() {
			c.LastUpdateTime = now
		}
		if !c.LastTransitionTime.IsZero() {
			continue
		}
		c.LastTransitionTime = now
		was := slices.IndexFunc(old.Status.Conditions, func(o certificatesv1.CertificateSigningRequestCondition) bool { return o.Type == c.Type })
		if was >= 0 && old.Status.Conditions[was].Status == c.Status && !old.Status.Conditions[was].LastTransitionTime.IsZero() {
			c.LastTransitionTime = old.Status.Conditions[was].LastTransitionTime
		}
	}
}

func row(r *request, now time.Time) []any {
	lifetime := "<none>"
	if s := r.Spec.ExpirationSeconds; s != nil {
		lifetime = duration.HumanDuration(time.Duration(*s) * time.Second)
	}
	return []any{r.Name, cells.Since(r.CreationTimestamp, now), r.Spec.SignerName, r.Spec.Username, lifetime, stateOf(r)}
}

// stateOf is how far a request has come: "Approved,Issued".
func stateOf(r *request) string {
	states := map[certificatesv1.RequestConditionType]bool{}
	for i := range r.Status.Conditions {
		states[r.Status.Conditions[i].Type] = true
	}
	var words []string
	switch {
	case states[certificatesv1.CertificateDenied]:
		words = append(words, "Denied")
	case states[certificatesv1.CertificateApproved]:
		words = append(words, "Approved")
	default:
		words = append(words, "Pending")
	}
	if states[certificatesv1.CertificateFailed] {
		words = append(words, "Failed")
	}
	if len(r.Status.Certificate) > 0 {
		words = append(words, "Issued")
	}
	return strings.Join(words, ",")
}
