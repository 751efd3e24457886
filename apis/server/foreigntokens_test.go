package server_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// whoIs says as whom a token is known.
func whoIs(t *testing.T, admin *rest.Config, token string) (authenticationv1.UserInfo, error) {
	t.Helper()
	client := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(bearer(admin, token)))
	review, err := client.AuthenticationV1().SelfSubjectReviews().Create(waitContext(t), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		return authenticationv1.UserInfo{}, err
	}
	return review.Status.UserInfo, nil
}

// provider is an issuer of OpenID Connect tokens.
type provider struct {
	*httptest.Server
	key *ecdsa.PrivateKey
}

func newProvider(t *testing.T) *provider {
	t.Helper()
	p := &provider{key: must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))}
	mux := http.NewServeMux()
	answer := func(path string, body func() any) {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(body())
		})
	}
	answer("/.well-known/openid-configuration", func() any {
		return map[string]any{
			"issuer": p.URL, "jwks_uri": p.URL + "/keys", "response_types_supported": []string{"id_token"},
			"subject_types_supported": []string{"public"}, "id_token_signing_alg_values_supported": []string{"ES256"},
		}
	})
	answer("/keys", func() any {
		return jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: p.key.Public(), KeyID: "one", Algorithm: "ES256", Use: "sig"}}}
	})
	p.Server = httptest.NewTLSServer(mux)
	t.Cleanup(p.Close)
	return p
}

// token is one of ann, but for changes of its claims.
func (p *provider) token(t *testing.T, change map[string]any) string {
	t.Helper()
	signer := must[jose.Signer](t)(jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: p.key, KeyID: "one"}}, nil))
	claims := map[string]any{
		"iss": p.URL, "aud": "doors", "sub": "ann", "hd": "example.com", "email": "ann@example.com", "roles": []string{"baker", "smith"}, "dept": map[string]any{"name": "kitchen"},
		"iat": time.Now().Add(-time.Minute).Unix(), "exp": time.Now().Add(time.Hour).Unix(),
	}
	for name, value := range change {
		claims[name] = value
	}
	return must[string](t)(jwt.Signed(signer).Claims(claims).Serialize())
}

// trusts is the configuration of a server that trusts the issuer.
func (p *provider) trusts(prefix string) string {
	ca := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.Certificate().Raw}))
	return fmt.Sprintf(`- issuer: {url: %q, audiences: [doors], certificateAuthority: %q}
  claimMappings:
    username: {expression: '"%s" + claims.sub'}
    groups: {expression: 'dyn(claims.roles).map(r, "role:" + r)'}
    uid: {expression: 'claims.email'}
    extra: [{key: example.com/dept, valueExpression: 'claims.dept.name'}]
  claimValidationRules: [{expression: 'claims.hd == "example.com"', message: "of another company"}]
  userValidationRules: [{expression: '!user.groups.exists(g, g == "role:root")', message: "no root here"}]
`, p.URL, ca, prefix)
}

// TestIssuersByExpressions: what an AuthenticationConfiguration says in CEL of the
// tokens of an issuer counts, and so does another one a moment after it was written.
func TestIssuersByExpressions(t *testing.T) {
	first, second := newProvider(t), newProvider(t)
	file := filepath.Join(t.TempDir(), "authentication.yaml")
	write := func(jwt ...string) {
		t.Helper()
		content := "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\njwt:\n" + strings.Join(jwt, "")
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(first.trusts("oidc:"))
	s := servertest.Start(t, func(c *server.Config) { c.Access.Authentication = file })
	admin := s.Listen(t)
	ann := first.token(t, nil)
	soon(t, "the issuer's keys are known", func() bool { _, err := whoIs(t, admin, ann); return err == nil })
	who, err := whoIs(t, admin, ann)
	if err != nil {
		t.Fatal(err)
	}
	if who.Username != "oidc:ann" || who.UID != "ann@example.com" || !slices.Equal(who.Groups, []string{"role:baker", "role:smith", "system:authenticated"}) ||
		!slices.Equal(who.Extra["example.com/dept"], []string{"kitchen"}) {
		t.Errorf("%+v", who)
	}
	for what, token := range map[string]string{
		"what a rule about claims refuses":    first.token(t, map[string]any{"hd": "other.example"}),
		"what a rule about the user refuses":  first.token(t, map[string]any{"roles": []string{"root"}}),
		"an expression without what it needs": first.token(t, map[string]any{"dept": "kitchen"}),
		"another audience":                    first.token(t, map[string]any{"aud": "windows"}),
		"an issuer that nobody trusts":        second.token(t, nil),
	} {
		if who, err := whoIs(t, admin, token); !apierrors.IsUnauthorized(err) {
			t.Errorf("%s: %+v, %v", what, who, err)
		}
	}

	// Another issuer comes; the one that stays keeps the keys that it has.
	first.Close()
	write(first.trusts("oidc:"), second.trusts("second:"))
	bea := second.token(t, map[string]any{"sub": "bea"})
	soon(t, "another issuer is trusted", func() bool { _, err := whoIs(t, admin, bea); return err == nil })
	fresh := first.token(t, map[string]any{"sub": "fred"}) // which nobody has seen before
	if who, err := whoIs(t, admin, fresh); err != nil || who.Username != "oidc:fred" {
		t.Errorf("of the issuer that stays: %+v, %v", who, err)
	}
	// One whose users are called otherwise.
	write(second.trusts("renamed:"))
	soon(t, "another configuration", func() bool {
		who, err := whoIs(t, admin, second.token(t, map[string]any{"sub": "bea", "jti": fmt.Sprint(time.Now().UnixNano())}))
		return err == nil && who.Username == "renamed:bea"
	})
	if who, err := whoIs(t, admin, first.token(t, map[string]any{"sub": "late"})); !apierrors.IsUnauthorized(err) {
		t.Errorf("of an issuer that was taken out: %+v, %v", who, err)
	}
	// A file that is wrong changes nothing, and the next one counts.
	write("- issuer: {url: 'http://plain'}\n")
	soon(t, "the wrong file is seen", func() bool { return s.WrongAuthentications() > 0 })
	if who, err := whoIs(t, admin, second.token(t, map[string]any{"sub": "cleo"})); err != nil || who.Username != "renamed:cleo" {
		t.Errorf("beside a wrong file: %+v, %v", who, err)
	}
	write(second.trusts("again:"))
	soon(t, "the next configuration", func() bool {
		who, err := whoIs(t, admin, second.token(t, map[string]any{"sub": "bea", "jti": fmt.Sprint(time.Now().UnixNano())}))
		return err == nil && who.Username == "again:bea"
	})
}

// TestTokenWebhook: a service that is asked about tokens, which knows one, talks
// nonsense, knows one for somebody else, or does not answer.
func TestTokenWebhook(t *testing.T) {
	hanging, release := make(chan struct{}, 1), make(chan struct{})
	var asked atomic.Pointer[authenticationv1.TokenReview]
	hook := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		var review authenticationv1.TokenReview
		if err := json.NewDecoder(req.Body).Decode(&review); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		wanda := authenticationv1.UserInfo{Username: "wanda", UID: "7", Groups: []string{"webs"}, Extra: map[string]authenticationv1.ExtraValue{"example.com/floor": {"3"}}}
		switch review.Spec.Token {
		case "good":
			asked.Store(review.DeepCopy())
			review.Status = authenticationv1.TokenReviewStatus{Authenticated: true, User: wanda, Audiences: review.Spec.Audiences}
		case "elsewhere":
			review.Status = authenticationv1.TokenReviewStatus{Authenticated: true, User: wanda, Audiences: []string{"elsewhere"}}
		case "garbage":
			_, _ = w.Write([]byte("}{"))
			return
		case "hanging":
			select {
			case hanging <- struct{}{}:
			default:
			}
			select {
			case <-release:
			case <-req.Context().Done():
			}
			return
		default:
			review.Status = authenticationv1.TokenReviewStatus{Error: "not one of ours"}
		}
		_ = json.NewEncoder(w).Encode(review)
	}))
	t.Cleanup(hook.Close)
	defer close(release)
	kubeconfig := filepath.Join(t.TempDir(), "tokens.kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: '"+hook.URL+"'}}]\n"+
		"users: [{name: u, user: {}}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := servertest.Start(t, func(c *server.Config) { c.Access.TokenWebhook, c.RequestTimeout = kubeconfig, 20*time.Second })
	admin := s.Listen(t)
	known := func() {
		t.Helper()
		who, err := whoIs(t, admin, "good")
		if err != nil || who.Username != "wanda" || who.UID != "7" || !slices.Equal(who.Groups, []string{"webs", "system:authenticated"}) || !slices.Equal(who.Extra["example.com/floor"], []string{"3"}) {
			t.Errorf("%+v, %v", who, err)
		}
	}
	known()
	if review := asked.Load(); review == nil || !slices.Equal(review.Spec.Audiences, []string{"https://kubernetes.default.svc"}) {
		t.Errorf("it was asked: %+v", review)
	}
	for _, token := range []string{"unknown", "garbage", "elsewhere"} {
		if who, err := whoIs(t, admin, token); !apierrors.IsUnauthorized(err) {
			t.Errorf("%s: %+v, %v", token, who, err)
		}
	}
	// One that gets no answer is refused in the end, and keeps no other out meanwhile.
	waits := make(chan int, 1)
	go func() {
		code, _, _ := ask(t, waitContext(t), bearer(admin, "hanging"), "/api/v1/namespaces")
		waits <- code
	}()
	select {
	case <-hanging:
	case <-waitContext(t).Done():
		t.Fatal("the service was not asked")
	}
	known()
	if code, _, _ := ask(t, t.Context(), admin, "/api/v1/namespaces"); code != http.StatusOK {
		t.Errorf("an administrator: %d", code)
	}
	select {
	case code := <-waits:
		if code < 400 {
			t.Errorf("without an answer: %d", code)
		}
	case <-waitContext(t).Done():
		t.Error("a token that gets no answer hangs for ever")
	}
}
