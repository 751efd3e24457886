package server_test

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server/servertest"
)

// TestFigures measures who is asked on every request: what it takes to know the sender
// of one by certificate and by token. It prints one JSON object per figure.
func TestFigures(t *testing.T) {
	if os.Getenv("CLUSTERD_BENCH") == "" {
		t.Skip("a benchmark: make bench-api")
	}
	s := servertest.Start(t, nil)
	must[*corev1.ServiceAccount](t)(s.Client.CoreV1().ServiceAccounts("default").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: meta("caller")}, metav1.CreateOptions{}))
	token := must[*authenticationv1.TokenRequest](t)(s.Client.CoreV1().ServiceAccounts("default").CreateToken(t.Context(), "caller",
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To[int64](3600)}}, metav1.CreateOptions{})).Status.Token
	s.Listen(t) // makes the certificates' authority
	config := s.CertConfig(t, "127.0.0.1:1", "maker", "team-1", "team-2")
	pair := must[tls.Certificate](t)(tls.X509KeyPair(config.CertData, config.KeyData))
	leaf := must[*x509.Certificate](t)(x509.ParseCertificate(pair.Certificate[0]))
	request := func() *http.Request {
		return httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/version", nil)
	}
	byCertificate, byToken := request(), request()
	byCertificate.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{leaf}}
	authenticate := func(req *http.Request) {
		if answer, ok, err := s.Authenticator().AuthenticateRequest(req); err != nil || !ok || answer.User.GetName() == "system:anonymous" {
			t.Fatalf("%v %v %v", answer, ok, err)
		}
	}
	for _, one := range []struct {
		name, goal string
		most       float64 // microseconds; 0: no goal
		do         func()
	}{
		{"certificate that was verified before", "", 0, func() { authenticate(byCertificate) }},
		{"token of a service account that was looked at before", "token authentication <= 30 us cached", 30, func() {
			byToken.Header.Set("Authorization", "Bearer "+token) // a request that is known has lost it
			authenticate(byToken)
		}},
		{"token of a service account that was not", "", 0, func() {
			if answer, ok, err := s.AccountTokens().AuthenticateToken(t.Context(), token); err != nil || !ok {
				t.Fatalf("%v %v %v", answer, ok, err)
			}
		}},
	} {
		r := testing.Benchmark(func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				one.do()
			}
		})
		us := float64(r.NsPerOp()) / 1000
		out := json.NewEncoder(os.Stdout)
		lines := []any{map[string]any{"bench": "api-authentication", "case": one.name, "us": us, "allocated_bytes": r.AllocedBytesPerOp(), "allocations": r.AllocsPerOp()}}
		if one.most > 0 {
			lines = append(lines, map[string]any{"bench": "api-authentication", "goal": one.goal, "value": us, "met": us <= one.most})
		}
		for _, line := range lines {
			if err := out.Encode(line); err != nil {
				t.Fatal(err)
			}
		}
	}
}
