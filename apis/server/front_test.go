package server_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"io"
	"log"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/request/headerrequest"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	aggregator "k8s.io/kube-aggregator/pkg/client/clientset_generated/clientset"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// newFront makes an authority and the certificate of a front, in files.
func newFront(t *testing.T) server.Front {
	t.Helper()
	issue := func(name string, ca bool, parent *x509.Certificate, signer *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
		key := must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
		template := &x509.Certificate{
			SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			IsCA: ca, BasicConstraintsValid: true, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		}
		if parent == nil {
			parent, signer = template, key
		}
		der := must[[]byte](t)(x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer))
		return must[*x509.Certificate](t)(x509.ParseCertificate(der)), key
	}
	encode := func(cert *x509.Certificate) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})
	}
	ca, caKey := issue("authority", true, nil, nil)
	users, _ := issue("authority of users", true, nil, nil)
	leaf, key := issue("front", false, ca, caKey)
	dir := t.TempDir()
	f := server.Front{
		CertFile: filepath.Join(dir, "front.crt"), KeyFile: filepath.Join(dir, "front.key"),
		Name: "front", Authorities: func() []byte { return encode(ca) }, Clients: func() []byte { return encode(users) },
	}
	der := must[[]byte](t)(x509.MarshalPKCS8PrivateKey(key))
	for path, content := range map[string][]byte{f.CertFile: encode(leaf), f.KeyFile: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})} {
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

// TestFront: an aggregated API finds out by the ConfigMap whom to trust, as
// upstream's library does, and the server is the one.
func TestFront(t *testing.T) {
	front := newFront(t)
	s := servertest.Start(t, func(c *server.Config) { c.Front = front })
	maps := s.Client.CoreV1().ConfigMaps(metav1.NamespaceSystem)
	const name = "extension-apiserver-authentication"
	stored := func(ctx context.Context) *corev1.ConfigMap {
		m, err := maps.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil
		}
		return m
	}
	comesTrue(t, "the ConfigMap", func(ctx context.Context) bool { return stored(ctx) != nil })
	m := stored(t.Context())
	if m.Data["client-ca-file"] != string(front.Clients()) || m.Data["requestheader-client-ca-file"] != string(front.Authorities()) {
		t.Errorf("authorities: %v", m.Data)
	}
	believed := headerrequest.NewRequestHeaderAuthRequestController(name, metav1.NamespaceSystem, s.Client,
		"requestheader-username-headers", "requestheader-uid-headers", "requestheader-group-headers", "requestheader-extra-headers-prefix", "requestheader-allowed-names")
	if err := believed.RunOnce(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		believed.Run(ctx, 1)
	}()
	defer func() {
		cancel()
		<-ended
	}()
	role := must[*rbacv1.Role](t)(s.Client.RbacV1().Roles(metav1.NamespaceSystem).Get(t.Context(), name+"-reader", metav1.GetOptions{}))
	if len(role.Rules) != 1 || !slices.Equal(role.Rules[0].ResourceNames, []string{name}) {
		t.Errorf("rules of its readers: %+v", role.Rules)
	}

	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM([]byte(m.Data["requestheader-client-ca-file"]))
	asked := make(chan string, 1)
	other := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if req.URL.Path != "/apis/bar.example.com/v1/drinks" {
			_ = json.NewEncoder(w).Encode(metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: "bar.example.com/v1"})
			return
		}
		who := "none"
		if slices.Contains(believed.AllowedClientNames(), req.TLS.PeerCertificates[0].Subject.CommonName) {
			who = req.Header.Get(believed.UsernameHeaders()[0])
		}
		select {
		case asked <- who:
		default:
		}
		_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusSuccess})
	}))
	other.TLS = &tls.Config{
		Certificates: []tls.Certificate{selfSigned(t)}, MinVersion: tls.VersionTLS12,
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
	}
	other.Config.ErrorLog = log.New(io.Discard, "", 0)
	other.StartTLS()
	t.Cleanup(other.Close)
	must[*corev1.Service](t)(s.Client.CoreV1().Services("default").Create(t.Context(), externalName("bar"), metav1.CreateOptions{}))
	services := must[*aggregator.Clientset](t)(aggregator.NewForConfig(s.LoopbackConfig())).ApiregistrationV1().APIServices()
	must[*apiregistrationv1.APIService](t)(services.Create(t.Context(), &apiregistrationv1.APIService{
		ObjectMeta: meta("v1.bar.example.com"),
		Spec: apiregistrationv1.APIServiceSpec{
			Group: "bar.example.com", Version: "v1", GroupPriorityMinimum: 1000, VersionPriority: 10, InsecureSkipTLSVerify: true,
			Service: &apiregistrationv1.ServiceReference{Namespace: "default", Name: "bar", Port: ptr.To(portOf(t, other.URL))},
		},
	}, metav1.CreateOptions{}))
	comesTrue(t, "an answer of the other's API", func(ctx context.Context) bool {
		_, err := s.Client.Discovery().RESTClient().Get().AbsPath("/apis/bar.example.com/v1/drinks").DoRaw(ctx)
		return err == nil
	})
	if who := <-asked; who != "system:apiserver" {
		t.Errorf("the aggregated API takes the caller for %q", who)
	}

	// Damage to it is repaired; what others add stays.
	m.Data = map[string]string{"own": "stays"}
	must[*corev1.ConfigMap](t)(maps.Update(t.Context(), m, metav1.UpdateOptions{}))
	again := servertest.Start(t, func(c *server.Config) { c.Front, c.Storage = front, s.Memory.Decorator() })
	comesTrue(t, "the ConfigMap to be whole again", func(ctx context.Context) bool {
		m, err := again.Client.CoreV1().ConfigMaps(metav1.NamespaceSystem).Get(ctx, name, metav1.GetOptions{})
		return err == nil && m.Data["own"] == "stays" && m.Data["requestheader-client-ca-file"] == string(front.Authorities())
	})
}
