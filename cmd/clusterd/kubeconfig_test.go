package main

import (
	"crypto/x509"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/rights"
)

// TestAdminKubeconfigIsShort: a copy of it is not an administrator for a year, and one
// that an earlier version wrote is replaced.
func TestAdminKubeconfigIsShort(t *testing.T) {
	now := time.Now()
	ca, err := pki.NewCA("c", now)
	if err != nil {
		t.Fatal(err)
	}
	d, trust, server := nodedir.KeyDir{Dir: nodedir.Dir(t.TempDir())}, pki.NewTrust(0, ca), "https://192.0.2.7:6443"
	notRevoked := func(*x509.Certificate) bool { return false }
	if err := writeKubeconfig(d, trust, server, "c", &rights.Rights{}); err != nil {
		t.Fatal(err)
	}
	end := func() time.Time {
		t.Helper()
		config, err := clientcmd.LoadFromFile(d.Kubeconfig())
		if err != nil {
			t.Fatal(err)
		}
		cert, err := pki.ParseCert(config.AuthInfos["admin"].ClientCertificateData)
		if err != nil {
			t.Fatal(err)
		}
		return cert.NotAfter
	}
	if left := end().Sub(now); left > 31*24*time.Hour || left < 29*24*time.Hour || !kubeconfigGood(d.Kubeconfig(), trust, server, now, notRevoked) {
		t.Errorf("it is good for %s", left)
	}
	if kubeconfigGood(d.Kubeconfig(), trust, server, now.Add(23*24*time.Hour), notRevoked) {
		t.Error("it is not written anew in time")
	}
	config, err := clientcmd.LoadFromFile(d.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	old, err := ca.IssueClient(key.Public(), adminUser, []string{pki.AdminsGroup}, 365*24*time.Hour, now)
	if err != nil {
		t.Fatal(err)
	}
	config.AuthInfos["admin"].ClientCertificateData = pki.EncodeCert(old)
	if err := clientcmd.WriteToFile(*config, d.Kubeconfig()); err != nil {
		t.Fatal(err)
	}
	if kubeconfigGood(d.Kubeconfig(), trust, server, now, notRevoked) {
		t.Error("one of a year is kept")
	}
}

// Whoever typed `sudo clusterd dev` can use what it prints: the kubeconfig that it
// names is theirs and lies outside of the directory of root.
func TestKubeconfigOfWhoTypedSudo(t *testing.T) {
	d := nodedir.KeyDir{Dir: nodedir.Dir(filepath.Join(t.TempDir(), "dev"))}
	if err := os.Mkdir(string(d.Dir), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.Kubeconfig(), []byte("kubeconfig"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SUDO_UID", "")
	if path, err := leaveKubeconfig(d); err != nil || path != d.Kubeconfig() {
		t.Errorf("without sudo: %s, %v", path, err)
	}
	if os.Geteuid() != 0 {
		t.Skip("only root gives files away")
	}
	t.Setenv("SUDO_UID", "4711")
	t.Setenv("SUDO_GID", "4712")
	path, err := leaveKubeconfig(d)
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if owner := st.Sys().(*syscall.Stat_t); owner.Uid != 4711 || st.Mode() != 0o600 || strings.HasPrefix(path, string(d.Dir)+"/") {
		t.Errorf("%s: %s of %d", path, st.Mode(), owner.Uid)
	}
	if err := removeRegular(path); err != nil { // as reset does
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", path, err)
	}
}

// A node that was prepared comes back after a reboot: the unit is enabled, not started alone.
func TestStartCommand(t *testing.T) {
	for data, want := range map[string]string{
		DefaultData: "`systemctl enable --now clusterd` (now and at each boot) or `clusterd run`",
		"/data":     "`clusterd run --data /data`", // of which the unit knows nothing
	} {
		if got := startCommand(data); got != want {
			t.Errorf("%s: %s", data, got)
		}
	}
}

// What init prints works without a KUBECONFIG, which the user could not read.
func TestLookCommand(t *testing.T) {
	for data, want := range map[string]string{
		DefaultData + "/": "sudo clusterctl get nodes",
		"/data":           "sudo clusterctl --kubeconfig /data/admin.kubeconfig get nodes",
	} {
		if got := lookCommand(data); got != want {
			t.Errorf("%s: %s", data, got)
		}
	}
}
