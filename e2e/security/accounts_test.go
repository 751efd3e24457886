package security

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// asks is what the account may do whose token is stolen.
var asks = call{name: "reads pods", method: http.MethodGet, path: "/api/v1/namespaces/$NS/pods"}

// account makes a service account that may read pods.
func (s *suite) account(name string) {
	s.t.Helper()
	s.ctl("create", "serviceaccount", name, "-n", ns)
	s.ctl("create", "rolebinding", "read-"+name, "-n", ns, "--clusterrole=view", "--serviceaccount="+ns+":"+name)
}

// minted is a token of an account.
func (s *suite) minted(account string, spec authenticationv1.TokenRequestSpec) (string, error) {
	out, err := s.api.CoreV1().ServiceAccounts(ns).CreateToken(s.t.Context(), account, &authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	return out.Status.Token, nil
}

func (s *suite) mustMint(account string, spec authenticationv1.TokenRequestSpec) string {
	s.t.Helper()
	token, err := s.minted(account, spec)
	if err != nil {
		s.t.Fatal(err)
	}
	return token
}

// noteEndingToken takes a token that lives as short as can be; the last group shows it.
func (s *suite) noteEndingToken() {
	s.t.Helper()
	s.account("ending")
	s.ending = s.mustMint("ending", authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To[int64](600)})
	if err := s.opens(s.ending); err != nil {
		s.t.Fatal(err)
	}
}

// opens says why a token does not do what its account may.
func (s *suite) opens(token string) error {
	code, body, err := s.send(s.asBearer(token), asks, false)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("%d %s", code, message(body))
	}
	return err
}

// refusedToken is the verdict on a token now.
func (s *suite) refusedToken(token string) verdict {
	code, body, err := s.send(s.asBearer(token), asks, false)
	switch {
	case err != nil:
		return broken(err)
	case code == http.StatusUnauthorized:
		return shut("%d %s", code, message(body))
	}
	return open("%d %.200s", code, body)
}

// refusedSoon waits until a token is refused whose ground is gone.
func (s *suite) refusedSoon(token string) verdict {
	began := time.Now()
	var v verdict
	_ = s.within(waitLimit, func(context.Context) error {
		if v = s.refusedToken(token); v.open || v.err != nil {
			return errors.New("not yet")
		}
		return nil
	})
	if !v.open && v.err == nil {
		v.said = fmt.Sprintf("after %s: %s", time.Since(began).Round(100*time.Millisecond), v.said)
	}
	return v
}

// part is one of the three of a token.
func part(token string, i int) []byte {
	b, err := base64.RawURLEncoding.DecodeString(strings.Split(token, ".")[i])
	if err != nil {
		panic(err)
	}
	return b
}

// rewritten is a token with another header and claims, and a signature over them.
func rewritten(token string, header, claims func(map[string]any), sign func(signed string) []byte) string {
	var out []string
	for i, change := range []func(map[string]any){header, claims} {
		fields := map[string]any{}
		if err := json.Unmarshal(part(token, i), &fields); err != nil {
			panic(err)
		}
		if change != nil {
			change(fields)
		}
		b, err := json.Marshal(fields)
		if err != nil {
			panic(err)
		}
		out = append(out, base64.RawURLEncoding.EncodeToString(b))
	}
	text := strings.Join(out, ".")
	return text + "." + base64.RawURLEncoding.EncodeToString(sign(text))
}

// accountTokens is what can be made of a stolen token of an account.
func accountTokens(s *suite) []attack {
	s.account("robbed")
	plain := authenticationv1.TokenRequestSpec{}
	good := s.mustMint("robbed", plain)
	sameSignature := func(string) []byte { return part(good, 2) }
	foreign, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		s.t.Fatal(err)
	}
	foreignSignature := func(text string) []byte {
		sum := sha256.Sum256([]byte(text))
		r, v, err := ecdsa.Sign(rand.Reader, foreign, sum[:])
		if err != nil {
			panic(err)
		}
		b := make([]byte, 64)
		r.FillBytes(b[:32])
		v.FillBytes(b[32:])
		return b
	}
	published, err := s.api.Discovery().RESTClient().Get().AbsPath("/openid/v1/jwks").DoRaw(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	byHMAC := func(text string) []byte {
		m := hmac.New(sha256.New, published)
		m.Write([]byte(text))
		return m.Sum(nil)
	}
	set := func(key string, value any) func(map[string]any) { return func(m map[string]any) { m[key] = value } }
	account := func(name string) func(map[string]any) {
		return func(m map[string]any) {
			m["sub"] = "system:serviceaccount:" + name
			space, of, _ := strings.Cut(name, ":")
			m["kubernetes.io"].(map[string]any)["namespace"] = space
			m["kubernetes.io"].(map[string]any)["serviceaccount"].(map[string]any)["name"] = of
		}
	}
	jwk := jose.JSONWebKey{Key: foreign.Public(), Algorithm: "ES256", Use: "sig", KeyID: "mine"}
	forged := []struct{ name, token string }{
		{"for another account", rewritten(good, nil, account(ns+":default"), sameSignature)},
		{"for an account of kube-system", rewritten(good, nil, account("kube-system:default"), sameSignature)},
		{"for another account, signed by a foreign key", rewritten(good, nil, account("kube-system:default"), foreignSignature)},
		{"with a later end", rewritten(good, nil, set("exp", time.Now().Add(24*365*time.Hour).Unix()), sameSignature)},
		{"with another audience", rewritten(good, nil, set("aud", []string{"*"}), sameSignature)},
		{"with no signature", rewritten(good, nil, nil, func(string) []byte { return nil })},
		{"with the algorithm none", rewritten(good, set("alg", "none"), account("kube-system:default"), func(string) []byte { return nil })},
		{"with the algorithm HS256 and the public key", rewritten(good, set("alg", "HS256"), account("kube-system:default"), byHMAC)},
		{"with a key that is unknown", rewritten(good, set("kid", "mine"), nil, foreignSignature)},
		{"with a key id that is a path", rewritten(good, set("kid", "../../../dev/null"), nil, foreignSignature)},
		{"with its own key in the header", rewritten(good, func(m map[string]any) { m["kid"], m["jwk"] = "mine", jwk }, nil, foreignSignature)},
		{"with the address of its own keys", rewritten(good, func(m map[string]any) { m["kid"], m["jku"] = "mine", "https://10.85.0.1/keys" }, nil, foreignSignature)},
		{"of another issuer", rewritten(good, nil, set("iss", "https://example.com"), foreignSignature)},
		{"with a letter changed", good[:len(good)-10] + flipped(good[len(good)-10]) + good[len(good)-9:]},
		{"cut short", good[:len(good)/2]},
		{"twice", good + "." + good},
		{"of 200 kB", good + strings.Repeat("A", 200<<10)},
	}
	var out []attack
	for _, f := range forged {
		out = append(out, attack{name: f.name, try: func(s *suite) verdict {
			v := s.refusedToken(f.token)
			if v.open && strings.HasPrefix(v.said, "431") {
				return shut("%s", v.said)
			}
			return v
		}})
	}
	out[0].control = func(s *suite) error { return s.opens(good) }
	out = append(out,
		attack{name: "for another audience", try: func(s *suite) verdict {
			return s.refusedToken(s.mustMint("robbed", authenticationv1.TokenRequestSpec{Audiences: []string{"vault"}}))
		}, control: func(s *suite) error {
			token := s.mustMint("robbed", authenticationv1.TokenRequestSpec{Audiences: []string{"vault"}})
			review, err := s.api.AuthenticationV1().TokenReviews().Create(s.t.Context(), &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{"vault"}}}, metav1.CreateOptions{})
			if err == nil && !review.Status.Authenticated {
				err = fmt.Errorf("%+v", review.Status)
			}
			return err
		}},
		attack{name: "for the API, shown to a service of another audience", try: func(s *suite) verdict {
			review, err := s.api.AuthenticationV1().TokenReviews().Create(s.t.Context(), &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: good, Audiences: []string{"vault"}}}, metav1.CreateOptions{})
			if err != nil {
				return broken(err)
			}
			if review.Status.Authenticated {
				return open("%+v", review.Status)
			}
			return shut("%s", review.Status.Error)
		}},
		attack{name: "as a client certificate's name", try: func(s *suite) verdict {
			code, body, err := s.send(s.asBearer(good), call{method: http.MethodGet, path: "/api/v1/namespaces/$NS/pods", header: map[string]string{"Impersonate-User": "system:serviceaccount:kube-system:default"}}, false)
			if err != nil || code != http.StatusForbidden {
				return verdict{open: err == nil, said: body, err: err}
			}
			return shut("%s", message(body))
		}},
	)
	// Tokens are bound to what they are for.
	bound := func(name string, kind string, gone func(s *suite, account, object string)) attack {
		return attack{name: name, try: func(s *suite) verdict {
			account := "bound-" + strings.ToLower(strings.ReplaceAll(name, " ", "-"))
			s.account(account)
			spec := authenticationv1.TokenRequestSpec{}
			switch kind {
			case "Pod":
				p := pod(account)
				p.Spec.ServiceAccountName = account
				p = s.create(p)
				s.ready(account)
				spec.BoundObjectRef = &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: p.Name, UID: p.UID}
			case "Secret":
				s.ctl("create", "secret", "generic", account, "-n", ns)
				spec.BoundObjectRef = &authenticationv1.BoundObjectReference{Kind: "Secret", APIVersion: "v1", Name: account}
			}
			token := s.mustMint(account, spec)
			if err := s.opens(token); err != nil {
				return broken(fmt.Errorf("it never opened: %w", err))
			}
			gone(s, account, account)
			return s.refusedSoon(token)
		}}
	}
	return append(out,
		bound("after its account", "", func(s *suite, account, _ string) { s.ctl("delete", "serviceaccount", account, "-n", ns) }),
		bound("of an account made again", "", func(s *suite, account, _ string) {
			s.ctl("delete", "serviceaccount", account, "-n", ns)
			s.ctl("create", "serviceaccount", account, "-n", ns)
		}),
		bound("after its pod", "Pod", func(s *suite, _, object string) { s.remove(object) }),
		bound("of a pod made again", "Pod", func(s *suite, account, object string) {
			s.remove(object)
			p := pod(object)
			p.Spec.ServiceAccountName = account
			s.create(p)
		}),
		bound("after its Secret", "Secret", func(s *suite, _, object string) { s.ctl("delete", "secret", object, "-n", ns) }),
		attack{name: "bound to a pod that is not there", try: func(s *suite) verdict {
			_, err := s.minted("robbed", authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: "none"}})
			if err == nil {
				return open("it was made")
			}
			return shut("%v", err)
		}},
		attack{name: "bound to another account's pod", try: func(s *suite) verdict {
			_, err := s.minted("robbed", authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: "on-a1"}})
			if err == nil {
				return open("it was made")
			}
			return shut("%v", err)
		}},
		attack{name: "of a pod's own volume, after the pod", try: func(s *suite) verdict {
			s.account("in-a-pod")
			p := pod("in-a-pod")
			p.Spec.ServiceAccountName = "in-a-pod"
			s.create(p)
			s.ready("in-a-pod")
			token := strings.TrimSpace(s.ctl("exec", "-n", ns, "in-a-pod", "--", "/hello", "cat", "/var/run/secrets/kubernetes.io/serviceaccount/token"))
			if err := s.opens(token); err != nil {
				return broken(err)
			}
			s.remove("in-a-pod")
			return s.refusedSoon(token)
		}},
		attack{name: "in a pod that wants none", try: func(s *suite) verdict {
			p := pod("no-token", "cat", "/var/run/secrets/kubernetes.io/serviceaccount/token")
			p.Spec.AutomountServiceAccountToken, p.Spec.RestartPolicy = ptr.To(false), corev1.RestartPolicyNever
			s.create(p)
			defer s.remove("no-token")
			if got := s.ended("no-token"); got.Status.Phase == corev1.PodSucceeded {
				return open("%.40s", s.logs("no-token"))
			}
			return shut("%s", strings.TrimSpace(s.logs("no-token")))
		}},
	)
}

func flipped(c byte) string {
	if c == 'A' {
		return "B"
	}
	return "A"
}

// endedToken shows the token that was taken at the beginning once its ten minutes
// are over.
func endedToken(*suite) []attack {
	return []attack{{name: "ten minutes later", try: func(s *suite) verdict {
		var claims struct{ Exp int64 }
		if err := json.Unmarshal(part(s.ending, 1), &claims); err != nil {
			return broken(err)
		}
		var v verdict
		err := s.within(time.Until(time.Unix(claims.Exp, 0))+waitLimit, func(context.Context) error {
			if v = s.refusedToken(s.ending); v.open || v.err != nil {
				return errors.New(v.said)
			}
			return nil
		})
		if err == nil {
			if early := time.Until(time.Unix(claims.Exp, 0)); early > time.Minute {
				return broken(fmt.Errorf("it was refused %s before its end: %s", early, v.said))
			}
			v.said = fmt.Sprintf("%s after its end: %s", time.Since(time.Unix(claims.Exp, 0)).Round(time.Second), v.said)
		}
		return v
	}, control: func(s *suite) error {
		return s.opens(s.mustMint("ending", authenticationv1.TokenRequestSpec{}))
	}}}
}
