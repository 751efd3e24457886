package certificatesigning

import (
	"crypto/x509"
	"encoding/pem"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/clusterd/clusterd/apis/certificates"
)

const (
	// maxLifetime is how long a certificate is good for at most, and unless the
	// request says otherwise.
	maxLifetime = 365 * 24 * time.Hour
	// pendingFor and decidedFor are how long a request is kept that is pending, and
	// one that was approved or denied: upstream's times.
	pendingFor = 24 * time.Hour
	decidedFor = time.Hour
)

// has reports whether the request has a condition, which is True if it is there.
func has(request *certificatesv1.CertificateSigningRequest, kind certificatesv1.RequestConditionType) bool {
	_, ok := at(request, kind)
	return ok
}

// at is when a condition was last written.
func at(request *certificatesv1.CertificateSigningRequest, kind certificatesv1.RequestConditionType) (time.Time, bool) {
	for i := range request.Status.Conditions {
		if c := &request.Status.Conditions[i]; c.Type == kind {
			return c.LastUpdateTime.Time, true
		}
	}
	return time.Time{}, false
}

// wanted reports whether the request is one that is to be signed here, now.
func wanted(request *certificatesv1.CertificateSigningRequest) bool {
	return request.Spec.SignerName == certificatesv1.KubeAPIServerClientSignerName && len(request.Status.Certificate) == 0 &&
		has(request, certificatesv1.CertificateApproved) && !has(request, certificatesv1.CertificateDenied) && !has(request, certificatesv1.CertificateFailed)
}

// unsigned are Kubernetes' signers that nobody signs for in this cluster, with why and
// what to do.
var unsigned = map[string]string{
	certificatesv1.KubeAPIServerClientKubeletSignerName: "a node gets its certificate by joining (clusterd join); for other clients of the API the signer is " + certificatesv1.KubeAPIServerClientSignerName,
	certificatesv1.KubeletServingSignerName:             "a node's server has its certificate from the cluster; for servers of your own, webhooks among them, use a signer of your own, such as cert-manager",
}

// unanswered says why nobody signs an approved request; "": somebody may.
func unanswered(request *certificatesv1.CertificateSigningRequest) string {
	if len(request.Status.Certificate) > 0 || !has(request, certificatesv1.CertificateApproved) || has(request, certificatesv1.CertificateDenied) || has(request, certificatesv1.CertificateFailed) {
		return ""
	}
	return unsigned[request.Spec.SignerName]
}

// check says why an approved request is not signed all the same. Admission has
// looked at its subject; but plugins can be left out.
func check(request *certificatesv1.CertificateSigningRequest) (*x509.CertificateRequest, error) {
	parsed, err := certificates.ParseRequest(request.Spec.Request)
	if err != nil {
		return nil, err
	}
	if err := certificates.CheckUsages(request.Spec.Usages); err != nil {
		return nil, err
	}
	return parsed, certificates.CheckClient(parsed.Subject.CommonName, parsed.Subject.Organization)
}

func lifetime(request *certificatesv1.CertificateSigningRequest) time.Duration {
	if s := request.Spec.ExpirationSeconds; s != nil {
		return min(time.Duration(*s)*time.Second, maxLifetime)
	}
	return maxLifetime
}

// over is when the request is not needed any more.
func over(request *certificatesv1.CertificateSigningRequest) time.Time {
	end := request.CreationTimestamp.Add(pendingFor)
	for _, kind := range []certificatesv1.RequestConditionType{certificatesv1.CertificateApproved, certificatesv1.CertificateDenied, certificatesv1.CertificateFailed} {
		if t, ok := at(request, kind); ok {
			end = t.Add(decidedFor)
		}
	}
	if cert, err := parse(request.Status.Certificate); err == nil && cert != nil && cert.NotAfter.Before(end) {
		end = cert.NotAfter
	}
	return end
}

func parse(text []byte) (*x509.Certificate, error) {
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, nil
	}
	return x509.ParseCertificate(block.Bytes)
}
