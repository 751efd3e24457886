package kubectl

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// clusterctl runs it as the administrator.
func (k *kit) clusterctl(args ...string) (stdout, stderr string, code int) {
	k.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, k.c.Bin("clusterctl"), args...)
	cmd.Dir = k.dir
	cmd.Env = append(os.Environ(), "KUBECONFIG="+k.c.Nodes()[0].Kubeconfig(), "HOME="+shared.Dir)
	return k.finish(cmd, "")
}

// people get certificates: by one command, and by hand.
func people(k *kit) {
	file := filepath.Join(k.dir, "pat.kubeconfig")
	out, said, code := k.clusterctl("user", "add", "pat", "--group", "guild", "--for", "1h", "--out", file)
	if code != 0 || out != "" {
		k.Fatalf("user add: %d %s%s", code, out, said)
	}
	k.has(said, file+": user pat, good until", "auth can-i --list")
	info, err := os.Stat(file)
	k.must(err)
	k.is("mode of the kubeconfig", info.Mode().String(), "-rw-------")
	asPat := func(args ...string) (string, int) {
		out, said, code := k.in("", append([]string{"--kubeconfig", file}, args...)...)
		return out + said, code
	}
	who, _ := asPat("auth", "whoami", "-o", "jsonpath={.status.userInfo.username} {.status.userInfo.groups}")
	k.has(who, "pat ", `"guild"`, `"system:authenticated"`)
	if text, code := asPat("get", "pods"); code == 0 || !strings.Contains(text, `User "pat" cannot list resource "pods"`) {
		k.Errorf("without a role: %d %s", code, text)
	}
	k.ok("create", "rolebinding", "guild", "--clusterrole=view", "--group=guild")
	k.eventually("the group's role counts", func(context.Context) error {
		if text, code := asPat("get", "pods"); code != 0 {
			return fmt.Errorf("%s", text)
		}
		return nil
	})
	if text, code := asPat("get", "secrets"); code == 0 {
		k.Errorf("view reads secrets: %s", text)
	}
	if text, code := asPat("create", "rolebinding", "up", "--clusterrole=cluster-admin", "--user=pat"); code == 0 {
		k.Errorf("view binds roles: %s", text)
	}
	k.is("what is left of the request", strings.TrimSpace(k.ok("get", "csr", "-o", "name")), "")

	// Nothing is overwritten or left behind, and nobody becomes more than a user.
	_, said, code = k.clusterctl("user", "add", "pat", "--out", file)
	if code != 1 || !strings.Contains(said, file+" exists") {
		k.Errorf("over an existing file: %d %s", code, said)
	}
	for _, args := range [][]string{{"root", "--group", "system:masters"}, {"system:node:n1"}, {"x", "--for", "1m"}, {"a/b"}} {
		_, said, code := k.clusterctl(append([]string{"user", "add"}, args...)...)
		if code != 1 || strings.Count(strings.TrimSpace(said), "\n") > 0 {
			k.Errorf("user add %v: %d %s", args, code, said)
		}
	}
	_, said, code = k.clusterctl("--kubeconfig", file, "user", "add", "friend", "--out", filepath.Join(k.dir, "friend.kubeconfig"))
	if code != 1 || !strings.Contains(said, `User "pat" cannot create resource "certificatesigningrequests"`) {
		k.Errorf("by somebody without the right: %d %s", code, said)
	}
	if _, err := os.Stat(filepath.Join(k.dir, "friend.kubeconfig")); err == nil {
		k.Errorf("a kubeconfig was left behind")
	}

	// By hand, with kubectl.
	k.apply(signingRequest(k, "kim", "client auth"))
	k.has(k.ok("get", "csr", "kim"), "kubernetes.io/kube-apiserver-client", "Pending")
	k.has(k.ok("certificate", "approve", "kim"), "kim approved")
	k.eventually("a certificate", func(context.Context) error {
		if out := k.ok("get", "csr", "kim"); !strings.Contains(out, "Approved,Issued") {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	text, err := base64.StdEncoding.DecodeString(k.ok("get", "csr", "kim", "-o", "jsonpath={.status.certificate}"))
	k.must(err)
	block, _ := pem.Decode(text)
	if block == nil {
		k.Fatalf("certificate %q", text)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	k.must(err)
	k.is("the certificate's subject", cert.Subject.String(), "CN=kim")
	k.apply(signingRequest(k, "lou", "client auth"))
	k.has(k.ok("certificate", "deny", "lou"), "lou denied")
	k.has(k.ok("get", "csr", "lou"), "Denied")
	k.has(k.ok("describe", "csr", "lou"), "Denied", "Common Name:    lou")
	k.apply(signingRequest(k, "max", "server auth"))
	k.ok("certificate", "approve", "max")
	k.eventually("a refusal to sign", func(context.Context) error {
		if out := k.ok("get", "csr", "max"); !strings.Contains(out, "Approved,Failed") {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	k.ok("delete", "csr", "kim", "lou", "max")
}

// signingRequest is a manifest that asks for a certificate of the API's signer.
func signingRequest(k *kit, name, usage string) string {
	k.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	k.must(err)
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: name}}, key)
	k.must(err)
	request := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	return fmt.Sprintf(`apiVersion: certificates.k8s.io/v1
kind: CertificateSigningRequest
metadata: {name: %s}
spec:
  signerName: kubernetes.io/kube-apiserver-client
  request: %s
  usages: [%s]
`, name, base64.StdEncoding.EncodeToString(request), usage)
}
