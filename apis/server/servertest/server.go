package servertest

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
	"math/big"
	"net"
	"net/http"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/auth"
)

// testTimeout is how long a test server may take for anything. CI is busy.
const testTimeout = time.Minute

// Server is an API server that ends with its test.
type Server struct {
	*server.Server
	// Memory is its store, unless the test brought its own.
	Memory *Memory
	// Client may do anything.
	Client kubernetes.Interface

	ca *authority
}

// Start runs an API server on a store in memory until the test ends, and
// returns when it is ready. change may alter the configuration; nil: nothing.
func Start(t testing.TB, change func(*server.Config)) *Server {
	t.Helper()
	s := &Server{Memory: NewMemory(), ca: newAuthority(t)}
	config := server.Config{Storage: s.Memory.Decorator(), Authenticator: auth.ClientCert(func(*x509.Certificate) *x509.CertPool { return s.ca.pool })}
	if change != nil {
		change(&config)
	}
	var err error
	if s.Server, err = server.New(config); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("API server ended with: %v", err)
			}
		case <-time.After(testTimeout):
			t.Error("API server did not end")
		}
	})
	if s.Client, err = kubernetes.NewForConfig(s.LoopbackConfig()); err != nil {
		t.Fatal(err)
	}
	s.waitReady(t, ctx)
	return s
}

func (s *Server) waitReady(t testing.TB, ctx context.Context) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, testTimeout)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		body, err := s.Client.Discovery().RESTClient().Get().AbsPath("/readyz").Param("verbose", "").DoRaw(ctx)
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("API server is not ready: %v\n%s", err, body)
		}
	}
}

// ClientFor is a client inside the process with the given identity.
func (s *Server) ClientFor(t testing.TB, name string, groups ...string) kubernetes.Interface {
	t.Helper()
	client, err := kubernetes.NewForConfig(s.ClientConfigFor(name, groups...))
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// Listen serves on a loopback port with TLS until the test ends and returns
// the configuration of an administrator's client.
func (s *Server) Listen(t testing.TB) *rest.Config {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	web := &http.Server{
		Handler:           s.Handler(),
		ReadHeaderTimeout: testTimeout,
		TLSConfig: &tls.Config{
			MinVersion:   tls.VersionTLS12,
			Certificates: []tls.Certificate{s.ca.issue(t, "server", nil)},
			ClientAuth:   tls.RequestClientCert,
		},
	}
	if err := http2.ConfigureServer(web, nil); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- web.ServeTLS(listener, "", "") }()
	t.Cleanup(func() {
		web.Close()
		if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("serve: %v", err)
		}
	})
	return s.CertConfig(t, listener.Addr().String(), "admin", user.SystemPrivilegedGroup)
}

// CertConfig is the configuration of a client of the server at address with a
// certificate of the test's CA.
func (s *Server) CertConfig(t testing.TB, address, name string, groups ...string) *rest.Config {
	t.Helper()
	cert := s.ca.issue(t, name, groups)
	key, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	return &rest.Config{
		Host: "https://" + address,
		QPS:  -1,
		TLSClientConfig: rest.TLSClientConfig{
			CAData:   pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.ca.cert.Raw}),
			CertData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Certificate[0]}),
			KeyData:  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}),
		},
	}
}

// authority is a certificate authority for one test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(raw)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return &authority{cert: cert, key: key, pool: pool}
}

// issue makes a certificate for name, as client and as server on loopback.
func (a *authority) issue(t testing.TB, name string, groups []string) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		Subject:      pkix.Name{CommonName: name, Organization: groups},
		NotBefore:    time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{raw}, PrivateKey: key}
}
