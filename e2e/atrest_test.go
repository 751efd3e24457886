package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/cmd/clusterd/atrest/kmstest"
	"github.com/clusterd/clusterd/e2e/cluster"
)

// Texts that are looked for in files: of a Secret, which the cluster's own keys seal, of
// a ConfigMap and of an object of a custom kind, which an EncryptionConfiguration seals,
// and of an annotation that nothing seals, to show that the search finds what is there.
var hidden = map[string]string{
	"the Secret": "marker-sealed-secret-5c1f", "the ConfigMap": "marker-sealed-configmap-83ab", "the custom object": "marker-sealed-oven-27d0",
}

const plainMarker = "marker-in-clear-on-purpose-9e44"

// TestE2EEncryptionConfiguration: a cluster seals ConfigMaps and a custom kind by the file of
// --encryption-provider-config, and Secrets as ever. Its keys are changed while it runs, to one
// of a KMS plugin in the end; what was sealed before is sealed again, and the former keys can go.
// A server without the file says what is wrong. After restarts and from a snapshot everything
// is read, and no file on a disk holds a text of what is sealed.
func TestE2EEncryptionConfiguration(t *testing.T) {
	need(t)
	if os.Getenv("CLUSTERD_KEYS") == "" {
		t.Skip("takes minutes: make keys-test")
	}
	file := filepath.Join(t.TempDir(), "encryption.yaml")
	write := func(providers ...string) {
		t.Helper()
		content := "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n- resources: [configmaps, ovens.kitchen.example.com]\n  providers:\n"
		for _, p := range providers {
			content += "  - " + p + "\n"
		}
		if err := os.WriteFile(file+".new", []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	aes := func(names ...string) string {
		var keys []string
		for _, name := range names {
			keys = append(keys, fmt.Sprintf("{name: %s, secret: %s}", name, base64.StdEncoding.EncodeToString(bytes.Repeat([]byte(name[len(name)-1:]), 32))))
		}
		return "aesgcm: {keys: [" + strings.Join(keys, ", ") + "]}"
	}
	plugin := kmstest.Start(t, "kms-key-1")
	kms := fmt.Sprintf("kms: {apiVersion: v2, name: vault, endpoint: %q, timeout: 5s}", plugin.Endpoint())

	write(aes("key1"))
	e := startBare(t, 2, func(c *cluster.Config) { c.Args = []string{"--encryption-provider-config", file} })
	e.ready(2)
	ns := e.namespace("sealed")
	e.ctlIn(`{"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "ovens.kitchen.example.com"}, "spec": {"group": "kitchen.example.com", "scope": "Namespaced",
 "names": {"plural": "ovens", "kind": "Oven"}, "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}]}}`, "create", "-f", "-")
	e.eventually("the custom kind is served", func(context.Context) error { // wait knows no status that is not there yet
		if out, errs, code := e.run("clusterctl", "", "get", "ovens.kitchen.example.com"); code != 0 {
			return errors.New(out + errs)
		}
		return nil
	})
	e.eventually("an object of the custom kind is made", func(context.Context) error {
		_, errs, code := e.run("clusterctl", `{"apiVersion": "kitchen.example.com/v1", "kind": "Oven", "metadata": {"name": "o"}, "word": "`+hidden["the custom object"]+`"}`, "-n", ns, "create", "-f", "-")
		if code != 0 && !strings.Contains(errs, "AlreadyExists") {
			return errors.New(errs)
		}
		return nil
	})
	ctx := t.Context()
	if _, err := e.api.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Data: map[string]string{"word": hidden["the ConfigMap"]}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := e.api.CoreV1().Secrets(ns).Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"WORD": hidden["the Secret"]}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"n1", "n2"} {
		p := on(name, pod(fmt.Sprintf("p%d", i), "sleep"))
		p.Annotations = map[string]string{"note": plainMarker}
		p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "s"}}}}
		p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "s", MountPath: "/s"}}
		p.Spec.Volumes = []corev1.Volume{{Name: "s", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "s"}}}}
		e.create(ns, p)
		e.podReady(ns, p.Name)
	}

	reads := func(when string) {
		t.Helper()
		for _, n := range e.Nodes() {
			e.eventually(when+", by "+n.Name, func(context.Context) error {
				for kind, want := range map[string]string{"configmap/c": hidden["the ConfigMap"], "oven/o": hidden["the custom object"], "secret/s": base64.StdEncoding.EncodeToString([]byte(hidden["the Secret"]))} {
					out, errs, code := e.run("clusterctl", "", "-n", ns, "get", kind, "-o", "json", "--kubeconfig", n.Kubeconfig())
					if code != 0 || !strings.Contains(out, want) {
						return fmt.Errorf("%s: exit %d: %s%s", kind, code, out, errs)
					}
				}
				return nil
			})
		}
	}
	sealedBy := func(key string) {
		t.Helper()
		e.eventually("everything is sealed by "+key, func(context.Context) error {
			out, errs, code := e.run("clusterctl", "", "store", "status")
			flat := strings.Join(strings.Fields(out), " ")
			for _, want := range []string{"Encryption keys: configmaps,ovens.kitchen.example.com: " + key, "Encryption stale: 0 ", "Encryption unopened: 0 "} {
				if code != 0 || !strings.Contains(flat, want) {
					return fmt.Errorf("exit %d, no %q in: %s%s", code, want, out, errs)
				}
			}
			return nil
		})
	}
	sealedBy("aesgcm key1")
	reads("with the first key")

	// Another key: first on all servers for reading, then for writing; then the first goes.
	write(aes("key1", "key2"))
	e.takenUp(file)
	write(aes("key2", "key1"))
	sealedBy("aesgcm key2")
	e.takenUp(file)
	sealedBy("aesgcm key2")
	write(aes("key2"))
	e.takenUp(file)
	reads("without the first key")

	// A wrong file changes nothing, and is complained of.
	write("aesgcm: {keys: []}")
	e.eventually("a wrong file is warned of", func(context.Context) error {
		if out, errs, _ := e.run("clusterctl", "", "members"); !strings.Contains(out+errs, "is not in force as it is now") {
			return errors.New(out + errs)
		}
		return nil
	})
	reads("with a wrong file")

	// Then a KMS plugin, whose key changes, too.
	write(aes("key2"), kms)
	e.takenUp(file)
	write(kms, aes("key2"))
	sealedBy("kms vault")
	e.takenUp(file)
	sealedBy("kms vault")
	write(kms)
	e.takenUp(file)
	reads("sealed by the plugin")
	before := e.ctl("store", "status")
	plugin.Rotate("kms-key-2")
	e.within(3*testTimeout, "the plugin's new key seals", func(context.Context) error {
		if out, _, _ := e.run("clusterctl", "", "store", "status"); encryptionKeys(out) == "" || encryptionKeys(out) == encryptionKeys(before) {
			return errors.New(out)
		}
		return nil
	})
	sealedBy("kms vault")
	mustContain(t, "readyz", e.ctl("get", "--raw", "/readyz?verbose"), "[+]kms-providers ok")
	mustContain(t, "livez", e.ctl("get", "--raw", "/livez?verbose"), "[+]kms-providers ok")

	// Without the plugin what is known goes on, and health says what is wrong.
	plugin.End()
	reads("while the plugin is dead")
	e.eventually("readyz says that the plugin is dead", func(context.Context) error {
		if out, errs, code := e.run("clusterctl", "", "get", "--raw", "/readyz?verbose"); code == 0 || !strings.Contains(out+errs, "kms-providers") {
			return fmt.Errorf("exit %d: %s%s", code, out, errs)
		}
		return nil
	})
	plugin.Begin()

	// A server that lacks the file says so, and is named.
	n2 := nodeOf(e, "n2")
	if err := e.Stop(ctx, "n2"); err != nil {
		t.Fatal(err)
	}
	if err := e.StartWith(ctx, "n2", "--encryption-provider-config", ""); err != nil {
		t.Fatal(err)
	}
	e.eventually("a server without the file is warned of", func(context.Context) error {
		if out, errs, _ := e.run("clusterctl", "", "members"); !strings.Contains(out+errs, "give all servers the same file") {
			return errors.New(out + errs)
		}
		return nil
	})
	e.eventually("it says what it lacks", func(context.Context) error {
		out, errs, code := e.run("clusterctl", "", "-n", ns, "get", "configmap", "c", "--kubeconfig", n2.Kubeconfig())
		if code == 0 {
			t.Fatalf("a server without the file reads what is sealed by it: %s", out)
		}
		for _, want := range []string{"configmaps sealed by k8s:enc:kms:v2:vault:", "--encryption-provider-config"} {
			if !strings.Contains(errs, want) {
				return errors.New(errs)
			}
		}
		return nil
	})
	if err := e.Kill("n2"); err != nil {
		t.Fatal(err)
	}
	if err := e.Start(ctx, "n2"); err != nil {
		t.Fatal(err)
	}
	if err := e.Kill("n1"); err != nil {
		t.Fatal(err)
	}
	if err := e.Start(ctx, "n1"); err != nil {
		t.Fatal(err)
	}
	reads("after restarts")

	dir := t.TempDir()
	backup, pass := filepath.Join(dir, "c.backup"), filepath.Join(dir, "pass")
	if err := os.WriteFile(pass, []byte("correct horse battery\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	e.ctl("snapshot", "save", backup, "--passphrase-file", pass)
	mustContain(t, "verify", e.ctl("snapshot", "verify", backup, "--passphrase-file", pass), "is whole", "k8s:enc:kms:v2:vault:")

	searchFiles(t, dir)
	if searchFiles(t, filepath.Dir(n2.Data)) == 0 { // all nodes' data directories, and their logs
		t.Error("the search does not even find what lies in clear")
	}

	// Begun again from the snapshot.
	for _, n := range []string{"n1", "n2"} {
		if err := e.Stop(ctx, n); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{
		{"clusterd", "reset", "--data", n2.Data},
		{"clusterctl", "snapshot", "restore", backup, "--data", n2.Data, "--name", "phoenix", "--advertise", n2.Addr.String(), "--cgroup-root", n2.CgroupRoot, "--prepare", "--passphrase-file", pass, "--encryption-provider-config", file},
	} {
		limit, cancel := context.WithTimeout(ctx, testTimeout)
		out, err := e.Exec(limit, "n2", e.Bin(args[0]), args[1:]...).CombinedOutput()
		cancel()
		if err != nil {
			t.Fatalf("%q: %v: %s", args, err, out)
		}
	}
	if err := e.Start(ctx, "n2"); err != nil {
		t.Fatal(err)
	}
	e.eventually("the restored cluster reads everything", func(context.Context) error {
		for kind, want := range map[string]string{"configmap/c": hidden["the ConfigMap"], "oven/o": hidden["the custom object"]} {
			if out, errs, code := e.run("clusterctl", "", "-n", ns, "get", kind, "-o", "json", "--kubeconfig", n2.Kubeconfig()); code != 0 || !strings.Contains(out, want) {
				return fmt.Errorf("%s: exit %d: %s%s", kind, code, out, errs)
			}
		}
		return nil
	})
	searchFiles(t, filepath.Dir(n2.Data))
}

// encryptionKeys is the line of the keys in `store status`.
func encryptionKeys(status string) string {
	for line := range strings.Lines(status) {
		if rest, ok := strings.CutPrefix(line, "Encryption keys:"); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

// takenUp waits until both servers have taken up the file as it is now.
func (e *env) takenUp(file string) {
	e.t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		e.t.Fatal(err)
	}
	want := fmt.Sprintf("%x", sha256.Sum256(content))
	e.eventually("both servers have taken up the file", func(context.Context) error {
		for _, n := range e.Nodes() {
			metrics, errs, code := e.run("clusterctl", "", "get", "--raw", "/metrics", "--kubeconfig", n.Kubeconfig())
			if code != 0 || !strings.Contains(metrics, "clusterd_encryption_config_valid 1\n") || !strings.Contains(metrics, want) {
				return fmt.Errorf("%s has not: exit %d, %s", n.Name, code, errs)
			}
		}
		return nil
	})
}

// searchFiles looks into every file below a directory that lies on a disk for the hidden
// texts, as they are and in the three forms that base64 gives them, and counts those with
// the plain one.
func searchFiles(t *testing.T, folder string, more ...string) (plain int) {
	t.Helper()
	needles := map[string]string{}
	for _, text := range more {
		needles[text] = "what was given"
	}
	for what, text := range hidden {
		needles[text] = what
		for shift := range 3 {
			// What is certain of the text in base64, however many bytes are before it.
			encoded := base64.RawStdEncoding.EncodeToString([]byte(strings.Repeat("\x00", shift) + text))
			needles[encoded[4:len(encoded)-4]] = what
		}
	}
	looked := 0
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if os.IsNotExist(err) {
			return nil // files come and go
		}
		if err != nil {
			return err
		}
		if d.IsDir() {
			var s unix.Statfs_t
			if err := unix.Statfs(path, &s); err == nil && (s.Type == unix.TMPFS_MAGIC || s.Type == unix.PROC_SUPER_MAGIC || s.Type == unix.SYSFS_MAGIC || s.Type == unix.CGROUP_SUPER_MAGIC) && path != folder {
				return fs.SkipDir // in memory
			}
			return nil
		}
		if !d.Type().IsRegular() {
			return nil
		}
		if filepath.Base(filepath.Dir(path)) == "netns" {
			return nil // a namespace that is mounted there, no file
		}
		b, err := os.ReadFile(path)
		if os.IsNotExist(err) {
			return nil
		}
		if err != nil {
			return err
		}
		looked++
		for needle, what := range needles {
			if bytes.Contains(b, []byte(needle)) {
				t.Errorf("%s has the text of %s", path, what)
			}
		}
		if bytes.Contains(b, []byte(plainMarker)) {
			plain++
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: %d files, %d of them with what lies in clear", folder, looked, plain)
	return plain
}
