package kubectl

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/features"
)

// podSigner signs requests for pods' certificates, and denies those that say so.
type podSigner struct {
	client kubernetes.Interface
	name   string
	key    *ecdsa.PrivateKey
	cert   *x509.Certificate
}

const (
	spiffePath = "spiffe.example.com/path"
	denyMe     = "spiffe.example.com/deny"
)

// run answers until ctx ends.
func (s *podSigner) run(ctx context.Context) error {
	for {
		list, err := s.client.CertificatesV1().PodCertificateRequests("").List(ctx, metav1.ListOptions{FieldSelector: "spec.signerName=" + s.name})
		if err == nil {
			for i := range list.Items {
				if len(list.Items[i].Status.Conditions) == 0 {
					if said := s.answer(ctx, &list.Items[i]); !apierrors.IsNotFound(said) && !apierrors.IsConflict(said) { // it is another, or none, by now
						err = errors.Join(err, said)
					}
				}
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(100 * time.Millisecond):
		}
		if err != nil {
			return err
		}
	}
}

func (s *podSigner) answer(ctx context.Context, r *certificatesv1.PodCertificateRequest) error {
	condition := metav1.Condition{Type: certificatesv1.PodCertificateRequestConditionTypeIssued, Status: metav1.ConditionTrue, Reason: "Test", LastTransitionTime: metav1.Now()}
	if why := r.Spec.UnverifiedUserAnnotations[denyMe]; why != "" {
		condition.Type, condition.Message = certificatesv1.PodCertificateRequestConditionTypeDenied, why
	} else {
		request, err := x509.ParseCertificateRequest(r.Spec.StubPKCS10Request)
		if err != nil {
			return err
		}
		path := r.Spec.UnverifiedUserAnnotations[spiffePath]
		if path == "" {
			path = "/ns/" + r.Namespace + "/sa/" + r.Spec.ServiceAccountName
		}
		begin := time.Now().Truncate(time.Second)
		template := &x509.Certificate{
			SerialNumber: big.NewInt(begin.UnixNano()), Subject: pkix.Name{CommonName: r.Spec.PodName}, URIs: []*url.URL{{Scheme: "spiffe", Host: "example.com", Path: path}},
			NotBefore: begin, NotAfter: begin.Add(time.Duration(*r.Spec.MaxExpirationSeconds) * time.Second),
		}
		der, err := x509.CreateCertificate(rand.Reader, template, s.cert, request.PublicKey, s.key)
		if err != nil {
			return err
		}
		r.Status.CertificateChain = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
		r.Status.NotBefore, r.Status.NotAfter = ptr.To(metav1.NewTime(template.NotBefore)), ptr.To(metav1.NewTime(template.NotAfter))
		r.Status.BeginRefreshAt = ptr.To(metav1.NewTime(begin.Add(template.NotAfter.Sub(begin) * 2 / 3)))
	}
	r.Status.Conditions = []metav1.Condition{condition}
	_, err := s.client.CertificatesV1().PodCertificateRequests(r.Namespace).UpdateStatus(ctx, r, metav1.UpdateOptions{})
	return err
}

// podCertificates gives pods certificates of a signer that is a client of the API.
func podCertificates(k *kit) {
	features.Conforms(k, 164, 165, 166, 167, 169)
	const signer = "pods.example.com/lab"
	mounting := func(name, source string) string {
		return strings.Replace(simple(name, "sleep", fmt.Sprintf("volumes: [{name: v, projected: {sources: [{podCertificate: {signerName: %s, %s}}]}}]", signer, source)),
			"args:", "volumeMounts: [{name: v, mountPath: /v}], args:", 1)
	}
	for seconds, says := range map[int]string{7862401: "if provided, maxExpirationSeconds must be <= 7862400", 3599: "if provided, maxExpirationSeconds must be >= 3600"} {
		k.has(k.failsIn(mounting("bad", fmt.Sprintf("keyType: ED25519, credentialBundlePath: b, maxExpirationSeconds: %d", seconds)), "apply", "-f", "-"), says)
	}
	k.apply(mounting("cert-day", "keyType: ECDSAP256, credentialBundlePath: b.pem"))
	k.event("cert-day", "FailedMount", `certificate of signer "`+signer+`" is not issued yet`)
	if p := k.pod("cert-day"); p.Status.Phase != corev1.PodPending {
		k.Errorf("without a certificate the pod is %s", p.Status.Phase)
	}
	k.has(k.ok("get", "podcertificaterequests"), "PODNAME", "cert-day", signer, "Pending")

	client, err := kubernetes.NewForConfig(k.config)
	k.must(err)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	k.must(err)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	root := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "lab"}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(48 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	rootDER, err := x509.CreateCertificate(rand.Reader, root, root, key.Public(), key)
	k.must(err)
	s := &podSigner{client: client, name: signer, key: key, cert: root}
	go func() { done <- s.run(ctx) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			k.Errorf("signer: %v", err)
		}
	}()
	k.apply(mounting("cert-hour", "keyType: ED25519, keyPath: key.pem, certificateChainPath: chain.pem, maxExpirationSeconds: 3600, userAnnotations: {"+spiffePath+": /custom}"))
	k.apply(mounting("cert-denied", "keyType: ED25519, credentialBundlePath: b.pem, userAnnotations: {"+denyMe+": because}"))
	k.ready("cert-day")
	k.ready("cert-hour")
	for _, c := range []struct {
		pod, key, chain, path string
		life                  time.Duration
	}{
		{"cert-day", "b.pem", "b.pem", "/sa/default", 24 * time.Hour},
		{"cert-hour", "key.pem", "chain.pem", "/custom", time.Hour},
	} {
		pair, err := tls.X509KeyPair([]byte(k.exec(c.pod, "main", "cat", "/v/"+c.chain)), []byte(k.exec(c.pod, "main", "cat", "/v/"+c.key)))
		k.must(err)
		k.is("lifetime of "+c.pod, pair.Leaf.NotAfter.Sub(pair.Leaf.NotBefore).String(), c.life.String())
		if len(pair.Leaf.URIs) != 1 || !strings.HasSuffix(pair.Leaf.URIs[0].Path, c.path) {
			k.Errorf("%s: URIs %v, want %s", c.pod, pair.Leaf.URIs, c.path)
		}
		k.is("user of "+c.pod, pair.Leaf.Subject.CommonName, c.pod)
	}
	k.event("cert-denied", "Denied", signer, "because")
	k.mutualTLS(client, signer, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: rootDER})))
	k.ok("delete", "pod", "cert-day", "cert-hour", "cert-denied", "--wait=false")
}

// mutualTLS has two pods speak TLS to each other: each shows the certificate of its
// volume, and believes the signer's trust bundle there and nothing else.
func (k *kit) mutualTLS(client kubernetes.Interface, signer, roots string) {
	features.Conforms(k, 168)
	bundles := client.CertificatesV1().ClusterTrustBundles()
	bundle := &certificatesv1.ClusterTrustBundle{
		ObjectMeta: metav1.ObjectMeta{Name: strings.ReplaceAll(signer, "/", ":") + ":roots", Labels: map[string]string{"lab": "yes"}},
		Spec:       certificatesv1.ClusterTrustBundleSpec{SignerName: signer, TrustBundle: roots},
	}
	_, err := bundles.Create(context.Background(), bundle, metav1.CreateOptions{})
	k.must(err)
	defer func() { k.must(bundles.Delete(context.Background(), bundle.Name, metav1.DeleteOptions{})) }()
	pod := func(name, args string) string {
		return strings.Replace(simple(name, args, fmt.Sprintf(`volumes: [{name: v, projected: {sources: [
  {podCertificate: {signerName: %s, keyType: ECDSAP256, credentialBundlePath: me.pem, userAnnotations: {%s: /%s}}},
  {clusterTrustBundle: {signerName: %s, labelSelector: {matchLabels: {lab: "yes"}}, path: roots.pem}}]}}]`, signer, spiffePath, name, signer)),
			"args:", "volumeMounts: [{name: v, mountPath: /v}], args:", 1)
	}
	k.apply(pod("mtls-server", "mtls, serve, /v/me.pem, /v/roots.pem"))
	k.apply(pod("mtls-client", "sleep"))
	k.ready("mtls-server")
	k.ready("mtls-client")
	url := "https://" + k.pod("mtls-server").Status.PodIP + ":8443/"
	var said string
	k.eventually("the server answers", func(context.Context) error {
		out, errs, code := k.in("", "exec", "mtls-client", "--", "/hello", "mtls", "fetch", url, "/v/me.pem", "/v/roots.pem")
		if said = out; code != 0 {
			return errors.New(errs)
		}
		return nil
	})
	k.has(said, "server [spiffe://example.com/mtls-server]", "hello [spiffe://example.com/mtls-client]")
	// A server whose authority is not in the bundle is refused.
	k.eventually("a server of another authority is refused", func(context.Context) error { // once its name was answered
		out, errs, code := k.in("", "exec", "mtls-client", "--", "/hello", "mtls", "fetch", "https://kubernetes.default.svc/", "/v/me.pem", "/v/roots.pem")
		if code == 0 {
			k.Fatalf("it was believed: %s", out)
		}
		if !strings.Contains(out+errs, "unknown authority") {
			return errors.New(out + errs)
		}
		return nil
	})
	k.ok("delete", "pod", "mtls-server", "mtls-client", "--wait=false")
}
