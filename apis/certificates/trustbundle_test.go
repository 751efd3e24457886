package certificates

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func newCertificate(t *testing.T, ca bool) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "lab"}, IsCA: ca, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func TestValidateTrustBundle(t *testing.T) {
	ca, other, leaf := newCertificate(t, true), newCertificate(t, true), newCertificate(t, false)
	headers := strings.Replace(ca, "-----BEGIN CERTIFICATE-----\n", "-----BEGIN CERTIFICATE-----\nA: b\n\n", 1)
	for _, tt := range []struct {
		what, name, signer, bundle string
		want                       []string
	}{
		{"a bundle", "roots", "", ca, nil},
		{"two, and words", "roots", "", "words\n" + ca + "more\n" + other, nil},
		{"of a signer", "example.com:lab:v1", "example.com/lab", ca, nil},
		{"a foreign prefix", "example.com:labs:v1", "example.com/lab", ca, []string{"metadata.name: Invalid value"}},
		{"no name behind the prefix", "example.com:lab:", "example.com/lab", ca, []string{"metadata.name: Invalid value"}},
		{"a signer's name without signer", "example.com:lab:v1", "", ca, []string{"metadata.name: Invalid value"}},
		{"a signer that is none", "lab:v1", "lab", ca, []string{"spec.signerName: Invalid value"}},
		{"nothing", "roots", "", "", []string{"spec.trustBundle: Invalid value: \"0 bytes\": at least one trust anchor must be provided"}},
		{"no PEM", "roots", "", "words", []string{"spec.trustBundle: Invalid value"}},
		{"another block", "roots", "", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("x")})), []string{"spec.trustBundle: Invalid value"}},
		{"no certificate", "roots", "", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")})), []string{"spec.trustBundle: Invalid value"}},
		{"no authority", "roots", "", ca + leaf, []string{"spec.trustBundle: Invalid value: \"certificate 1\": is not a certificate of an authority"}},
		{"twice", "roots", "", ca + other + ca, []string{"spec.trustBundle: Invalid value: \"certificate 2\": is the same as certificate 0"}},
		{"headers", "roots", "", headers, []string{"spec.trustBundle: Invalid value: \"certificate 0\": PEM block has headers"}},
		{"too long", "roots", "", ca + strings.Repeat("x", maxTrustBundle), []string{"spec.trustBundle: Too long"}},
	} {
		b := &certificatesv1.ClusterTrustBundle{ObjectMeta: metav1.ObjectMeta{Name: tt.name}, Spec: certificatesv1.ClusterTrustBundleSpec{SignerName: tt.signer, TrustBundle: tt.bundle}}
		t.Run(tt.what, func(t *testing.T) { checktest.Faults(t, ClusterTrustBundle().Validate(b), tt.want...) })
	}
	old := &certificatesv1.ClusterTrustBundle{ObjectMeta: metav1.ObjectMeta{Name: "example.com:lab:v1", ResourceVersion: "7"},
		Spec: certificatesv1.ClusterTrustBundleSpec{SignerName: "example.com/lab", TrustBundle: ca}}
	now := old.DeepCopy()
	now.Spec.TrustBundle = other
	checktest.Faults(t, ClusterTrustBundle().ValidateUpdate(now, old))
	now.Spec.SignerName = "example.com/other"
	checktest.Faults(t, ClusterTrustBundle().ValidateUpdate(now, old), "spec.signerName: Invalid value")
}
