package certificates

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"math/big"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func stubOf(t *testing.T, key crypto.Signer) []byte {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func newPodRequest(t *testing.T, key crypto.Signer) *podRequest {
	return &podRequest{
		ObjectMeta: metav1.ObjectMeta{Name: "r", Namespace: "d", ResourceVersion: "7"},
		Spec: certificatesv1.PodCertificateRequestSpec{
			SignerName: "example.com/lab", PodName: "p", PodUID: "p1", ServiceAccountName: "default", ServiceAccountUID: "a1", NodeName: "n1", NodeUID: "n",
			MaxExpirationSeconds: ptr.To[int32](7200), StubPKCS10Request: stubOf(t, key),
		},
	}
}

func TestPodRequestDefault(t *testing.T) {
	r := newPodRequest(t, newKey(t))
	r.Spec.MaxExpirationSeconds = nil
	PodCertificateRequest().Default(r)
	if *r.Spec.MaxExpirationSeconds != 86400 {
		t.Errorf("%d seconds", *r.Spec.MaxExpirationSeconds)
	}
}

func TestPodRequestKeys(t *testing.T) {
	_, edwards, _ := ed25519.GenerateKey(rand.Reader)
	curve := func(c elliptic.Curve) crypto.Signer {
		key, err := ecdsa.GenerateKey(c, rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	modulus := func(bits int) crypto.Signer {
		key, err := rsa.GenerateKey(rand.Reader, bits)
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	for name, c := range map[string]struct {
		key  crypto.Signer
		want []string
	}{
		"ed25519": {edwards, nil}, "P256": {curve(elliptic.P256()), nil}, "P384": {curve(elliptic.P384()), nil}, "P521": {curve(elliptic.P521()), nil},
		"RSA 3072": {modulus(3072), nil},
		"P224":     {curve(elliptic.P224()), []string{"spec.stubPKCS10Request: Invalid value"}},
		"RSA 2048": {modulus(2048), []string{"spec.stubPKCS10Request: Invalid value"}},
	} {
		t.Run(name, func(t *testing.T) {
			checktest.Faults(t, PodCertificateRequest().Validate(newPodRequest(t, c.key)), c.want...)
		})
	}
}

func TestValidatePodRequest(t *testing.T) {
	key := newKey(t)
	for name, c := range map[string]struct {
		change func(*certificatesv1.PodCertificateRequestSpec)
		want   []string
	}{
		"nothing is said": {func(s *certificatesv1.PodCertificateRequestSpec) {
			*s = certificatesv1.PodCertificateRequestSpec{}
		},
			[]string{
				"spec.signerName: Required value", "spec.podName: Required value", "spec.podUID: Required value", "spec.serviceAccountName: Required value",
				"spec.serviceAccountUID: Required value", "spec.nodeName: Required value", "spec.nodeUID: Required value",
				"spec.maxExpirationSeconds: Required value: must be set", "spec.stubPKCS10Request: Required value",
			}},
		"too short": {func(s *certificatesv1.PodCertificateRequestSpec) { s.MaxExpirationSeconds = ptr.To[int32](3599) },
			[]string{"spec.maxExpirationSeconds: Invalid value: 3599: must be in the range [3600, 7862400]"}},
		"too long": {func(s *certificatesv1.PodCertificateRequestSpec) { s.MaxExpirationSeconds = ptr.To[int32](7862401) },
			[]string{"spec.maxExpirationSeconds: Invalid value: 7862401: must be in the range [3600, 7862400]"}},
		"too long for Kubernetes": {func(s *certificatesv1.PodCertificateRequestSpec) {
			s.SignerName, s.MaxExpirationSeconds = "kubernetes.io/kube-apiserver-client-pod", ptr.To[int32](86401)
		},
			[]string{"spec.maxExpirationSeconds: Invalid value: 86401: must be in the range [3600, 86400]"}},
		"another's signature": {func(s *certificatesv1.PodCertificateRequestSpec) {
			s.StubPKCS10Request[len(s.StubPKCS10Request)-1] ^= 1
		},
			[]string{"spec.stubPKCS10Request: Invalid value"}},
		"no request":   {func(s *certificatesv1.PodCertificateRequestSpec) { s.StubPKCS10Request = []byte("x") }, []string{"spec.stubPKCS10Request: Invalid value"}},
		"much request": {func(s *certificatesv1.PodCertificateRequestSpec) { s.StubPKCS10Request = make([]byte, 10<<10+1) }, []string{"spec.stubPKCS10Request: Too long"}},
		"a long uid": {func(s *certificatesv1.PodCertificateRequestSpec) {
			s.NodeUID = "012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789012345678"
		}, []string{"spec.nodeUID: Too long"}},
		"bad names": {func(s *certificatesv1.PodCertificateRequestSpec) {
			s.PodName, s.ServiceAccountName, s.NodeName = "A", "B", "C"
		},
			[]string{"spec.podName: Invalid value", "spec.serviceAccountName: Invalid value", "spec.nodeName: Invalid value"}},
		"words of its author": {func(s *certificatesv1.PodCertificateRequestSpec) {
			s.UnverifiedUserAnnotations = map[string]string{"example.com/Path": "/a"}
		}, nil},
		"words without domain": {func(s *certificatesv1.PodCertificateRequestSpec) {
			s.UnverifiedUserAnnotations = map[string]string{"path": "/a"}
		},
			[]string{`spec.unverifiedUserAnnotations: Invalid value: "path"`}},
		"many words": {func(s *certificatesv1.PodCertificateRequestSpec) {
			s.UnverifiedUserAnnotations = map[string]string{"example.com/a": strings.Repeat("x", 256<<10)}
		},
			[]string{"spec.unverifiedUserAnnotations: Too long"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newPodRequest(t, key)
			c.change(&r.Spec)
			checktest.Faults(t, PodCertificateRequest().Validate(r), c.want...)
		})
	}
}

func TestPodRequestStaysAsItIs(t *testing.T) {
	k := PodCertificateRequest()
	old := newPodRequest(t, newKey(t))
	r := old.DeepCopy()
	r.Spec.SignerName = "example.com/other"
	checktest.Faults(t, k.ValidateUpdate(r, old), "spec: Invalid value")
	r = old.DeepCopy()
	r.Status.CertificateChain = "x"
	k.PrepareUpdate(r, old)
	if r.Status.CertificateChain != "" {
		t.Error("the main resource writes the status")
	}
	k.PrepareCreate(r)
	r.Labels, r.Spec.SignerName, r.Status.Conditions = map[string]string{"a": "b"}, "example.com/other", []metav1.Condition{{Type: "Denied"}}
	k.Status.PrepareUpdate(r, old)
	if len(r.Labels) > 0 || r.Spec.SignerName != old.Spec.SignerName || r.Status.Conditions[0].LastTransitionTime.IsZero() {
		t.Errorf("the status writes more: %+v", r)
	}
}

// issue answers a request at begin with a certificate for key, as change says.
func issue(t *testing.T, r *podRequest, key crypto.Signer, begin time.Time, lifetime time.Duration, change func(*x509.Certificate)) *podRequest {
	t.Helper()
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: begin, NotAfter: begin.Add(lifetime)}
	if change != nil {
		change(template)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	r = r.DeepCopy()
	r.Status = certificatesv1.PodCertificateRequestStatus{
		Conditions:       []metav1.Condition{{Type: "Issued", Status: metav1.ConditionTrue, Reason: "Test", LastTransitionTime: metav1.NewTime(begin)}},
		CertificateChain: string(encoded("CERTIFICATE", der)),
		NotBefore:        ptr.To(metav1.NewTime(begin)), NotAfter: ptr.To(metav1.NewTime(begin.Add(lifetime))), BeginRefreshAt: ptr.To(metav1.NewTime(begin.Add(lifetime / 2))),
	}
	return r
}

func TestPodRequestStatus(t *testing.T) {
	key, now := newKey(t), time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	asked := newPodRequest(t, key)
	answered := func(kind string) *podRequest {
		r := asked.DeepCopy()
		r.Status.Conditions = []metav1.Condition{{Type: kind, Status: metav1.ConditionTrue, Reason: "Test", LastTransitionTime: metav1.NewTime(now)}}
		return r
	}
	good := issue(t, asked, key, now, 2*time.Hour, nil)
	changed := func(r *podRequest, change func(*certificatesv1.PodCertificateRequestStatus)) *podRequest {
		r = r.DeepCopy()
		change(&r.Status)
		return r
	}
	type status = certificatesv1.PodCertificateRequestStatus
	for name, c := range map[string]struct {
		r, old *podRequest
		want   []string
	}{
		"issued":              {good, asked, nil},
		"issued again":        {good, good, nil},
		"denied":              {answered("Denied"), asked, nil},
		"failed":              {answered("Failed"), asked, nil},
		"an unknown answer":   {answered("Maybe"), asked, []string{`status.conditions[0].type: Unsupported value: "Maybe"`}},
		"denied after issued": {answered("Denied"), good, []string{"status: Forbidden: immutable after PodCertificateRequest is issued, denied, or failed"}},
		"taken back":          {asked, answered("Denied"), []string{"status: Forbidden: immutable after"}},
		"two answers": {changed(good, func(s *status) { s.Conditions = append(s.Conditions, answered("Denied").Status.Conditions...) }), asked,
			[]string{`status.conditions[1].type: Invalid value: "Denied": There may be at most one condition`}},
		"not true": {changed(good, func(s *status) { s.Conditions[0].Status = metav1.ConditionFalse }), asked, []string{`status.conditions[0].status: Unsupported value: "False"`}},
		"denied with a certificate": {changed(answered("Denied"), func(s *status) { s.CertificateChain = good.Status.CertificateChain }), asked,
			[]string{"status: Forbidden: non-condition status fields must be empty"}},
		"a certificate without an answer": {changed(good, func(s *status) { s.Conditions = nil }), asked, []string{"status: Forbidden: status is immutable unless"}},
		"another key":                     {issue(t, asked, newKey(t), now, 2*time.Hour, nil), asked, []string{"status.certificateChain: Invalid value"}},
		"no certificate":                  {changed(good, func(s *status) { s.CertificateChain = "words" }), asked, []string{"status.certificateChain: Invalid value"}},
		"a key in the chain": {changed(good, func(s *status) { s.CertificateChain += string(encoded("PRIVATE KEY", []byte("x"))) }), asked,
			[]string{"status.certificateChain: Invalid value"}},
		"garbage in the chain": {changed(good, func(s *status) { s.CertificateChain += string(encoded("CERTIFICATE", []byte("x"))) }), asked,
			[]string{"status.certificateChain: Invalid value"}},
		"a long chain": {changed(good, func(s *status) { s.CertificateChain = strings.Repeat(s.CertificateChain, 300) }), asked, []string{"status.certificateChain: Too long"}},
		"no times": {changed(good, func(s *status) { s.NotBefore, s.NotAfter, s.BeginRefreshAt = nil, nil, nil }), asked,
			[]string{"status.notBefore: Required value", "status.notAfter: Required value", "status.beginRefreshAt: Required value"}},
		"other times": {changed(good, func(s *status) {
			s.NotBefore, s.NotAfter = ptr.To(metav1.NewTime(now.Add(time.Second))), ptr.To(metav1.NewTime(now.Add(time.Hour)))
		}), asked, []string{"status.notBefore: Invalid value", "status.notAfter: Invalid value"}},
		"long ago":      {issue(t, asked, key, now.Add(-6*time.Minute), 2*time.Hour, nil), asked, []string{"status.notBefore: Invalid value"}},
		"to come":       {issue(t, asked, key, now.Add(6*time.Minute), 2*time.Hour, nil), asked, []string{"status.notBefore: Invalid value"}},
		"lives shortly": {issue(t, asked, key, now, 59*time.Minute, nil), asked, []string{"status.certificateChain: Invalid value: \"59m0s\": leaf certificate lifetime must be >= 1 hour"}},
		"lives long":    {issue(t, asked, key, now, 3*time.Hour, nil), asked, []string{"status.certificateChain: Invalid value: \"3h0m0s\": leaf certificate lifetime must be <= spec.maxExpirationSeconds (7200)"}},
		"renewed at once": {changed(good, func(s *status) { s.BeginRefreshAt = ptr.To(metav1.NewTime(now.Add(9 * time.Minute))) }), asked,
			[]string{"status.beginRefreshAt: Invalid value"}},
		"renewed at the end": {changed(good, func(s *status) { s.BeginRefreshAt = ptr.To(metav1.NewTime(now.Add(111 * time.Minute))) }), asked,
			[]string{"status.beginRefreshAt: Invalid value"}},
		"a name that is none": {issue(t, asked, key, now, 2*time.Hour, func(c *x509.Certificate) { c.DNSNames = []string{".example.com"} }), asked, []string{"status.certificateChain: Invalid value"}},
		"an address that is none": {issue(t, asked, key, now, 2*time.Hour, func(c *x509.Certificate) { c.EmailAddresses = []string{"no-address"} }), asked,
			[]string{"status.certificateChain: Invalid value"}},
	} {
		t.Run(name, func(t *testing.T) { checktest.Faults(t, validatePodStatus(c.r, c.old, now), c.want...) })
	}
}
