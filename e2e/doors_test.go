package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/features"
)

// TestE2EDoors is a server and an agent on a machine on which others have
// containers too: who gets in by a token, what is passed on to the APIs and
// webhooks of others, which parts there are, and what stands still when the API
// does. One container's end is never reported to the agent.
func TestE2EDoors(t *testing.T) {
	need(t)
	foreign := startForeign(t)
	standInForNFS(t)
	dir := t.TempDir()
	policy, authn := filepath.Join(dir, "audit.yaml"), filepath.Join(dir, "authentication.yaml")
	if err := os.WriteFile(policy, []byte("apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	e := startBare(t, 1, func(c *cluster.Config) {
		c.Agents = 1
		c.Args = []string{"--audit-policy-file", policy}
	})
	e.ready(2)
	n1, a1 := e.Nodes()[0], e.Nodes()[1]
	ns := e.namespace("doors")
	out := newOutside(t, "gates."+ns+".svc", "metrics."+ns+".svc", "localhost")
	provider := out.newIssuer(e, "n1")
	config := fmt.Sprintf("apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\njwt:\n"+
		"- issuer: {url: %q, audiences: [doors], certificateAuthority: %q}\n"+
		"  claimMappings: {username: {claim: sub, prefix: 'oidc:'}, groups: {claim: teams, prefix: 'team:'}}\n", provider.url, out.ca)
	if err := os.WriteFile(authn, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}

	line := e.standBetween(a1)
	lost := e.losesEnd(line, a1, ns, "victim") // what that comes to is looked at last

	// The server goes and comes back with the issuer: all watches are dropped.
	t.Run("a dropped watch", func(t *testing.T) {
		features.Shows(t, 108)
		e.showDroppedWatch(t, ns, n1, func() {
			e.reconfigure(n1, func(config string) string { return config + "authenticationConfig: " + authn + "\n" })
		})
	})
	t.Run("decisions read no store", func(t *testing.T) {
		features.Shows(t, 108)
		e.showInformers(t, ns, n1)
	})
	t.Run("tokens of an issuer", func(t *testing.T) {
		features.Shows(t, 33)
		e.showIssuer(t, ns, provider)
	})
	token := provider.token(t, provider.key, nil)
	t.Run("the API of another", func(t *testing.T) {
		features.Shows(t, 43)
		e.showAggregation(t, ns, out, n1)
	})
	t.Run("tokens are not passed on", func(t *testing.T) {
		features.Shows(t, 54)
		e.showTokensStay(t, ns, out, token, n1)
	})
	t.Run("metrics of another", func(t *testing.T) { e.showCustomMetrics(t, ns, out, n1) })
	t.Run("the parts of a node", func(t *testing.T) {
		features.Shows(t, 47)
		e.showParts(t, ns)
	})
	t.Run("a dead NFS server", func(t *testing.T) {
		features.Shows(t, 249)
		e.showDeadNFS(t, ns)
	})
	t.Run("the one door", func(t *testing.T) {
		features.Shows(t, 46)
		e.showOneDoor(t, ns)
	})
	t.Run("an end without an event", func(t *testing.T) {
		features.Shows(t, 189)
		e.showResync(t, line, ns, "victim", lost)
	})
	t.Run("containers of others", func(t *testing.T) {
		foreign.show(t, e)
	})
}

// showIssuer asks with tokens of an issuer, good ones and others.
func (e *env) showIssuer(t *testing.T, ns string, provider *issuer) {
	good := provider.token(t, provider.key, nil)
	who := func(token string) (*authenticationv1.UserInfo, error) {
		review, err := e.holder(token).AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		if err != nil {
			return nil, err
		}
		return &review.Status.UserInfo, nil
	}
	e.eventually("a token is accepted", func(context.Context) error { // the issuer's keys are fetched
		_, err := who(good)
		return err
	})
	user, err := who(good)
	if err != nil {
		t.Fatal(err)
	}
	if user.Username != "oidc:ann" || !slices.Equal(user.Groups, []string{"team:smiths", "team:bakers", "system:authenticated"}) {
		t.Errorf("%+v", user)
	}
	// The group is what a role is bound to.
	if _, err := e.holder(good).CoreV1().ConfigMaps(ns).List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), `"oidc:ann"`) {
		t.Errorf("without a role: %v", err)
	}
	e.ctl("-n", ns, "create", "rolebinding", "smiths", "--clusterrole=edit", "--group=team:smiths")
	e.eventually("the group's role counts", func(ctx context.Context) error {
		_, err := e.holder(good).CoreV1().ConfigMaps(ns).List(ctx, metav1.ListOptions{})
		return err
	})
	for _, prog := range kubectls() {
		got, errs, code := e.run(prog, "", e.asHolder(good, "auth", "whoami", "-o", "jsonpath={.status.userInfo.username}")...)
		if code != 0 || got != "oidc:ann" {
			t.Errorf("%s auth whoami: %d %s%s", prog, code, got, errs)
		}
	}
	stranger := provider.token(t, provider.key, map[string]any{"sub": "bob", "teams": []string{"bakers"}})
	if _, err := e.holder(stranger).CoreV1().ConfigMaps(ns).List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), `"oidc:bob"`) {
		t.Errorf("of another group: %v", err)
	}
	for what, token := range map[string]string{
		"another audience": provider.token(t, provider.key, map[string]any{"aud": "windows"}),
		"an expired one":   provider.token(t, provider.key, map[string]any{"exp": 1}),
		"another issuer":   provider.token(t, provider.key, map[string]any{"iss": "https://127.0.0.1:1"}),
		"another key":      provider.token(t, newKey(t), nil),
		"without a user":   provider.token(t, provider.key, map[string]any{"sub": nil}),
		"no token":         "doors",
	} {
		if user, err := who(token); !apierrors.IsUnauthorized(err) {
			t.Errorf("%s: %+v, %v", what, user, err)
		}
	}
}

// holder is a client that has a token and nothing else.
func (e *env) holder(token string) kubernetes.Interface {
	e.t.Helper()
	client, err := kubernetes.NewForConfig(e.holderConfig(token))
	if err != nil {
		e.t.Fatal(err)
	}
	return client
}

func (e *env) holderConfig(token string) *rest.Config {
	return &rest.Config{Host: e.config.Host, TLSClientConfig: rest.TLSClientConfig{CAData: e.config.CAData}, BearerToken: token, QPS: -1}
}

// asHolder are the arguments of a command that shows a token and no certificate.
func (e *env) asHolder(token string, args ...string) []string {
	e.t.Helper()
	ca := filepath.Join(e.t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, e.config.CAData, 0o600); err != nil {
		e.t.Fatal(err)
	}
	return append([]string{"--kubeconfig", os.DevNull, "--server", e.config.Host, "--certificate-authority", ca, "--token", token}, args...)
}

// showAggregation registers an API that is served at an endpoint of a Service.
func (e *env) showAggregation(t *testing.T, ns string, out *outside, n cluster.Node) {
	port := out.serve(e, n.Name, n.Addr, gates())
	ca, err := json.Marshal([]byte(out.ca))
	if err != nil {
		t.Fatal(err)
	}
	e.ctlIn(serviceOf("gates", ns, n, port)+fmt.Sprintf(`---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1.doors.example.com}
spec:
  group: doors.example.com
  version: v1
  groupPriorityMinimum: 1000
  versionPriority: 10
  service: {name: gates, namespace: %s}
  caBundle: %s
`, ns, ca), "apply", "-f", "-")
	e.apiAvailable("v1.doors.example.com")
	for _, prog := range kubectls() {
		e.eventually("it is listed", func(context.Context) error {
			list, errs, code := e.run(prog, "", "api-resources", "--api-group=doors.example.com", "--no-headers")
			if f := strings.Fields(list); code != 0 || !slices.Equal(f, []string{"gates", "doors.example.com/v1", "false", "Gate"}) {
				return fmt.Errorf("%s: exit %d: %s%s", prog, code, list, errs)
			}
			return nil
		})
		e.eventually(prog+" gets them", func(context.Context) error { // the API may be unavailable for a moment
			if got, errs, code := e.run(prog, "", "get", "gates", "-o", "name"); code != 0 || strings.TrimSpace(got) != "gate.doors.example.com/north" {
				return fmt.Errorf("get gates: %d %s%s", code, got, errs)
			}
			if got, errs, code := e.run(prog, "", "get", "gate", "north", "-o", "jsonpath={.kind} {.apiVersion}"); code != 0 || got != "Gate doors.example.com/v1" {
				return fmt.Errorf("get gate: %d %s%s", code, got, errs)
			}
			return nil
		})
	}
	if asked := out.requests("/apis/doors.example.com/v1/gates"); len(asked) == 0 {
		t.Error("it was asked for nothing")
	}
}

// serviceOf is a Service in front of a port of a node, which no pod serves.
func serviceOf(name, ns string, n cluster.Node, port uint16) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Service
metadata: {name: %[1]s, namespace: %[2]s}
spec: {ports: [{port: 443, targetPort: %[3]d}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s-1, namespace: %[2]s, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
endpoints: [{addresses: [%[4]s], conditions: {ready: true}}]
ports: [{name: "", port: %[3]d, protocol: TCP}]
`, name, ns, port, n.Addr)
}

// apiAvailable waits until an aggregated API is.
func (e *env) apiAvailable(name string) {
	e.t.Helper()
	e.eventually("the API "+name+" is available", func(context.Context) error {
		if got := e.ctl("get", "apiservice", name, "-o", `jsonpath={.status.conditions[?(@.type=="Available")].status}`); got != "True" {
			return errors.New(e.ctl("get", "apiservice", name, "-o", "jsonpath={.status.conditions}"))
		}
		return nil
	})
}

// showTokensStay sends a token to the API, to an API behind it, and by what a
// webhook is asked about, and looks who has seen it.
func (e *env) showTokensStay(t *testing.T, ns string, out *outside, token string, n cluster.Node) {
	e.ctl("create", "clusterrole", "gatekeeper", "--verb=get,list", "--resource=gates.doors.example.com")
	e.ctl("create", "clusterrolebinding", "gatekeeper", "--clusterrole=gatekeeper", "--group=team:smiths")
	hooks := http.NewServeMux()
	hooks.HandleFunc("/admits", admits)
	port := out.serve(e, n.Name, netip.MustParseAddr("127.0.0.1"), hooks)
	ca, err := json.Marshal([]byte(out.ca))
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"Mutating", "Validating"} {
		e.ctlIn(fmt.Sprintf(`apiVersion: admissionregistration.k8s.io/v1
kind: %[1]sWebhookConfiguration
metadata: {name: doors}
webhooks:
- name: doors.example.com
  clientConfig: {url: "https://127.0.0.1:%[2]d/admits/%[1]s", caBundle: %[3]s}
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
  namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: %[4]s}}
  sideEffects: None
  admissionReviewVersions: [v1]
`, kind, port, ca, ns), "apply", "-f", "-")
		hooks.HandleFunc("/admits/"+kind, admits)
	}
	defer e.ctl("delete", "mutatingwebhookconfiguration/doors", "validatingwebhookconfiguration/doors")
	e.eventually("a webhook of each kind is asked", func(ctx context.Context) error {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "asked-"}}
		if _, err := e.holder(token).CoreV1().ConfigMaps(ns).Create(ctx, cm, metav1.CreateOptions{}); err != nil {
			return err
		}
		for _, kind := range []string{"Mutating", "Validating"} {
			if len(out.requests("/admits/"+kind)) == 0 {
				return errors.New(kind + " was not")
			}
		}
		return nil
	})
	// A user who claims to be another keeps his own identity.
	client, err := rest.HTTPClientFor(e.holderConfig(token))
	if err != nil {
		t.Fatal(err)
	}
	const path = "/apis/doors.example.com/v1/gates/north"
	e.eventually("the API of another answers", func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, e.config.Host+path, nil)
		if err != nil {
			return err
		}
		req.Header.Set("X-Remote-User", "root")
		req.Header.Set("X-Remote-Group", "system:masters")
		code, text, err := askOnce(client, req)
		if err != nil {
			return err
		}
		if code != http.StatusOK || !strings.Contains(text, `"north"`) {
			return fmt.Errorf("%d %s", code, text)
		}
		return nil
	})

	asked := slices.DeleteFunc(out.requests(path), func(r sentRequest) bool { return r.header.Get("X-Remote-User") != "oidc:ann" })
	if len(asked) == 0 {
		t.Fatal("the aggregated API did not receive the user")
	}
	for _, r := range asked {
		if groups := r.header.Values("X-Remote-Group"); !slices.Contains(groups, "team:smiths") || slices.Contains(groups, "system:masters") || r.client != "clusterd:front-proxy" {
			t.Errorf("groups %q by %q", groups, r.client)
		}
	}
	for _, kind := range []string{"Mutating", "Validating"} {
		if r := out.requests("/admits/" + kind)[0]; !r.has(`"username":"oidc:ann"`) {
			t.Errorf("the webhook was asked: %s", r.body)
		}
	}
	secret := token[strings.LastIndex(token, ".")+1:] // the signature: without it a token is none
	for _, r := range out.requests("/") {
		if r.header.Get("Authorization") != "" || r.has(token) || r.has(secret) {
			t.Errorf("%s was sent the token: %v", r.path, r.header)
		}
	}

	for what, is := range map[string]func(auditEvent) bool{
		"the aggregated API": func(ev auditEvent) bool { return ev.Verb == "get" && ev.ObjectRef.Resource == "gates" },
		"the ConfigMap": func(ev auditEvent) bool {
			return ev.Verb == "create" && ev.ObjectRef.Resource == "configmaps" && ev.ObjectRef.Namespace == ns
		},
	} {
		e.eventually("audit shows the user for "+what, func(context.Context) error {
			events, _ := e.audit(n)
			if !slices.ContainsFunc(events, func(ev auditEvent) bool {
				return is(ev) && ev.User.Username == "oidc:ann" && slices.Contains(ev.User.Groups, "team:smiths")
			}) {
				return errors.New("it does not")
			}
			return nil
		})
	}
	if _, text := e.audit(n); strings.Contains(text, secret) {
		t.Error("the token is in the audit log")
	}
}
