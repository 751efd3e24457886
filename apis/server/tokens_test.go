package server_test

import (
	"encoding/base64"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

// tokenOf asks for a token of a service account in default.
func tokenOf(t *testing.T, client kubernetes.Interface, account string, spec authenticationv1.TokenRequestSpec) string {
	t.Helper()
	request := must[*authenticationv1.TokenRequest](t)(client.CoreV1().ServiceAccounts("default").CreateToken(t.Context(), account, &authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{}))
	if request.Status.Token == "" || request.Status.ExpirationTimestamp.IsZero() {
		t.Fatalf("%+v", request.Status)
	}
	return request.Status.Token
}

func bearer(admin *rest.Config, token string) *rest.Config {
	config := rest.AnonymousClientConfig(admin)
	config.BearerToken = token
	return config
}

func TestServiceAccountTokens(t *testing.T) {
	features.Shows(t, 31, 48)
	features.Conforms(t, 172)
	s := servertest.Start(t, nil)
	ctx, admin := t.Context(), s.Listen(t)
	accounts := s.Client.CoreV1().ServiceAccounts("default")
	robot := must[*corev1.ServiceAccount](t)(accounts.Create(ctx, &corev1.ServiceAccount{ObjectMeta: roleMeta("robot")}, metav1.CreateOptions{}))
	must[*rbacv1.RoleBinding](t)(s.Client.RbacV1().RoleBindings("default").Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: roleMeta("robot"), RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: "system:aggregate-to-view"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Name: "robot"}},
	}, metav1.CreateOptions{}))
	p := pod("p")
	p.Spec.ServiceAccountName = "robot"
	p = createPod(t, s.Client, p, "n1")
	ofPod := &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: "p", UID: p.UID}
	secret := must[*corev1.Secret](t)(s.Client.CoreV1().Secrets("default").Create(ctx, &corev1.Secret{ObjectMeta: roleMeta("s")}, metav1.CreateOptions{}))

	plain := tokenOf(t, s.Client, "robot", authenticationv1.TokenRequestSpec{})
	bound := tokenOf(t, s.Client, "robot", authenticationv1.TokenRequestSpec{BoundObjectRef: ofPod})
	ofSecret := tokenOf(t, s.Client, "robot", authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Secret", Name: "s"}})
	elsewhere := tokenOf(t, s.Client, "robot", authenticationv1.TokenRequestSpec{Audiences: []string{"vault"}})

	client := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(bearer(admin, bound)))
	soon(t, "the token's account may list pods", func() bool { return mayList(t, client, "default") })
	if mayList(t, client, "kube-system") {
		t.Error("the account reads another namespace")
	}
	who := must[*authenticationv1.SelfSubjectReview](t)(client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})).Status.UserInfo
	if who.Username != "system:serviceaccount:default:robot" || who.UID != string(robot.UID) ||
		!slices.Equal(who.Groups, []string{"system:serviceaccounts", "system:serviceaccounts:default", "system:authenticated"}) ||
		who.Extra["authentication.kubernetes.io/pod-name"][0] != "p" || who.Extra["authentication.kubernetes.io/node-name"][0] != "n1" ||
		!strings.HasPrefix(who.Extra["authentication.kubernetes.io/credential-id"][0], "JTI=") {
		t.Errorf("whoami: %+v", who)
	}

	review := func(token string, audiences ...string) authenticationv1.TokenReviewStatus {
		return must[*authenticationv1.TokenReview](t)(s.Client.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{
			Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: audiences}}, metav1.CreateOptions{})).Status
	}
	if st := review(plain); !st.Authenticated || st.User.Username != "system:serviceaccount:default:robot" || !slices.Equal(st.Audiences, []string{"https://kubernetes.default.svc"}) {
		t.Errorf("review: %+v", st)
	}
	if st := review(elsewhere, "vault", "other"); !st.Authenticated || !slices.Equal(st.Audiences, []string{"vault"}) {
		t.Errorf("review for its audience: %+v", st)
	}
	if st := review(elsewhere); st.Authenticated || !strings.Contains(st.Error, "invalid for the target audiences") {
		t.Errorf("review of a token for another audience: %+v", st)
	}
	if st := review("nonsense"); st.Authenticated {
		t.Errorf("review of nonsense: %+v", st)
	}

	// What was signed by us counts unchanged only.
	parts := strings.Split(plain, ".")
	forged := parts[0] + "." + base64.RawURLEncoding.EncodeToString([]byte(strings.Replace(string(must[[]byte](t)(base64.RawURLEncoding.DecodeString(parts[1]))), "robot", "admin", 1))) + "." + parts[2]
	none := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none","typ":"JWT"}`)) + "." + parts[1] + "."
	for name, token := range map[string]string{
		"forged": forged, "without signature": none, "cut": plain[:len(plain)-8], "for another audience": elsewhere, "empty": "", "dots": "..", "long": strings.Repeat("x.", 20000),
	} {
		if code, status, _ := raw(t, bearer(admin, token), "GET", "/api/v1/pods", ""); code != http.StatusUnauthorized {
			t.Errorf("%s: %d %s", name, code, status.Message)
		}
	}

	// What a token is bound to takes it along.
	code := func(token string) int {
		c, _, _ := raw(t, bearer(admin, token), "GET", "/api/v1/namespaces/default/configmaps", "")
		return c
	}
	if got := code(ofSecret); got != http.StatusOK {
		t.Errorf("token bound to a secret: %d", got)
	}
	if err := s.Client.CoreV1().Secrets("default").Delete(ctx, secret.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := s.Client.CoreV1().Pods("default").Delete(ctx, "p", metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
		t.Fatal(err)
	}
	for name, token := range map[string]string{"pod": bound, "secret": ofSecret} {
		soon(t, "no token of a deleted "+name, func() bool { return code(token) == http.StatusUnauthorized })
	}
	if err := accounts.Delete(ctx, "robot", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	must[*corev1.ServiceAccount](t)(accounts.Create(ctx, &corev1.ServiceAccount{ObjectMeta: roleMeta("robot")}, metav1.CreateOptions{}))
	soon(t, "no token of an account that was recreated", func() bool { return code(plain) == http.StatusUnauthorized })
}

// TestBootstrapTokens: a Secret lets in who has its token, as a bootstrapper and
// nothing more, until it is gone.
func TestBootstrapTokens(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx, admin := t.Context(), s.Listen(t)
	secrets := s.Client.CoreV1().Secrets("kube-system")
	must[*corev1.Secret](t)(secrets.Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "bootstrap-token-abcdef"}, Type: "bootstrap.kubernetes.io/token",
		StringData: map[string]string{"token-id": "abcdef", "token-secret": "0123456789abcdef", "usage-bootstrap-authentication": "true", "auth-extra-groups": "system:bootstrappers:lab"},
	}, metav1.CreateOptions{}))
	whoami := func(token string) (authenticationv1.UserInfo, error) {
		client := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(bearer(admin, token)))
		review, err := client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		return review.Status.UserInfo, err
	}
	who, err := whoami("abcdef.0123456789abcdef")
	if err != nil || who.Username != "system:bootstrap:abcdef" || !slices.Equal(who.Groups, []string{"system:bootstrappers", "system:bootstrappers:lab", "system:authenticated"}) {
		t.Errorf("whoami: %+v %v", who, err)
	}
	client := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(bearer(admin, "abcdef.0123456789abcdef")))
	if _, err := client.CoreV1().Secrets("kube-system").List(ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a bootstrapper lists Secrets: %v", err)
	}
	for _, token := range []string{"abcdef.0123456789abcde0", "zzzzzz.0123456789abcdef"} {
		if who, err := whoami(token); !apierrors.IsUnauthorized(err) {
			t.Errorf("%s: %+v %v", token, who, err)
		}
	}
	if err := secrets.Delete(ctx, "bootstrap-token-abcdef", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	soon(t, "a token whose Secret is gone is refused", func() bool {
		_, err := whoami("abcdef.0123456789abcdef")
		return apierrors.IsUnauthorized(err)
	})
}

func TestTokenRequestsRefused(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx := t.Context()
	for _, name := range []string{"robot", "other"} {
		must[*corev1.ServiceAccount](t)(s.Client.CoreV1().ServiceAccounts("default").Create(ctx, &corev1.ServiceAccount{ObjectMeta: roleMeta(name)}, metav1.CreateOptions{}))
	}
	p := pod("p")
	p.Spec.ServiceAccountName = "robot"
	p = createPod(t, s.Client, p, "n1")
	ofPod := func(change func(*authenticationv1.BoundObjectReference)) authenticationv1.TokenRequestSpec {
		ref := &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: "p", UID: p.UID}
		if change != nil {
			change(ref)
		}
		return authenticationv1.TokenRequestSpec{BoundObjectRef: ref, ExpirationSeconds: ptr.To[int64](3607)}
	}
	n1 := s.ClientFor(t, "system:node:n1", "system:nodes")
	n2 := s.ClientFor(t, "system:node:n2", "system:nodes")
	tokenOf(t, n1, "robot", ofPod(nil))
	for name, test := range map[string]struct {
		client  kubernetes.Interface
		account string
		spec    authenticationv1.TokenRequestSpec
		is      func(error) bool
		want    string
	}{
		"too short":             {s.Client, "robot", authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To[int64](599)}, apierrors.IsInvalid, "may not specify a duration less than 10 minutes"},
		"too long":              {s.Client, "robot", authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To[int64](1<<32 + 1)}, apierrors.IsInvalid, "larger than 2^32 seconds"},
		"no account":            {s.Client, "ghost", authenticationv1.TokenRequestSpec{}, apierrors.IsNotFound, `serviceaccounts "ghost" not found`},
		"no pod":                {s.Client, "robot", ofPod(func(r *authenticationv1.BoundObjectReference) { r.Name = "q" }), apierrors.IsNotFound, `pods "q" not found`},
		"an earlier pod":        {s.Client, "robot", ofPod(func(r *authenticationv1.BoundObjectReference) { r.UID = "1" }), apierrors.IsConflict, "does not match the UID in record"},
		"another's pod":         {s.Client, "other", ofPod(nil), apierrors.IsBadRequest, "pod running with different serviceaccount name"},
		"a strange kind":        {s.Client, "robot", ofPod(func(r *authenticationv1.BoundObjectReference) { r.Kind = "Service" }), apierrors.IsBadRequest, "cannot bind token to object of type v1/Service"},
		"node, not its pod":     {n2, "robot", ofPod(nil), apierrors.IsForbidden, "no pod bound to node n2 refers to it"},
		"node, not its account": {n1, "other", ofPod(nil), apierrors.IsForbidden, "no pod bound to node n1 refers to it"},
		"node, unbound":         {n1, "robot", authenticationv1.TokenRequestSpec{}, apierrors.IsForbidden, "node requested token not bound to a pod"},
		"node, without a uid":   {n1, "robot", ofPod(func(r *authenticationv1.BoundObjectReference) { r.UID = "" }), apierrors.IsForbidden, "node requested token with a pod binding without a uid"},
	} {
		_, err := test.client.CoreV1().ServiceAccounts("default").CreateToken(ctx, test.account, &authenticationv1.TokenRequest{Spec: test.spec}, metav1.CreateOptions{})
		if err == nil || !test.is(err) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %s", name, err, test.want)
		}
	}
	// What the request says of its account has to be true of it.
	account := must[*corev1.ServiceAccount](t)(s.Client.CoreV1().ServiceAccounts("default").Get(ctx, "robot", metav1.GetOptions{}))
	for field, test := range map[string]struct {
		about metav1.ObjectMeta
		is    func(error) bool
	}{
		"metadata.name":                      {metav1.ObjectMeta{Name: "other"}, apierrors.IsInvalid},
		"the UID in the token request (old)": {metav1.ObjectMeta{UID: "old"}, apierrors.IsConflict},
	} {
		_, err := s.Client.CoreV1().ServiceAccounts("default").CreateToken(ctx, "robot", &authenticationv1.TokenRequest{ObjectMeta: test.about}, metav1.CreateOptions{})
		if err == nil || !test.is(err) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
	must[*authenticationv1.TokenRequest](t)(s.Client.CoreV1().ServiceAccounts("default").CreateToken(ctx, "robot", &authenticationv1.TokenRequest{ObjectMeta: metav1.ObjectMeta{UID: account.UID}}, metav1.CreateOptions{}))
	// A pod's token is good for a year if it is for this server alone.
	for _, test := range []struct {
		audiences []string
		long      bool
	}{{nil, true}, {[]string{"https://kubernetes.default.svc", "vault"}, false}} {
		spec := ofPod(nil)
		spec.Audiences = test.audiences
		if left := lifetimeOf(t, tokenOf(t, s.Client, "robot", spec)); (left > 24*time.Hour) != test.long {
			t.Errorf("a token for %v is good for %v", test.audiences, left)
		}
	}

	spec := ofPod(nil)
	spec.Audiences = []string{"vault"}
	_, err := n1.CoreV1().ServiceAccounts("default").CreateToken(ctx, "robot", &authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), `audience "vault" not found in pod spec volume`) {
		t.Errorf("node, another audience: %v", err)
	}
}

// TestIssuerDiscovery: an external verifier of tokens finds the keys; a
// rotated key does not end the tokens of the one before.
func TestIssuerDiscovery(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx, admin := t.Context(), s.Listen(t)
	must[*corev1.ServiceAccount](t)(s.Client.CoreV1().ServiceAccounts("default").Create(ctx, &corev1.ServiceAccount{ObjectMeta: roleMeta("robot")}, metav1.CreateOptions{}))
	token := tokenOf(t, s.Client, "robot", authenticationv1.TokenRequestSpec{})
	read := func(path string, into any) {
		t.Helper()
		body := must[[]byte](t)(must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(bearer(admin, token))).Discovery().RESTClient().Get().AbsPath(path).DoRaw(ctx))
		if err := json.Unmarshal(body, into); err != nil {
			t.Fatalf("%s: %v: %s", path, err, body)
		}
	}
	var document struct {
		Issuer string `json:"issuer"`
		Keys   string `json:"jwks_uri"`
	}
	read("/.well-known/openid-configuration", &document)
	if document.Issuer != "https://kubernetes.default.svc" || !strings.HasSuffix(document.Keys, "/openid/v1/jwks") {
		t.Errorf("%+v", document)
	}
	var set struct {
		Keys []map[string]string `json:"keys"`
	}
	read("/openid/v1/jwks", &set)
	if len(set.Keys) != 1 || set.Keys[0]["kty"] != "EC" || set.Keys[0]["kid"] == "" || set.Keys[0]["d"] != "" {
		t.Errorf("keys: %v", set.Keys)
	}
	if made, err := s.FollowAuthority(ctx, 3, false); err != nil || !made {
		t.Fatal(made, err)
	}
	read("/openid/v1/jwks", &set) // with the token of the first key
	if len(set.Keys) != 2 {
		t.Errorf("keys after a rotation: %v", set.Keys)
	}
	if code, _, _ := raw(t, rest.AnonymousClientConfig(admin), "GET", "/openid/v1/jwks", ""); code != http.StatusUnauthorized {
		t.Errorf("strangers read the keys: %d", code)
	}
	// A node hears of keys that are gone.
	body, err := s.ClientFor(t, "system:node:n1", "system:nodes").Discovery().RESTClient().Get().AbsPath("/openid/v1/jwks").DoRaw(ctx)
	if err != nil || !strings.Contains(string(body), set.Keys[0]["kid"]) {
		t.Errorf("a node reads the keys: %v: %s", err, body)
	}
	if made, err := s.FollowAuthority(ctx, 6, true); err != nil || !made {
		t.Fatal(made, err)
	}
	soon(t, "a token of a key from before is refused", func() bool {
		code, _, _ := raw(t, bearer(admin, token), "GET", "/openid/v1/jwks", "")
		return code == http.StatusUnauthorized
	})
	if dropped, err := s.DropTokenKeys(ctx); err != nil || dropped != 2 {
		t.Errorf("%d keys were deleted, %v", dropped, err)
	}
	token = tokenOf(t, s.Client, "robot", authenticationv1.TokenRequestSpec{})
	read("/openid/v1/jwks", &set)
	if len(set.Keys) != 1 {
		t.Errorf("keys after that: %v", set.Keys)
	}
}

// TestTokenIsMounted: the combinations of what pod and account say.
func TestTokenIsMounted(t *testing.T) {
	features.Conforms(t, 171)
	s := servertest.Start(t, nil)
	for name, no := range map[string]*bool{"unset": nil, "yes": ptr.To(true), "no": ptr.To(false)} {
		must[*corev1.ServiceAccount](t)(s.Client.CoreV1().ServiceAccounts("default").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: roleMeta("sa-" + name), AutomountServiceAccountToken: no}, metav1.CreateOptions{}))
		for podName, podSays := range map[string]*bool{"unset": nil, "yes": ptr.To(true), "no": ptr.To(false)} {
			want := podSays == nil && (no == nil || *no) || podSays != nil && *podSays
			p := pod("p-" + name + "-" + podName)
			p.Spec.ServiceAccountName, p.Spec.AutomountServiceAccountToken = "sa-"+name, podSays
			p = createPod(t, s.Client, p, "")
			mounts := p.Spec.Containers[0].VolumeMounts
			got := len(mounts) == 1 && mounts[0].MountPath == "/var/run/secrets/kubernetes.io/serviceaccount" && mounts[0].ReadOnly &&
				len(p.Spec.Volumes) == 1 && strings.HasPrefix(mounts[0].Name, "kube-api-access-") && p.Spec.Volumes[0].Name == mounts[0].Name
			if got != want || !want && len(p.Spec.Volumes)+len(mounts) > 0 {
				t.Errorf("account %s, pod %s: %+v", name, podName, p.Spec)
			}
		}
	}
	own := pod("own")
	own.Spec.Volumes = []corev1.Volume{{Name: "mine", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	own.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "mine", MountPath: "/var/run/secrets/kubernetes.io/serviceaccount"}}
	if got := createPod(t, s.Client, own, "").Spec; len(got.Volumes) != 1 || len(got.Containers[0].VolumeMounts) != 1 {
		t.Errorf("a container with a mount of its own there: %+v", got)
	}
}

// lifetimeOf is how long a token is good from the time it was made.
func lifetimeOf(t *testing.T, token string) time.Duration {
	t.Helper()
	var claims struct {
		Issued  int64 `json:"iat"`
		Expires int64 `json:"exp"`
	}
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		t.Fatalf("%q is no JSON web token", token)
	}
	if err := json.Unmarshal(must[[]byte](t)(base64.RawURLEncoding.DecodeString(parts[1])), &claims); err != nil {
		t.Fatal(err)
	}
	return time.Duration(claims.Expires-claims.Issued) * time.Second
}
