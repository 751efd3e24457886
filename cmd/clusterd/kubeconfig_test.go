package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Whoever typed `sudo clusterd dev` can use what it prints: the kubeconfig that it
// names is theirs and lies outside of the folder of root.
func TestKubeconfigOfWhoTypedSudo(t *testing.T) {
	d := keyDir{dataDir: dataDir(filepath.Join(t.TempDir(), "dev"))}
	if err := os.Mkdir(string(d.dataDir), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.kubeconfig(), []byte("kubeconfig"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SUDO_UID", "")
	if path, err := leaveKubeconfig(d); err != nil || path != d.kubeconfig() {
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
	if owner := st.Sys().(*syscall.Stat_t); owner.Uid != 4711 || st.Mode() != 0o600 || strings.HasPrefix(path, string(d.dataDir)+"/") {
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
