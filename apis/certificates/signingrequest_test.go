package certificates

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"slices"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func encoded(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

func newRequestText(t *testing.T) []byte {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "jane"}}, newKey(t))
	if err != nil {
		t.Fatal(err)
	}
	return encoded("CERTIFICATE REQUEST", der)
}

func newCert(t *testing.T) []byte {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return encoded("CERTIFICATE", der)
}

func newSigningRequest(t *testing.T) *request {
	return &request{
		ObjectMeta: metav1.ObjectMeta{Name: "jane", ResourceVersion: "7"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: newRequestText(t), SignerName: "example.com/people", Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
		},
	}
}

func condition(kind certificatesv1.RequestConditionType) certificatesv1.CertificateSigningRequestCondition {
	return certificatesv1.CertificateSigningRequestCondition{Type: kind, Status: corev1.ConditionTrue, Reason: "Test"}
}

func TestValidate(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*certificatesv1.CertificateSigningRequestSpec)
		want   []string
	}{
		{"plain", func(*certificatesv1.CertificateSigningRequestSpec) {}, nil},
		{"no request", func(s *certificatesv1.CertificateSigningRequestSpec) { s.Request = nil },
			[]string{`spec.request: Invalid value: "0 bytes": PEM block type must be CERTIFICATE REQUEST`}},
		{"two", func(s *certificatesv1.CertificateSigningRequestSpec) { s.Request = slices.Concat(s.Request, s.Request) },
			[]string{"spec.request: Invalid value: \""}},
		{"garbage", func(s *certificatesv1.CertificateSigningRequestSpec) {
			s.Request = encoded("CERTIFICATE REQUEST", []byte("no"))
		},
			[]string{"spec.request: Invalid value: \""}},
		{"no signer", func(s *certificatesv1.CertificateSigningRequestSpec) { s.SignerName = "" }, []string{"spec.signerName: Required value"}},
		{"legacy signer", func(s *certificatesv1.CertificateSigningRequestSpec) { s.SignerName = legacyUnknown },
			[]string{`spec.signerName: Invalid value: "kubernetes.io/legacy-unknown": the legacy signerName is not allowed via this API version`}},
		{"signer without path", func(s *certificatesv1.CertificateSigningRequestSpec) { s.SignerName = "example.com" },
			[]string{`spec.signerName: Invalid value: "example.com": must be a fully qualified domain and path of the form 'example.com/signer-name'`}},
		{"signer of no domain", func(s *certificatesv1.CertificateSigningRequestSpec) { s.SignerName = "example/people" },
			[]string{`spec.signerName: Invalid value: "example": should be a domain with at least two segments separated by dots`}},
		{"no usage", func(s *certificatesv1.CertificateSigningRequestSpec) { s.Usages = nil }, []string{"spec.usages: Required value"}},
		{"unknown usage", func(s *certificatesv1.CertificateSigningRequestSpec) { s.Usages = []certificatesv1.KeyUsage{"fun"} },
			[]string{`spec.usages[0]: Unsupported value: "fun"`}},
		{"usage twice", func(s *certificatesv1.CertificateSigningRequestSpec) { s.Usages = append(s.Usages, s.Usages[0]) },
			[]string{`spec.usages[1]: Duplicate value: "client auth"`}},
		{"short life", func(s *certificatesv1.CertificateSigningRequestSpec) { s.ExpirationSeconds = ptr.To(int32(599)) },
			[]string{"spec.expirationSeconds: Invalid value: 599: may not specify a duration less than 600 seconds (10 minutes)"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newSigningRequest(t)
			test.change(&r.Spec)
			checktest.Faults(t, CertificateSigningRequest().Validate(r), test.want...)
		})
	}
}

// TestForgedRequest: the requester must have the key that the request names.
func TestForgedRequest(t *testing.T) {
	r := newSigningRequest(t)
	block, _ := pem.Decode(r.Spec.Request)
	block.Bytes[len(block.Bytes)-1] ^= 1
	r.Spec.Request = pem.EncodeToMemory(block)
	if errs := CertificateSigningRequest().Validate(r); len(errs) != 1 || errs[0].Field != "spec.request" {
		t.Errorf("a request with a broken signature: %v", errs)
	}
}

func TestRequester(t *testing.T) {
	r := newSigningRequest(t)
	r.Spec.Username, r.Spec.Groups = "system:admin", []string{"system:masters"}
	r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{condition(certificatesv1.CertificateApproved)}
	k := CertificateSigningRequest()
	k.PrepareCreate(r)
	k.Requested(r, authenticationv1.UserInfo{Username: "jane", UID: "7", Groups: []string{"dev"}, Extra: map[string]authenticationv1.ExtraValue{"a": {"b"}}})
	if s := r.Spec; s.Username != "jane" || s.UID != "7" || !slices.Equal(s.Groups, []string{"dev"}) || len(s.Extra) != 1 || len(r.Status.Conditions) != 0 {
		t.Errorf("spec %+v, status %+v", s, r.Status)
	}
}

// TestWhoWritesWhat: approvers write conditions and nothing else, signers all of
// the status but decisions, everybody else neither.
func TestWhoWritesWhat(t *testing.T) {
	k := CertificateSigningRequest()
	all := func(old *request) *request {
		r := old.DeepCopy()
		r.Spec.SignerName = "example.com/others"
		r.Status.Certificate = []byte("mine")
		r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{
			condition(certificatesv1.CertificateApproved), condition(certificatesv1.CertificateFailed),
		}
		return r
	}
	for _, test := range []struct {
		name        string
		prepare     func(r, old *request)
		conditions  []certificatesv1.RequestConditionType
		certificate bool
	}{
		{"main", func(r, old *request) { k.PrepareUpdate(r, old) }, nil, false},
		{"approval", func(r, old *request) { k.Parts[0].PrepareUpdate(r, old) }, []certificatesv1.RequestConditionType{certificatesv1.CertificateApproved, certificatesv1.CertificateFailed}, false},
		{"status", func(r, old *request) { k.Status.PrepareUpdate(r, old) }, []certificatesv1.RequestConditionType{certificatesv1.CertificateFailed}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			old := newSigningRequest(t)
			r := all(old)
			test.prepare(r, old)
			var got []certificatesv1.RequestConditionType
			for _, c := range r.Status.Conditions {
				got = append(got, c.Type)
				if c.LastUpdateTime.IsZero() || c.LastTransitionTime.IsZero() {
					t.Errorf("%s without its times", c.Type)
				}
			}
			if !slices.Equal(got, test.conditions) || (len(r.Status.Certificate) > 0) != test.certificate || r.Spec.SignerName != old.Spec.SignerName {
				t.Errorf("conditions %v, certificate %q, signer %s", got, r.Status.Certificate, r.Spec.SignerName)
			}
		})
	}
}

func TestDecisionsStay(t *testing.T) {
	k := CertificateSigningRequest()
	old := newSigningRequest(t)
	old.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{condition(certificatesv1.CertificateApproved)}
	r := old.DeepCopy()
	r.Status.Conditions = nil
	checktest.Faults(t, k.Parts[0].ValidateUpdate(r, old), `status.conditions: Forbidden: updates may not remove a condition of type "Approved"`)
	r.Status.Conditions = append(old.DeepCopy().Status.Conditions, condition(certificatesv1.CertificateDenied))
	checktest.Faults(t, k.Parts[0].ValidateUpdate(r, old), `status.conditions: Invalid value: "Approved, Denied": Approved and Denied conditions are mutually exclusive`)
	r.Status.Conditions = old.DeepCopy().Status.Conditions
	r.Status.Conditions[0].Status = corev1.ConditionFalse
	checktest.Faults(t, k.Parts[0].ValidateUpdate(r, old), `status.conditions[0].status: Unsupported value: "False": supported values: "True"`)

	issued := old.DeepCopy()
	issued.Status.Certificate = newCert(t)
	checktest.Faults(t, k.Status.ValidateUpdate(issued, old))
	other := issued.DeepCopy()
	other.Status.Certificate = newCert(t)
	checktest.Faults(t, k.Status.ValidateUpdate(other, issued), "status.certificate: Forbidden: updates may not change a certificate that was issued")
	for _, text := range []string{"no", string(newRequestText(t)), string(newCert(t)) + string(newRequestText(t)), string(encoded("CERTIFICATE", []byte("no")))} {
		other.Status.Certificate = []byte(text)
		if errs := k.Status.ValidateUpdate(other, old); len(errs) != 1 || errs[0].Field != "status.certificate" {
			t.Errorf("certificate %.40q: %v", text, errs)
		}
	}
}

func TestCheckClient(t *testing.T) {
	for _, test := range []struct {
		name   string
		groups []string
		ok     bool
	}{
		{"jane", nil, true},
		{"jane", []string{"dev", "system:authenticated"}, true},
		{"", nil, false},
		{"system:node:n1", nil, false},
		{FrontName, nil, false},
		{"jane", []string{"system:masters"}, false},
		{"jane", []string{"dev", "system:nodes"}, false},
		{"jane", []string{"clusterd:servers"}, false},
	} {
		if err := CheckClient(test.name, test.groups); (err == nil) != test.ok {
			t.Errorf("%s of %v: %v", test.name, test.groups, err)
		}
	}
}

func TestStateOf(t *testing.T) {
	r := &request{}
	if got := stateOf(r); got != "Pending" {
		t.Errorf("new: %s", got)
	}
	r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{condition(certificatesv1.CertificateApproved)}
	r.Status.Certificate = []byte("x")
	if got := stateOf(r); got != "Approved,Issued" {
		t.Errorf("signed: %s", got)
	}
	r.Status.Conditions, r.Status.Certificate = []certificatesv1.CertificateSigningRequestCondition{condition(certificatesv1.CertificateApproved), condition(certificatesv1.CertificateFailed)}, nil
	if got := stateOf(r); got != "Approved,Failed" {
		t.Errorf("failed: %s", got)
	}
}
