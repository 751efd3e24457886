package certificatesigning

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
)

var begin = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

// issuer signs with a key of its own and notes the lifetimes.
type issuer struct {
	t         *testing.T
	lifetimes []time.Duration
	err       error
}

func (i *issuer) sign(request *x509.CertificateRequest, lifetime time.Duration) (*x509.Certificate, error) {
	i.lifetimes = append(i.lifetimes, lifetime)
	if i.err != nil {
		return nil, i.err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: request.Subject, NotAfter: begin.Add(lifetime)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, request.PublicKey, key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

func newRequest(t *testing.T, name string, groups ...string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: name, Organization: groups}}, key)
	if err != nil {
		t.Fatal(err)
	}
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: "r", UID: "1", CreationTimestamp: metav1.NewTime(begin)},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: certificatesv1.KubeAPIServerClientSignerName,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth, certificatesv1.UsageDigitalSignature},
		},
	}
}

func with(r *certificatesv1.CertificateSigningRequest, kinds ...certificatesv1.RequestConditionType) *certificatesv1.CertificateSigningRequest {
	for _, kind := range kinds {
		r.Status.Conditions = append(r.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: kind, Status: corev1.ConditionTrue, LastUpdateTime: metav1.NewTime(begin)})
	}
	return r
}

// pass makes one pass over a request at a time after begin, and returns what is
// stored then; nil: it was deleted.
func pass(t *testing.T, r *certificatesv1.CertificateSigningRequest, after time.Duration, sign Sign) (*certificatesv1.CertificateSigningRequest, error) {
	t.Helper()
	client := fake.NewClientset(r)
	c := &controller{client: client, clock: clocktesting.NewFakeClock(begin.Add(after)), sign: sign, events: record.NewFakeRecorder(10), told: map[string]types.UID{}}
	_, failed := c.pass(t.Context(), r)
	got, err := client.CertificatesV1().CertificateSigningRequests().Get(context.Background(), r.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, failed
	}
	if err != nil {
		t.Fatal(err)
	}
	return got, failed
}

func TestIssue(t *testing.T) {
	approved, denied, failed := certificatesv1.CertificateApproved, certificatesv1.CertificateDenied, certificatesv1.CertificateFailed
	for _, test := range []struct {
		name     string
		request  *certificatesv1.CertificateSigningRequest
		change   func(*certificatesv1.CertificateSigningRequestSpec)
		issued   bool
		lifetime time.Duration
		failed   string
	}{
		{name: "pending", request: newRequest(t, "jane")},
		{name: "denied", request: with(newRequest(t, "jane"), denied)},
		{name: "failed before", request: with(newRequest(t, "jane"), approved, failed)},
		{name: "approved", request: with(newRequest(t, "jane"), approved), issued: true, lifetime: maxLifetime},
		{name: "for an hour", request: with(newRequest(t, "jane"), approved), issued: true, lifetime: time.Hour,
			change: func(s *certificatesv1.CertificateSigningRequestSpec) { s.ExpirationSeconds = ptr.To(int32(3600)) }},
		{name: "without a limit", request: with(newRequest(t, "jane"), approved), issued: true, lifetime: maxLifetime,
			change: func(s *certificatesv1.CertificateSigningRequestSpec) { s.ExpirationSeconds = ptr.To(int32(1 << 30)) }},
		{name: "another signer", request: with(newRequest(t, "jane"), approved),
			change: func(s *certificatesv1.CertificateSigningRequestSpec) { s.SignerName = "example.com/people" }},
		{name: "kubelet's signer", request: with(newRequest(t, "system:node:n1", "system:nodes"), approved),
			change: func(s *certificatesv1.CertificateSigningRequestSpec) {
				s.SignerName = certificatesv1.KubeAPIServerClientKubeletSignerName
			}},
		{name: "a server's usage", request: with(newRequest(t, "jane"), approved), failed: `usage "server auth" is not signed for`,
			change: func(s *certificatesv1.CertificateSigningRequestSpec) {
				s.Usages = append(s.Usages, certificatesv1.UsageServerAuth)
			}},
		{name: "no client", request: with(newRequest(t, "jane"), approved), failed: `usages do not include "client auth"`,
			change: func(s *certificatesv1.CertificateSigningRequestSpec) { s.Usages = s.Usages[1:] }},
		// Whatever admission let through.
		{name: "administrators", request: with(newRequest(t, "jane", "system:masters"), approved), failed: "system:masters group is not allowed"},
		{name: "a node", request: with(newRequest(t, "system:node:n1", "system:nodes"), approved), failed: "a node gets its certificate by joining"},
		{name: "a server", request: with(newRequest(t, "jane", "clusterd:servers"), approved), failed: "clusterd:servers group is not allowed"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.change != nil {
				test.change(&test.request.Spec)
			}
			signer := &issuer{t: t}
			got, err := pass(t, test.request, time.Minute, signer.sign)
			if err != nil || got == nil {
				t.Fatalf("%v, %v", got, err)
			}
			cert, err := parse(got.Status.Certificate)
			if err != nil || (cert != nil) != test.issued {
				t.Fatalf("certificate %q, %v", got.Status.Certificate, err)
			}
			if cert != nil && (cert.Subject.CommonName != "jane" || signer.lifetimes[0] != test.lifetime) {
				t.Errorf("issued for %s, %v", cert.Subject, signer.lifetimes)
			}
			message := ""
			if n := len(got.Status.Conditions); n > len(test.request.Status.Conditions) {
				message = got.Status.Conditions[n-1].Message
			}
			if !strings.Contains(message, test.failed) || (message == "") != (test.failed == "") {
				t.Errorf("failed with %q, want %q", message, test.failed)
			}
		})
	}
}

// A request that is approved and that nobody will sign waited without a word.
func TestNobodySigns(t *testing.T) {
	approved := certificatesv1.CertificateApproved
	for _, tt := range []struct {
		signer string
		kinds  []certificatesv1.RequestConditionType
		want   string
	}{
		{certificatesv1.KubeletServingSignerName, []certificatesv1.RequestConditionType{approved}, "Warning NotSigned Nobody signs for kubernetes.io/kubelet-serving in this cluster"},
		{certificatesv1.KubeAPIServerClientKubeletSignerName, []certificatesv1.RequestConditionType{approved}, "by joining"},
		{certificatesv1.KubeletServingSignerName, nil, ""},
		{certificatesv1.KubeletServingSignerName, []certificatesv1.RequestConditionType{approved, certificatesv1.CertificateFailed}, ""},
		{certificatesv1.KubeAPIServerClientSignerName, []certificatesv1.RequestConditionType{approved}, ""},
		{"example.com/mine", []certificatesv1.RequestConditionType{approved}, ""},
	} {
		r := with(newRequest(t, "system:node:n1", "system:nodes"), tt.kinds...)
		r.Spec.SignerName = tt.signer
		events := record.NewFakeRecorder(10)
		c := &controller{client: fake.NewClientset(r), clock: clocktesting.NewFakeClock(begin), events: events, told: map[string]types.UID{}}
		if _, err := c.pass(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		got := ""
		if len(events.Events) > 0 {
			got = <-events.Events
		}
		if !strings.Contains(got, tt.want) || (got == "") != (tt.want == "") {
			t.Errorf("%s, %v: %q, want %q", tt.signer, tt.kinds, got, tt.want)
		}
		// It is said once of a request, not at each pass.
		if _, err := c.pass(t.Context(), r); err != nil || len(events.Events) > 0 {
			t.Errorf("%s: %d events at the next pass, %v", tt.signer, len(events.Events), err)
		}
		r.UID += "x"
		if _, err := c.pass(t.Context(), r); err != nil || len(events.Events) > 0 != (tt.want != "") {
			t.Errorf("%s: %d events of another request of the name, %v", tt.signer, len(events.Events), err)
		}
	}
}

func TestSignerFails(t *testing.T) {
	signer := &issuer{t: t, err: errors.New("no key")}
	got, err := pass(t, with(newRequest(t, "jane"), certificatesv1.CertificateApproved), time.Minute, signer.sign)
	if err == nil || len(got.Status.Certificate) > 0 || len(got.Status.Conditions) != 1 {
		t.Errorf("%+v, %v: want it to be tried again", got.Status, err)
	}
}

func TestOver(t *testing.T) {
	approved, denied := certificatesv1.CertificateApproved, certificatesv1.CertificateDenied
	short := with(newRequest(t, "jane"), approved)
	cert, err := (&issuer{t: t}).sign(mustParse(t, short), 10*time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	short.Status.Certificate = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})
	for _, test := range []struct {
		name    string
		request *certificatesv1.CertificateSigningRequest
		end     time.Duration
	}{
		{"pending", newRequest(t, "jane"), pendingFor},
		{"approved", with(newRequest(t, "jane"), approved), decidedFor},
		{"denied", with(newRequest(t, "jane"), denied), decidedFor},
		{"ended", short, 10 * time.Minute},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got, err := pass(t, test.request, test.end-time.Second, nil); got == nil || err != nil {
				t.Errorf("a second before: %v, %v", got, err)
			}
			if got, err := pass(t, test.request, test.end, nil); got != nil || err != nil {
				t.Errorf("then: %v, %v", got, err)
			}
		})
	}
}

func mustParse(t *testing.T, r *certificatesv1.CertificateSigningRequest) *x509.CertificateRequest {
	t.Helper()
	parsed, err := check(r)
	if err != nil {
		t.Fatal(err)
	}
	return parsed
}
