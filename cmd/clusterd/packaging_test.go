package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/cmd/docstest"
)

// TestPackagedDocs: the links of what the package installs lead to what it installs,
// and the rules and dashboards that docs/monitoring.md speaks of are there.
func TestPackagedDocs(t *testing.T) {
	dir := t.TempDir()
	if out, err := exec.Command("../../packaging/docs.sh", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	checkLinks(t, dir)
	for _, name := range []string{"packaging/monitoring/rules.yaml", "packaging/monitoring/grafana.json", "examples/hello.yaml", "docs/install.md", "LICENSE"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
}

// TestPackageSpeaks: after the first installation the package says what to type, and
// what it says are commands of this program.
func TestPackageSpeaks(t *testing.T) {
	b, err := os.ReadFile("../../packaging/postinst")
	if err != nil {
		t.Fatal(err)
	}
	page := filepath.Join(t.TempDir(), "postinst.md")
	if err := os.WriteFile(page, []byte("```\n"+string(b)+"```\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	said := map[string]bool{}
	for _, s := range docstest.Commands(t, []string{page}, "clusterd") {
		if len(s.Args) < 2 || s.Args[1] == "is" {
			continue // a sentence
		}
		if err := docstest.Resolve(rootCommand(), s.Args); err != nil && s.Args[1] != "doctor" { // which a sentence goes on from
			t.Errorf("%s: %v", s, err)
		}
		said[s.Args[1]] = true
	}
	for _, command := range []string{"init", "join", "doctor"} {
		if !said[command] {
			t.Errorf("it does not say: clusterd %s", command)
		}
	}
	if !strings.Contains(string(b), "systemctl enable --now clusterd") || !strings.Contains(string(b), "/var/lib/clusterd/pki/node.crt") {
		t.Error("it does not enable the service, or speaks to machines that are nodes already, too")
	}
	unit, err := os.ReadFile("../../packaging/clusterd.service")
	if err != nil || !strings.Contains(string(unit), "\nEnvironmentFile=-/etc/default/clusterd\n") {
		t.Errorf("the unit reads no /etc/default/clusterd: %v", err)
	}
}

// TestShallowClone: a package of a shallow clone would order below those that are
// installed; it is refused before anything is built.
func TestShallowClone(t *testing.T) {
	origin, clone := filepath.Join(t.TempDir(), "origin"), filepath.Join(t.TempDir(), "clone")
	git := func(args ...string) {
		t.Helper()
		cmd := exec.Command("git", append([]string{"-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"}, args...)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %q: %v\n%s", args, err, out)
		}
	}
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip(err)
	}
	git("init", "-q", origin)
	for range 2 {
		git("-C", origin, "commit", "-q", "--allow-empty", "-m", "x")
	}
	git("clone", "-q", "--depth", "1", "file://"+origin, clone)
	b, err := os.ReadFile("../../packaging/build.sh")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(clone, "packaging"), 0o755); err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(clone, "packaging", "build.sh")
	if err := os.WriteFile(script, b, 0o755); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(script).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "git fetch --unshallow") {
		t.Errorf("%v: %s", err, out)
	}
}
