package kubectl

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/clusterd/clusterd/features"
)

// kubeconfig writes one with a context, cluster and user of the given name.
func (k *kit) kubeconfig(file, name, server string, user clientcmdapi.AuthInfo) string {
	k.Helper()
	path := filepath.Join(k.dir, file)
	if err := clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{name: {Server: server, CertificateAuthorityData: k.config.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{name: &user},
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: name, AuthInfo: name}},
		CurrentContext: name,
	}, path); err != nil {
		k.Fatal(err)
	}
	return path
}

// with runs kubectl with further environment; it must succeed.
func (k *kit) with(env []string, args ...string) string {
	k.Helper()
	ctx, cancel := context.WithTimeout(k.Context(), testTimeout)
	defer cancel()
	cmd := k.command(ctx, args...)
	cmd.Env = append(cmd.Env, env...)
	out, errs, code := k.finish(cmd, "")
	if code != 0 {
		k.Fatalf("kubectl %s: exit %d: %s%s", strings.Join(args, " "), code, out, errs)
	}
	return out
}

func TestE2EXConfig(t *testing.T) {
	t.Parallel()
	k := start(t, "config")
	admin := clientcmdapi.AuthInfo{ClientCertificateData: k.config.CertData, ClientKeyData: k.config.KeyData}
	a := k.kubeconfig("a.conf", "a", "https://a.invalid", admin)
	b := k.kubeconfig("b.conf", "b", "https://b.invalid", admin)
	view := []string{"config", "view"}

	k.sub("which file", func(k *kit) {
		features.Shows(k, 25, 26, 27)
		out := k.with([]string{"KUBECONFIG=" + b}, "config", "view", "--kubeconfig", a)
		k.has(out, "a.invalid")
		k.lacks(out, "b.invalid")
		k.has(k.with([]string{"KUBECONFIG=" + a + ":" + b}, view...), "a.invalid", "b.invalid", "current-context: a")
		home := filepath.Join(k.dir, "home")
		if err := os.MkdirAll(filepath.Join(home, ".kube"), 0o700); err != nil {
			k.Fatal(err)
		}
		text, err := os.ReadFile(b)
		if err != nil {
			k.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(home, ".kube", "config"), text, 0o600); err != nil {
			k.Fatal(err)
		}
		k.has(k.with([]string{"KUBECONFIG=", "HOME=" + home}, view...), "b.invalid")
	})
	k.sub("which cluster", func(k *kit) {
		features.Shows(k, 28)
		real := k.kubeconfig("real.conf", "real", k.config.Host, admin)
		env := []string{"KUBECONFIG=" + a + ":" + real}
		k.with(env, "config", "use-context", "real")
		k.has(k.with(env, "get", "nodes"), node)
		k.with(env, "config", "use-context", "a")
		ctx, cancel := context.WithTimeout(k.Context(), testTimeout)
		defer cancel()
		cmd := k.command(ctx, "get", "nodes", "--request-timeout=5s")
		cmd.Env = append(cmd.Env, env...)
		if _, errs, code := k.finish(cmd, ""); code == 0 || !strings.Contains(errs, "a.invalid") {
			k.Errorf("exit %d: %s", code, errs)
		}
		k.has(k.with(env, "get", "nodes", "--context=real"), node)
	})
	k.sub("flags win", func(k *kit) {
		features.Shows(k, 29)
		var seen string
		srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			seen = r.Header.Get("Authorization") + " as " + r.Header.Get("Impersonate-User")
			_, _ = w.Write([]byte("{}"))
		}))
		defer srv.Close()
		ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
		raw := []string{"get", "--raw", "/x", "--server", srv.URL, "--certificate-authority", k.file("srv.pem", string(ca)),
			"--kubeconfig", k.kubeconfig("token.conf", "t", "https://a.invalid", clientcmdapi.AuthInfo{Token: "of-the-file"})}
		k.with(nil, raw...)
		k.is("seen", seen, "Bearer of-the-file as ")
		k.with(nil, append(raw, "--token=of-the-flag", "--as=somebody")...)
		k.is("seen", seen, "Bearer of-the-flag as somebody")
	})
}

// selfSigned is a client certificate of an authority nobody knows.
func (k *kit) selfSigned(name string, groups ...string) tls.Certificate {
	k.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		k.Fatal(err)
	}
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name, Organization: groups},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		k.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func TestE2EXIdentity(t *testing.T) {
	t.Parallel()
	k := start(t, "identity")
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(k.config.CAData)
	stranger := func(certs ...tls.Certificate) *http.Client {
		return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: certs}}}
	}
	const pods = "/api/v1/pods"
	k.sub("certificate", func(k *kit) {
		features.Shows(k, 30)
		k.has(k.ok("auth", "whoami"), "admin", "system:masters", "system:authenticated")
	})
	k.sub("nobody gets in", func(k *kit) {
		features.Shows(k, 32, 50, 53)
		for what, header := range map[string]string{
			"nothing": "", "a token": "Bearer nonsense",
			"a password": "Basic " + base64.StdEncoding.EncodeToString([]byte("admin:admin")),
		} {
			code, body := k.send(stranger(), "GET", pods, "", "Authorization", header)
			if code != 401 {
				k.Errorf("with %s: %d", what, code)
			}
			k.has(body, `"kind":"Status"`, `"reason":"Unauthorized"`)
		}
		code, body := k.send(stranger(k.selfSigned("admin", "system:masters")), "GET", pods, "")
		if code != 401 {
			k.Errorf("with another authority's certificate: %d %s", code, body)
		}
	})
	k.sub("certificate and nonsense", func(k *kit) {
		features.Shows(k, 49)
		if code, body := k.ask("GET", pods, "", "Authorization", "Bearer nonsense"); code != 200 && code != 401 {
			k.Errorf("%d: %s", code, body)
		}
		if code, _ := k.ask("GET", pods, ""); code != 200 {
			k.Errorf("afterwards: %d", code)
		}
	})
	k.sub("may not", func(k *kit) {
		out := k.fails("get", "pods", "--as=jane")
		k.has(out, "Forbidden", `User "jane" cannot list resource "pods"`, `namespace "`+k.ns+`"`)
		k.is("can-i", k.can("jane", "list", "pods"), "no")
		k.is("can-i", k.can("", "list", "pods"), "yes")
	})
	k.sub("checked before it is stored", func(k *kit) {
		features.Shows(k, 61)
		path := "/api/v1/namespaces/" + k.ns + "/pods"
		good := `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"never"},"spec":{"containers":[{"name":"c","image":"i"}]}}`
		if code, body := k.ask("POST", path, good, "Impersonate-User", "jane"); code != 403 {
			k.Errorf("jane: %d %s", code, body)
		}
		if code, body := k.ask("POST", path, strings.Replace(good, `"name":"c"`, `"name":"C_"`, 1)); code != 422 {
			k.Errorf("invalid: %d %s", code, body)
		}
		if code, _ := k.ask("GET", path+"/never", ""); code != 404 {
			k.Errorf("it was stored: %d", code)
		}
	})
	k.sub("what a node may", func(k *kit) {
		features.Shows(k, 60)
		for _, name := range []string{"mine", "other"} {
			k.ok("create", "secret", "generic", name, "--from-literal=a=b")
			k.ok("create", "configmap", name)
		}
		k.apply(simple("uses", "sleep", "nodeName: "+node, "volumes:", "- {name: s, secret: {secretName: mine}}", "- {name: c, configMap: {name: mine}}"))
		k.apply("apiVersion: v1\nkind: Node\nmetadata: {name: ghost}\nspec: {unschedulable: true}\n")
		k.Cleanup(func() { k.ok("delete", "node", "ghost") })
		me := []string{"--as=system:node:" + node, "--as-group=system:nodes"}
		as := func(args ...string) []string { return append(slices.Clone(me), args...) }
		k.eventually("the node may read the pod's", func(context.Context) error {
			_, errs, code := k.in("", as("get", "secret/mine", "configmap/mine")...)
			return complaint(code, errs)
		})
		for _, args := range [][]string{
			{"get", "secret", "other"}, {"get", "configmap", "other"}, {"get", "secrets"},
			{"label", "node", "ghost", "a=b"}, {"create", "configmap", "x"}, {"get", "pods", "-A"},
		} {
			k.has(k.fails(as(args...)...), "orbidden")
		}
		k.ok(as("label", "node", node, "example.com/mine=yes")...)
		k.ok("label", "node", node, "example.com/mine-")
	})
	k.sub("the agent's own certificate", func(k *kit) {
		features.Shows(k, 133)
		pki := filepath.Join(k.c.Nodes()[0].Data, "pki")
		config := &rest.Config{Host: k.config.Host, TLSClientConfig: rest.TLSClientConfig{
			CAData: k.config.CAData, CertFile: filepath.Join(pki, "node.crt"), KeyFile: filepath.Join(pki, "node.key")}}
		client, err := rest.HTTPClientFor(config)
		if err != nil {
			k.Fatal(err)
		}
		code, body := k.send(client, "POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", `{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`)
		if code != 201 {
			k.Errorf("%d: %s", code, body)
		}
		k.has(body, `"username":"system:node:`+node+`"`, `"system:nodes"`)
	})
}

// can asks whether a user may; "" is the administrator.
func (k *kit) can(user string, what ...string) string {
	k.Helper()
	args := append([]string{"auth", "can-i"}, what...)
	if user != "" {
		args = append(args, "--as="+user)
	}
	out, _, _ := k.in("", args...)
	return strings.TrimSpace(out)
}
