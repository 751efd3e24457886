package e2e

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	admissionv1 "k8s.io/api/admission/v1"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// outside are servers of the test that the cluster asks: each remembers what it
// was sent.
type outside struct {
	t    *testing.T
	cert tls.Certificate
	ca   string // PEM

	mu   sync.Mutex
	seen []sentRequest
}

// sentRequest is a request as it arrived.
type sentRequest struct {
	path   string
	client string // common name of the certificate that was shown
	header http.Header
	body   []byte
}

// newOutside makes a certificate for the names.
func newOutside(t *testing.T, names ...string) *outside {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: names, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return &outside{t: t, cert: tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, ca: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))}
}

// serve answers at an address of a node's network until the test ends, and
// returns the port.
func (o *outside) serve(e *env, node string, addr netip.Addr, h http.Handler) (port uint16) {
	o.t.Helper()
	var l net.Listener
	if err := e.Do(node, func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(addr, 0).String())
		return err
	}); err != nil {
		o.t.Fatal(err)
	}
	srv := &http.Server{
		ReadHeaderTimeout: testTimeout, ErrorLog: log.New(io.Discard, "", 0),
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{o.cert}, ClientAuth: tls.RequestClientCert},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			got := sentRequest{path: r.URL.Path, header: r.Header.Clone(), body: body}
			if len(r.TLS.PeerCertificates) > 0 {
				got.client = r.TLS.PeerCertificates[0].Subject.CommonName
			}
			o.mu.Lock()
			o.seen = append(o.seen, got)
			o.mu.Unlock()
			r.Body = io.NopCloser(bytes.NewReader(body))
			h.ServeHTTP(w, r)
		}),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.ServeTLS(l, "", "")
	}()
	o.t.Cleanup(func() { _ = srv.Close(); <-done })
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}

// requests are those that have arrived at paths that begin so.
func (o *outside) requests(path string) []sentRequest {
	o.mu.Lock()
	defer o.mu.Unlock()
	var all []sentRequest
	for _, r := range o.seen {
		if strings.HasPrefix(r.path, path) {
			all = append(all, r)
		}
	}
	return all
}

// has reports whether a request holds a word anywhere.
func (r sentRequest) has(word string) bool {
	return strings.Contains(fmt.Sprint(r.header), word) || bytes.Contains(r.body, []byte(word))
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

// issuer is an OpenID Connect provider with one key.
type issuer struct {
	url string
	key *ecdsa.PrivateKey
}

// newIssuer serves what a provider publishes, on a node's loopback.
func (o *outside) newIssuer(e *env, node string) *issuer {
	o.t.Helper()
	key := newKey(o.t)
	i := &issuer{key: key}
	mux := http.NewServeMux()
	mux.HandleFunc("/.well-known/openid-configuration", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, map[string]any{
			"issuer": i.url, "jwks_uri": i.url + "/keys", "authorization_endpoint": i.url + "/auth", "token_endpoint": i.url + "/token",
			"response_types_supported": []string{"id_token"}, "subject_types_supported": []string{"public"}, "id_token_signing_alg_values_supported": []string{"ES256"},
		})
	})
	mux.HandleFunc("/keys", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key.Public(), KeyID: "one", Algorithm: "ES256", Use: "sig"}}})
	})
	i.url = fmt.Sprintf("https://127.0.0.1:%d", o.serve(e, node, netip.MustParseAddr("127.0.0.1"), mux))
	return i
}

// token signs claims with a key, the provider's or another; change alters those of
// a good token, and takes away the ones that become nil.
func (i *issuer) token(t *testing.T, key *ecdsa.PrivateKey, change map[string]any) string {
	t.Helper()
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: key, KeyID: "one"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	claims := map[string]any{
		"iss": i.url, "aud": "doors", "sub": "ann", "teams": []string{"smiths", "bakers"},
		"iat": time.Now().Add(-time.Minute).Unix(), "exp": time.Now().Add(time.Hour).Unix(),
	}
	for name, v := range change {
		if claims[name] = v; v == nil {
			delete(claims, name)
		}
	}
	token, err := jwt.Signed(signer).Claims(claims).Serialize()
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// gates is an API of the test's own: one kind, one object.
func gates() http.Handler {
	const group = "doors.example.com"
	mux := http.NewServeMux()
	mux.HandleFunc("/apis/"+group+"/v1", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, map[string]any{
			"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group + "/v1",
			"resources": []any{map[string]any{"name": "gates", "singularName": "gate", "namespaced": false, "kind": "Gate", "verbs": []string{"get", "list"}}},
		})
	})
	north := map[string]any{"kind": "Gate", "apiVersion": group + "/v1", "metadata": map[string]any{"name": "north"}}
	mux.HandleFunc("/apis/"+group+"/v1/gates", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, map[string]any{"kind": "GateList", "apiVersion": group + "/v1", "metadata": map[string]any{"resourceVersion": "1"}, "items": []any{north}})
	})
	mux.HandleFunc("/apis/"+group+"/v1/gates/north", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, north) })
	return mux
}

// admits lets everything in, as a webhook.
func admits(w http.ResponseWriter, r *http.Request) {
	var review admissionv1.AdmissionReview
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil || review.Request == nil {
		http.Error(w, "no review", http.StatusBadRequest)
		return
	}
	review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true}
	review.Request = nil
	writeJSON(w, review)
}

// auditEvent is what the tests read of a line of an audit log.
type auditEvent struct {
	Stage, Verb, RequestURI, UserAgent string
	User                               struct {
		Username string
		Groups   []string
	}
	ObjectRef struct{ APIGroup, Resource, Subresource, Namespace, Name string }
}

// audit is a server's audit log so far. Its last line may be half written.
func (e *env) audit(n cluster.Node) (events []auditEvent, text string) {
	e.t.Helper()
	b, err := os.ReadFile(filepath.Join(n.Data, "audit.log"))
	if err != nil {
		e.t.Fatal(err)
	}
	for line := range bytes.Lines(b) {
		var ev auditEvent
		if json.Unmarshal(line, &ev) == nil && ev.Stage != "RequestReceived" {
			events = append(events, ev)
		}
	}
	return events, string(b)
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}
