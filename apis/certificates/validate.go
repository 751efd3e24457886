package certificates

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"fmt"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

const (
	// legacyUnknown is a signer of v1beta1 that v1 does not have.
	legacyUnknown = "kubernetes.io/legacy-unknown"
	// minLifetime is the shortest lifetime that may be asked for, in seconds.
	minLifetime = 600
)

var usages = sets.New(
	certificatesv1.UsageSigning, certificatesv1.UsageDigitalSignature, certificatesv1.UsageContentCommitment,
	certificatesv1.UsageKeyEncipherment, certificatesv1.UsageKeyAgreement, certificatesv1.UsageDataEncipherment,
	certificatesv1.UsageCertSign, certificatesv1.UsageCRLSign, certificatesv1.UsageEncipherOnly, certificatesv1.UsageDecipherOnly,
	certificatesv1.UsageAny, certificatesv1.UsageServerAuth, certificatesv1.UsageClientAuth, certificatesv1.UsageCodeSigning,
	certificatesv1.UsageEmailProtection, certificatesv1.UsageSMIME, certificatesv1.UsageIPsecEndSystem, certificatesv1.UsageIPsecTunnel,
	certificatesv1.UsageIPsecUser, certificatesv1.UsageTimestamping, certificatesv1.UsageOCSPSigning,
	certificatesv1.UsageMicrosoftSGC, certificatesv1.UsageNetscapeSGC,
)

func validateMeta(r *request) field.ErrorList {
	return apivalidation.ValidateObjectMeta(&r.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
}

func validateSpec(spec *certificatesv1.CertificateSigningRequestSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if _, err := ParseRequest(spec.Request); err != nil {
		errs = append(errs, field.Invalid(at.Child("request"), fmt.Sprintf("%d bytes", len(spec.Request)), err.Error()))
	}
	errs = append(errs, validateSigner(spec.SignerName, at.Child("signerName"))...)
	if len(spec.Usages) == 0 {
		errs = append(errs, field.Required(at.Child("usages"), ""))
	}
	seen := sets.New[certificatesv1.KeyUsage]()
	for i, u := range spec.Usages {
		at := at.Child("usages").Index(i)
		switch {
		case !usages.Has(u):
			errs = append(errs, field.NotSupported(at, u, sets.List(usages)))
		case seen.Has(u):
			errs = append(errs, field.Duplicate(at, u))
		}
		seen.Insert(u)
	}
	if s := spec.ExpirationSeconds; s != nil && *s < minLifetime {
		errs = append(errs, field.Invalid(at.Child("expirationSeconds"), *s, fmt.Sprintf("may not specify a duration less than %d seconds (10 minutes)", minLifetime)))
	}
	return errs
}

// validateSigner wants DOMAIN/PATH, as upstream does.
func validateSigner(name string, at *field.Path) field.ErrorList {
	if name == legacyUnknown {
		return field.ErrorList{field.Invalid(at, name, "the legacy signerName is not allowed via this API version")}
	}
	return check.Signer(at, name)
}

// ParseRequest reads the one certificate request, PKCS #10 in PEM, and checks
// that its maker has the key that it names.
func ParseRequest(text []byte) (*x509.CertificateRequest, error) {
	block, rest := pem.Decode(text)
	if block == nil || block.Type != "CERTIFICATE REQUEST" {
		return nil, fmt.Errorf("PEM block type must be CERTIFICATE REQUEST")
	}
	if len(bytes.TrimSpace(rest)) > 0 {
		return nil, fmt.Errorf("must be one PEM block with nothing after it")
	}
	parsed, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("not a certificate request: %w", err)
	}
	if err := parsed.CheckSignature(); err != nil {
		return nil, fmt.Errorf("the request is not signed by its own key: %w", err)
	}
	return parsed, nil
}

func validateConditions(r, old *request) field.ErrorList {
	at := field.NewPath("status", "conditions")
	var errs field.ErrorList
	seen := sets.New[certificatesv1.RequestConditionType]()
	for i := range r.Status.Conditions {
		c, at := &r.Status.Conditions[i], at.Index(i)
		switch {
		case c.Type == "":
			errs = append(errs, field.Required(at.Child("type"), ""))
		case seen.Has(c.Type):
			errs = append(errs, field.Duplicate(at.Child("type"), c.Type))
		}
		seen.Insert(c.Type)
		switch c.Type {
		case certificatesv1.CertificateApproved, certificatesv1.CertificateDenied, certificatesv1.CertificateFailed:
			errs = append(errs, check.OneOf(at.Child("status"), c.Status, corev1.ConditionTrue)...)
		default:
			errs = append(errs, check.OneOf(at.Child("status"), c.Status, corev1.ConditionTrue, corev1.ConditionFalse, corev1.ConditionUnknown)...)
		}
	}
	if seen.Has(certificatesv1.CertificateApproved) && seen.Has(certificatesv1.CertificateDenied) {
		errs = append(errs, field.Invalid(at, "Approved, Denied", "Approved and Denied conditions are mutually exclusive"))
	}
	// A decision is final: a client may have acted on it.
	for i := range old.Status.Conditions {
		switch kind := old.Status.Conditions[i].Type; kind {
		case certificatesv1.CertificateApproved, certificatesv1.CertificateDenied, certificatesv1.CertificateFailed:
			if !seen.Has(kind) {
				errs = append(errs, field.Forbidden(at, fmt.Sprintf("updates may not remove a condition of type %q", kind)))
			}
		}
	}
	return errs
}

func validateApproval(r, old *request) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&r.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	return append(errs, validateConditions(r, old)...)
}

func validateStatusUpdate(r, old *request) field.ErrorList {
	errs := validateApproval(r, old)
	at := field.NewPath("status", "certificate")
	switch {
	case len(old.Status.Certificate) > 0 && !bytes.Equal(r.Status.Certificate, old.Status.Certificate):
		errs = append(errs, field.Forbidden(at, "updates may not change a certificate that was issued"))
	case len(r.Status.Certificate) > 0 && len(old.Status.Certificate) == 0:
		if err := checkCertificates(r.Status.Certificate); err != nil {
			errs = append(errs, field.Invalid(at, fmt.Sprintf("%d bytes", len(r.Status.Certificate)), err.Error()))
		}
	}
	return errs
}

// checkCertificates wants at least one certificate in PEM, and nothing else.
func checkCertificates(text []byte) error {
	found := 0
	for rest := text; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return fmt.Errorf("only CERTIFICATE PEM blocks are allowed, found %q", block.Type)
		}
		if len(block.Headers) != 0 {
			return fmt.Errorf("no PEM block headers are permitted")
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return fmt.Errorf("not a certificate: %w", err)
		}
		found++
	}
	if found == 0 {
		return fmt.Errorf("must contain at least one CERTIFICATE PEM block")
	}
	return nil
}
