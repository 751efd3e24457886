package certificates

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/mail"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

const (
	// defaultPodLifetime is how long a pod's certificate may live unless the
	// request says otherwise, in seconds.
	defaultPodLifetime = 86400
	maxUID             = 128
	maxStub            = 10 << 10
	maxChain           = 100 << 10
	// nearNow is how far a certificate's begin may be from now.
	nearNow = 5 * time.Minute
	// refreshMargin is the least time before and after the moment from which on a
	// certificate is to be renewed.
	refreshMargin = 10 * time.Minute
)

func validatePodRequest(r *podRequest) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&r.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	at, spec := field.NewPath("spec"), &r.Spec
	errs = append(errs, check.Signer(at.Child("signerName"), spec.SignerName)...)
	errs = append(errs, check.RequiredText(at.Child("podName"), spec.PodName, check.Subdomain)...)
	errs = append(errs, validateUID(string(spec.PodUID), at.Child("podUID"))...)
	errs = append(errs, check.RequiredText(at.Child("serviceAccountName"), spec.ServiceAccountName, check.Subdomain)...)
	errs = append(errs, validateUID(string(spec.ServiceAccountUID), at.Child("serviceAccountUID"))...)
	errs = append(errs, check.RequiredText(at.Child("nodeName"), string(spec.NodeName), check.Subdomain)...)
	errs = append(errs, validateUID(string(spec.NodeUID), at.Child("nodeUID"))...)
	errs = append(errs, check.SignerAnnotations(at.Child("unverifiedUserAnnotations"), spec.UnverifiedUserAnnotations)...)
	switch most := check.MaxPodCertificateOf(spec.SignerName); {
	case spec.MaxExpirationSeconds == nil:
		errs = append(errs, field.Required(at.Child("maxExpirationSeconds"), "must be set"))
	case *spec.MaxExpirationSeconds < check.MinPodCertificate || *spec.MaxExpirationSeconds > most:
		errs = append(errs, field.Invalid(at.Child("maxExpirationSeconds"), *spec.MaxExpirationSeconds, fmt.Sprintf("must be in the range [%d, %d]", check.MinPodCertificate, most)))
	}
	return append(errs, validateStub(spec.StubPKCS10Request, at.Child("stubPKCS10Request"))...)
}

func validateUID(uid string, at *field.Path) field.ErrorList {
	switch {
	case uid == "":
		return field.ErrorList{field.Required(at, "")}
	case len(uid) > maxUID:
		return field.ErrorList{field.TooLong(at, "", maxUID)}
	}
	return nil
}

// validateStub wants a request that is signed by its own key, of a sort that
// pods may have.
func validateStub(der []byte, at *field.Path) field.ErrorList {
	if len(der) > maxStub {
		return field.ErrorList{field.TooLong(at, "", maxStub)}
	}
	if len(der) == 0 {
		return field.ErrorList{field.Required(at, "")}
	}
	if _, err := parseStub(der); err != nil {
		return field.ErrorList{field.Invalid(at, fmt.Sprintf("%d bytes", len(der)), err.Error())}
	}
	return nil
}

// parseStub reads a PKCS #10 request in DER, and checks that its maker has the
// key that it names.
func parseStub(der []byte) (*x509.CertificateRequest, error) {
	parsed, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, fmt.Errorf("not a PKCS#10 certificate signing request in DER: %w", err)
	}
	if err := checkPodKey(parsed.PublicKey); err != nil {
		return nil, err
	}
	if err := parsed.CheckSignature(); err != nil {
		return nil, fmt.Errorf("the request is not signed by its own key: %w", err)
	}
	return parsed, nil
}

var (
	errCurve   = errors.New("elliptic public keys must use curve P256, P384 or P521")
	errModulus = errors.New("RSA keys must have modulus size 3072 or 4096")
	errKeyType = errors.New("unknown public key type; supported types are Ed25519, ECDSA, and RSA")
)

func checkPodKey(key any) error {
	switch key := key.(type) {
	case ed25519.PublicKey:
		return nil
	case *ecdsa.PublicKey:
		if key.Curve != elliptic.P256() && key.Curve != elliptic.P384() && key.Curve != elliptic.P521() {
			return errCurve
		}
		return nil
	case *rsa.PublicKey:
		if bits := key.N.BitLen(); bits != 3072 && bits != 4096 {
			return errModulus
		}
		return nil
	}
	return errKeyType
}

func validatePodRequestUpdate(r, old *podRequest) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&r.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	return append(errs, apivalidation.ValidateImmutableField(r.Spec, old.Spec, field.NewPath("spec"))...)
}

// validatePodStatus wants one answer, Issued with a certificate or Denied or
// Failed with none, and that the answer stays.
func validatePodStatus(r, old *podRequest, now time.Time) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&r.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	at := field.NewPath("status")
	for i := range r.Status.Conditions {
		c, at := &r.Status.Conditions[i], at.Child("conditions").Index(i)
		errs = append(errs, check.OneOf(at.Child("type"), c.Type,
			certificatesv1.PodCertificateRequestConditionTypeIssued, certificatesv1.PodCertificateRequestConditionTypeDenied, certificatesv1.PodCertificateRequestConditionTypeFailed)...)
		errs = append(errs, check.OneOf(at.Child("status"), c.Status, metav1.ConditionTrue)...)
		if i > 0 {
			errs = append(errs, field.Invalid(at.Child("type"), c.Type, `There may be at most one condition with type "Issued", "Denied", or "Failed"`))
		}
	}
	errs = append(errs, metav1validation.ValidateConditions(r.Status.Conditions, at.Child("conditions"))...)
	if len(errs) > 0 {
		return errs
	}
	same := func(want *certificatesv1.PodCertificateRequestStatus, why string) field.ErrorList {
		if equality.Semantic.DeepEqual(&r.Status, want) {
			return nil
		}
		return field.ErrorList{field.Forbidden(at, why)}
	}
	if Outcome(old) != nil {
		return same(&old.Status, "immutable after PodCertificateRequest is issued, denied, or failed")
	}
	switch c := Outcome(r); {
	case c == nil:
		return same(&old.Status, `status is immutable unless transitioning to "Issued", "Denied", or "Failed"`)
	case c.Type == certificatesv1.PodCertificateRequestConditionTypeIssued:
		return validateIssued(r, now)
	default:
		return same(&certificatesv1.PodCertificateRequestStatus{Conditions: r.Status.Conditions}, "non-condition status fields must be empty when denying or failing the PodCertificateRequest")
	}
}

// validateIssued wants a chain whose first certificate is for the key that was
// asked for and lives as long as it may, and times that say the same.
func validateIssued(r *podRequest, now time.Time) field.ErrorList {
	at, status := field.NewPath("status"), &r.Status
	chainAt := at.Child("certificateChain")
	size := fmt.Sprintf("%d bytes", len(status.CertificateChain))
	if len(status.CertificateChain) > maxChain {
		return field.ErrorList{field.TooLong(chainAt, "", maxChain)}
	}
	leaf, err := leafOf(status.CertificateChain)
	if err == nil {
		err = checkLeaf(leaf, r.Spec.StubPKCS10Request)
	}
	if err != nil {
		return field.ErrorList{field.Invalid(chainAt, size, err.Error())}
	}
	var errs field.ErrorList
	for _, t := range []struct {
		name string
		time *metav1.Time
		why  string
	}{
		{"notBefore", status.NotBefore, "must be present and consistent with the issued certificate"},
		{"notAfter", status.NotAfter, "must be present and consistent with the issued certificate"},
		{"beginRefreshAt", status.BeginRefreshAt, "must be present and in the range [notbefore+10min, notafter-10min]"},
	} {
		if t.time == nil {
			errs = append(errs, field.Required(at.Child(t.name), t.why))
		}
	}
	if len(errs) > 0 {
		return errs
	}
	invalid := func(name string, value any, why string) {
		errs = append(errs, field.Invalid(at.Child(name), value, why))
	}
	if !status.NotBefore.Time.Equal(leaf.NotBefore) {
		invalid("notBefore", status.NotBefore.Time, "must be set to the NotBefore time encoded in the leaf certificate")
	}
	if d := now.Sub(leaf.NotBefore); d > nearNow || d < -nearNow {
		invalid("notBefore", status.NotBefore.Time, "must be set to within 5 minutes of kube-apiserver's current time")
	}
	if !status.NotAfter.Time.Equal(leaf.NotAfter) {
		invalid("notAfter", status.NotAfter.Time, "must be set to the NotAfter time encoded in the leaf certificate")
	}
	switch lifetime := leaf.NotAfter.Sub(leaf.NotBefore); {
	case lifetime < time.Hour:
		invalid("certificateChain", lifetime.String(), "leaf certificate lifetime must be >= 1 hour")
	case lifetime > time.Duration(*r.Spec.MaxExpirationSeconds)*time.Second:
		invalid("certificateChain", lifetime.String(), fmt.Sprintf("leaf certificate lifetime must be <= spec.maxExpirationSeconds (%d)", *r.Spec.MaxExpirationSeconds))
	}
	if status.BeginRefreshAt.Time.Before(leaf.NotBefore.Add(refreshMargin)) {
		invalid("beginRefreshAt", status.BeginRefreshAt.Time, "must be at least 10 minutes after status.notBefore")
	}
	if status.BeginRefreshAt.Time.After(leaf.NotAfter.Add(-refreshMargin)) {
		invalid("beginRefreshAt", status.BeginRefreshAt.Time, "must be at least 10 minutes before status.notAfter")
	}
	return errs
}

// leafOf is the first certificate of a chain, which must hold nothing else than
// certificates.
func leafOf(chain string) (*x509.Certificate, error) {
	var leaf *x509.Certificate
	rest := []byte(chain)
	for n := 0; ; n++ {
		var block *pem.Block
		block, rest = pem.Decode(rest)
		switch {
		case block == nil && leaf == nil:
			return nil, errors.New("issued certificate chain must contain at least one certificate")
		case block == nil:
			return leaf, nil
		case block.Type != "CERTIFICATE":
			return nil, errors.New("issued certificate chain must consist entirely of CERTIFICATE PEM blocks")
		}
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("certificate %d of the chain does not parse as X.509: %w", n, err)
		}
		if leaf == nil {
			leaf = certificate
		}
	}
}

func checkLeaf(leaf *x509.Certificate, stub []byte) error {
	for _, name := range leaf.DNSNames {
		if name == "" || strings.Contains(name, "..") || strings.HasPrefix(name, ".") || strings.HasSuffix(name, ".") {
			return fmt.Errorf("leaf certificate has a DNS name that is none: %q", name)
		}
	}
	for _, address := range leaf.EmailAddresses {
		if _, err := mail.ParseAddress(address); err != nil {
			return fmt.Errorf("leaf certificate has an email address that is none: %q", address)
		}
	}
	request, err := x509.ParseCertificateRequest(stub)
	if err != nil {
		return fmt.Errorf("spec.stubPKCS10Request: %w", err)
	}
	key, ok := request.PublicKey.(interface{ Equal(x crypto.PublicKey) bool })
	if !ok || !key.Equal(leaf.PublicKey) {
		return errors.New("leaf certificate was not issued to the requested public key")
	}
	return nil
}
