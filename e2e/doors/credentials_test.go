package doors

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/member/pki"
)

// as is a configuration that asks in another's name.
func as(config *rest.Config, user string) *rest.Config {
	config = rest.CopyConfig(config)
	config.Impersonate.UserName = user
	return config
}

const unauthorized = "Unauthorized"

// rewritten is a token with other claims, and a signature over them; sign nil: the one
// that it had.
func rewritten(token string, header, claims map[string]any, sign func(string) []byte) string {
	parts := strings.Split(token, ".")
	for i, change := range []map[string]any{header, claims} {
		fields := map[string]any{}
		b, err := base64.RawURLEncoding.DecodeString(parts[i])
		if err == nil {
			err = json.Unmarshal(b, &fields)
		}
		if err != nil {
			panic(err)
		}
		for name, value := range change {
			fields[name] = value
		}
		if b, err = json.Marshal(fields); err != nil {
			panic(err)
		}
		parts[i] = base64.RawURLEncoding.EncodeToString(b)
	}
	if sign != nil {
		parts[2] = base64.RawURLEncoding.EncodeToString(sign(parts[0] + "." + parts[1]))
	}
	return strings.Join(parts, ".")
}

// byForeignKey signs as the server does, with a key of its own.
func byForeignKey(key *ecdsa.PrivateKey) func(string) []byte {
	return func(text string) []byte {
		sum := sha256.Sum256([]byte(text))
		r, v, err := ecdsa.Sign(rand.Reader, key, sum[:])
		if err != nil {
			panic(err)
		}
		b := make([]byte, 64)
		r.FillBytes(b[:32])
		v.FillBytes(b[32:])
		return b
	}
}

// tokens are some that were good, some that are good for something else, and some
// that are none.
func tokens(s *suite) []door {
	ctx, path := s.t.Context(), core+ns+"/secrets/own"
	mine := func(name, token string) identity { return s.bearer("", token) }
	s.ctl("create", "secret", "generic", "holds", "-n", ns)
	s.ctl("create", "serviceaccount", "leaves", "-n", ns)
	s.ctl("create", "rolebinding", "leaves", "-n", ns, "--clusterrole=edit", "--serviceaccount="+ns+":leaves")
	p, err := s.api.CoreV1().Pods(ns).Create(ctx, func() *corev1.Pod { p := pod("stolen-from", "a1"); p.Spec.ServiceAccountName = "robot"; return p }(), metav1.CreateOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	good := s.robot.config.BearerToken
	bound := func(kind, name string) string {
		return s.token("robot", authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: kind, APIVersion: "v1", Name: name}})
	}
	ofSecret, ofPod, ofAccount := bound("Secret", "holds"), bound("Pod", p.Name), s.token("leaves", authenticationv1.TokenRequestSpec{})
	ends := s.endingBootstrapToken()
	for what, token := range map[string]string{"of a Secret": ofSecret, "of a pod": ofPod, "of an account": ofAccount} {
		s.soon("the token "+what+" is good", get("", mine(what, token), path, ok, ""))
	}
	s.ctl("delete", "secret", "holds", "-n", ns)
	s.ctl("delete", "pod", p.Name, "-n", ns, "--force", "--grace-period=0")
	s.ctl("delete", "serviceaccount", "leaves", "-n", ns)
	s.ctl("create", "serviceaccount", "leaves", "-n", ns)
	// An answer is believed for ten seconds.
	for what, token := range map[string]string{"of a Secret": ofSecret, "of a pod": ofPod, "of an account": ofAccount, "that ends": ends} {
		s.soon("the token "+what+" is refused", get("", mine(what, token), "/apis", 401, unauthorized))
	}
	key, err := pki.NewKey()
	if err != nil {
		s.t.Fatal(err)
	}
	foreign := byForeignKey(key.(*ecdsa.PrivateKey))
	other := map[string]any{"sub": "system:serviceaccount:kube-system:default"}
	bad := []struct{ name, header string }{
		{"of a Secret that is gone", "Bearer " + ofSecret},
		{"of a pod that is gone", "Bearer " + ofPod},
		{"of an account that was made again", "Bearer " + ofAccount},
		{"a bootstrap token that has ended", "Bearer " + ends},
		{"for another audience", "Bearer " + s.token("robot", authenticationv1.TokenRequestSpec{Audiences: []string{"vault"}})},
		{"with another audience written in", "Bearer " + rewritten(good, nil, map[string]any{"aud": []string{"*"}}, nil)},
		{"with a later end written in", "Bearer " + rewritten(good, nil, map[string]any{"exp": time.Now().Add(9000 * time.Hour).Unix()}, nil)},
		{"for another account, with this one's signature", "Bearer " + rewritten(good, nil, other, nil)},
		{"signed by a foreign key", "Bearer " + rewritten(good, nil, other, foreign)},
		{"signed by a key that is unknown", "Bearer " + rewritten(good, map[string]any{"kid": "mine"}, other, foreign)},
		{"of another issuer", "Bearer " + rewritten(good, nil, map[string]any{"iss": "https://example.com"}, foreign)},
		{"with the algorithm none", "Bearer " + rewritten(good, map[string]any{"alg": "none"}, other, func(string) []byte { return nil })},
		{"without a signature", "Bearer " + good[:strings.LastIndex(good, ".")+1]},
		{"one letter short", "Bearer " + good[:len(good)-1]},
		{"twice", "Bearer " + good + "." + good},
		{"that is none", "Bearer doors"},
		{"of dots", "Bearer .."},
		{"of 64 KB", "Bearer " + strings.Repeat("a", 64<<10)},
		{"that is empty", "Bearer "},
		{"by a scheme that there is not", "Token " + good},
		{"as a password", "Basic " + base64.StdEncoding.EncodeToString([]byte("robot:"+good))},
	}
	doors := []door{
		get("one that is good", s.robot, path, ok, ""),
		inGo("one that is good", s.robot, func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Secrets(ns).Get(ctx, "own", metav1.GetOptions{})
			return err
		}, ok, ""),
		get("none at all", s.anonymous(), path, 401, unauthorized),
		inGo("for another audience", mine("", s.token("robot", authenticationv1.TokenRequestSpec{Audiences: []string{"vault"}})), func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Secrets(ns).Get(ctx, "own", metav1.GetOptions{})
			return err
		}, 401, unauthorized),
		inGo("of a pod that is gone", mine("", ofPod), func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Secrets(ns).Get(ctx, "own", metav1.GetOptions{})
			return err
		}, 401, unauthorized),
		call("bound to a pod that is not there", s.admin, http.MethodPost, core+ns+"/serviceaccounts/robot/token", `{"spec":{"boundObjectRef":{"kind":"Pod","apiVersion":"v1","name":"none"}}}`, 404, `pods "none" not found`),
		call("bound to a pod of another account", s.admin, http.MethodPost, core+ns+"/serviceaccounts/robot/token", `{"spec":{"boundObjectRef":{"kind":"Pod","apiVersion":"v1","name":"on-a1"}}}`, 400, "to pod running with different serviceaccount name"),
		call("for less than ten minutes", s.admin, http.MethodPost, core+ns+"/serviceaccounts/robot/token", `{"spec":{"expirationSeconds":60}}`, 422, "spec.expirationSeconds"),
	}
	for _, b := range bad {
		doors = append(doors, get(b.name, s.anonymous(), path, 401, unauthorized, "Authorization", b.header))
	}
	return doors
}

// endingBootstrapToken is a token that was good and ends while the suite waits.
func (s *suite) endingBootstrapToken() string {
	s.t.Helper()
	const id, secret = "abcdef", "0123456789abcdef"
	_, err := s.api.CoreV1().Secrets(metav1.NamespaceSystem).Create(s.t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "bootstrap-token-" + id}, Type: corev1.SecretTypeBootstrapToken,
		StringData: map[string]string{"token-id": id, "token-secret": secret, "usage-bootstrap-authentication": "true", "expiration": time.Now().Add(30 * time.Second).UTC().Format(time.RFC3339)},
	}, metav1.CreateOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	token := id + "." + secret
	if err := s.within(25*time.Second, func(ctx context.Context) error {
		client, err := kubernetes.NewForConfig(s.bearer("", token).at(s, "n1"))
		if err == nil {
			_, err = client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		}
		return err
	}); err != nil {
		s.t.Logf("the bootstrap token was not seen while it was good: %v", err) // on a very slow machine
	}
	return token
}

// certificates are some that the cluster's authority did not make, or not for this.
func certificates(s *suite) []door {
	now := time.Now()
	foreign, err := pki.NewCA("clusterd", now)
	if err != nil {
		s.t.Fatal(err)
	}
	key, err := pki.NewKey()
	if err != nil {
		s.t.Fatal(err)
	}
	path := core + ns + "/secrets/own"
	doors := []door{get("the administrator's", s.admin, path, ok, "")}
	show := func(name string, chain [][]byte, key crypto.PrivateKey) {
		pair := tls.Certificate{Certificate: chain, PrivateKey: key}
		doors = append(doors, door{name: name, by: raw, code: 401, says: unauthorized, try: func(s *suite, server, id string) (answer, error) {
			pool := x509.NewCertPool()
			pool.AppendCertsFromPEM(s.admin.config.CAData)
			client := http.Client{Timeout: waitLimit, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: pool,
				GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }}}}
			req, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, "https://"+s.addr(server).String()+path, nil)
			if err != nil {
				return answer{}, err
			}
			req.Header.Set("Audit-ID", id)
			res, err := client.Do(req)
			if err != nil {
				return answer{}, err
			}
			defer res.Body.Close()
			var status metav1.Status
			err = json.NewDecoder(res.Body).Decode(&status)
			return answer{res.StatusCode, status.Message}, err
		}})
	}
	for _, one := range []struct {
		name, user string
		groups     []string
		notBefore  time.Time
	}{
		{"of a foreign authority, of an administrator", "admin", []string{"system:masters"}, now},
		{"of a foreign authority, of a node", "system:node:a1", []string{"system:nodes"}, now},
		{"of a foreign authority, that has ended", "admin", []string{"system:masters"}, now.Add(-48 * time.Hour)},
		{"of a foreign authority, of tomorrow", "admin", []string{"system:masters"}, now.Add(24 * time.Hour)},
	} {
		cert, err := foreign.IssueClient(key.Public(), one.user, one.groups, time.Hour, one.notBefore)
		if err != nil {
			s.t.Fatal(err)
		}
		show(one.name, [][]byte{cert.Raw, foreign.Cert.Raw}, key)
	}
	// A node's key signs nothing.
	pair, err := tls.LoadX509KeyPair(s.nodeOf("a1").config.CertFile, s.nodeOf("a1").config.KeyFile)
	if err != nil {
		s.t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(pair.Certificate[0])
	if err != nil {
		s.t.Fatal(err)
	}
	signed := func(parent *x509.Certificate, by crypto.PrivateKey, subject pkix.Name) []byte {
		template := &x509.Certificate{SerialNumber: big.NewInt(4711), Subject: subject, NotBefore: now.Add(-time.Minute), NotAfter: now.Add(time.Hour),
			KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
		if parent == nil {
			parent = template
		}
		der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), by)
		if err != nil {
			s.t.Fatal(err)
		}
		return der
	}
	masters := pkix.Name{CommonName: "admin", Organization: []string{"system:masters"}}
	show("signed by a node's key", [][]byte{signed(leaf, pair.PrivateKey, masters), leaf.Raw}, key)
	show("signed by itself", [][]byte{signed(nil, key, masters)}, key)
	show("without a name", [][]byte{signed(nil, key, pkix.Name{})}, key)

	// One that the cluster did sign, for somebody who has no rights yet.
	person := s.person("jane")
	doors = append(doors,
		get("of a person without rights", person, path, 403, denied("jane", "get", "secrets", "", ns)),
		inGo("of a person without rights", person, func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.CoreV1().Secrets(ns).Get(ctx, "own", metav1.GetOptions{})
			return err
		}, 403, denied("jane", "get", "secrets", "", ns)),
		get("of a person, beside a token that is bad", person, path, 403, denied("jane", "get", "secrets", "", ns), "Authorization", "Bearer bad"),
	)
	return doors
}

// person has a certificate of the cluster's.
func (s *suite) person(name string) identity {
	s.t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		s.t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: name}}, key)
	if err != nil {
		s.t.Fatal(err)
	}
	request := map[string]any{"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": map[string]any{"name": name}, "spec": map[string]any{
		"signerName": "kubernetes.io/kube-apiserver-client", "usages": []string{"client auth"},
		"request": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
	}}
	b, err := json.Marshal(request)
	if err != nil {
		s.t.Fatal(err)
	}
	s.apply(string(b))
	s.ctl("certificate", "approve", name)
	config := rest.AnonymousClientConfig(s.admin.config)
	if config.KeyData, err = pki.EncodeKey(key); err != nil {
		s.t.Fatal(err)
	}
	if err := s.within(waitLimit, func(ctx context.Context) error {
		r, err := s.api.CertificatesV1().CertificateSigningRequests().Get(ctx, name, metav1.GetOptions{})
		if err == nil && len(r.Status.Certificate) == 0 {
			err = errors.New("it is not signed")
		}
		if err == nil {
			config.CertData = r.Status.Certificate
		}
		return err
	}); err != nil {
		s.t.Fatal(err)
	}
	return identity{name, config}
}

// systemNames are names that the system keeps to itself, in requests of others.
func systemNames(s *suite) []door {
	secrets := "/api/v1/secrets"
	not := denied(robotName, "list", "secrets", "", "")
	class := func(name string, value int) string {
		return fmt.Sprintf(`{"metadata":{"name":%q},"value":%d}`, name, value)
	}
	const classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
	const bootstrap = `{"metadata":{"name":"bootstrap-token-%[1]s"},"type":"bootstrap.kubernetes.io/token","stringData":{"token-id":"%[1]s","token-secret":"0123456789abcdef","usage-bootstrap-authentication":"true","auth-extra-groups":"%[2]s"}}`
	for id, groups := range map[string]string{"aaaaaa": "system:masters", "bbbbbb": "system:bootstrappers:fine"} {
		if _, err := s.api.CoreV1().RESTClient().Post().AbsPath(core + "kube-system/secrets").Body(fmt.Appendf(nil, bootstrap, id, groups)).DoRaw(s.t.Context()); err != nil {
			s.t.Fatal(err)
		}
	}
	whoami := func(name, token string, code int, says string) door {
		return call(name, s.bearer("", token), http.MethodPost, "/apis/authentication.k8s.io/v1/selfsubjectreviews", `{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`, code, says)
	}
	return []door{
		call("a class of another name", s.admin, http.MethodPost, classes, class("fine", 1000), http.StatusCreated, ""),
		whoami("a bootstrap token of a group that it may have", "bbbbbb.0123456789abcdef", http.StatusCreated, "system:bootstrappers:fine"),

		get("shows X-Remote-User", s.robot, secrets, 403, not, "X-Remote-User", "system:admin", "X-Remote-Group", "system:masters"),
		get("shows X-Remote-Extra", s.robot, secrets, 403, not, "X-Remote-User", "system:admin", "X-Remote-Uid", "0", "X-Remote-Extra-Scopes", "all"),
		get("shows X-Remote-User and nothing else", s.anonymous(), secrets, 401, unauthorized, "X-Remote-User", "system:admin", "X-Remote-Group", "system:masters"),
		get("shows a forwarded certificate", s.robot, secrets, 403, not, "X-Forwarded-Client-Cert", `Subject="O=system:masters,CN=admin"`),
		get("says that it is the scheduler's program", s.robot, secrets, 403, not, "User-Agent", "clusterd/part (scheduler)"),
		whoami("a bootstrap token of system:masters", "aaaaaa.0123456789abcdef", 401, unauthorized),
		call("a class whose name begins with system-", s.admin, http.MethodPost, classes, class("system-mine", 1000), 422, "priority class names with 'system-' prefix are reserved for system use only"),
		call("a class above those of the system", s.admin, http.MethodPost, classes, class("highest", 2000000001), 422, "maximum allowed value of a user defined priority is 1000000000"),
		inGo("a class whose name begins with system-", s.admin, func(ctx context.Context, c kubernetes.Interface) error {
			_, err := c.SchedulingV1().PriorityClasses().Create(ctx, &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: "system-go"}, Value: 1}, metav1.CreateOptions{})
			return err
		}, 422, "reserved for system use only"),
		call("a namespace with a colon", s.admin, http.MethodPost, "/api/v1/namespaces", `{"metadata":{"name":"system:mine"}}`, 422, "system:mine"),
		call("deletes kube-system", s.admin, http.MethodDelete, "/api/v1/namespaces/kube-system", "", 403, `namespaces "kube-system" is forbidden: this namespace may not be deleted`),
		ctl("deletes kube-system", s.admin, "delete namespaces/kube-system", "", 403, "this namespace may not be deleted", "delete", "namespace", "kube-system"),
		call("a pod of the system's class in its namespace", s.robot, http.MethodPost, core+ns+"/pods", `{"metadata":{"name":"made"},"spec":{"priority":2000000000,"containers":[{"name":"c","image":"x"}]}}`, 403, "the integer value of priority (2000000000) must not be provided in pod spec"),
	}
}
