package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestE2ESnapshot saves a cluster of two, verifies the file, and begins it
// again on a machine of another name. All objects are there, revisions go on
// upwards, a machine of the old cluster reports what happened, and joins again.
func TestE2ESnapshot(t *testing.T) {
	e := startBare(t, 2)
	ctx := t.Context()
	ns := e.namespace("kept")
	for i := range 20 {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("cm-%d", i)}, Data: map[string]string{"n": fmt.Sprint(i)}}
		if _, err := e.api.CoreV1().ConfigMaps(ns).Create(ctx, cm, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	file, pass := filepath.Join(dir, "c.backup"), filepath.Join(dir, "pass")
	for name, p := range map[string]string{pass: "correct horse battery\n", pass + "-wrong": "incorrect horse\n"} {
		if err := os.WriteFile(name, []byte(p), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Log(e.ctl("snapshot", "save", file, "--passphrase-file", pass))
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	mustContain(t, "save again", e.refused("", "snapshot", "save", file, "--passphrase-file", pass), "exists")
	mustContain(t, "verify", e.ctl("snapshot", "verify", file, "--passphrase-file", pass), "/registry/core/configmaps", "is whole")
	mustContain(t, "the wrong passphrase", e.refused("", "snapshot", "verify", file, "--passphrase-file", pass+"-wrong"), "does not open")

	// What is written after the snapshot is lost with the cluster; a client
	// that has seen it must not take the restored state for an older one.
	after, err := e.api.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "after"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"n1", "n2"} {
		if err := e.Stop(ctx, n); err != nil {
			t.Fatal(err)
		}
	}
	onMachine := func(node string, args ...string) (string, error) {
		limit, cancel := context.WithTimeout(ctx, testTimeout)
		defer cancel()
		out, err := e.Exec(limit, node, e.Bin(args[0]), args[1:]...).CombinedOutput()
		return string(out), err
	}
	second := e.Nodes()[1]
	if out, err := onMachine("n2", "clusterd", "reset", "--data", second.Data); err != nil {
		t.Fatalf("reset: %v: %s", err, out)
	}
	begin := []string{"clusterctl", "snapshot", "restore", file, "--data", second.Data, "--name", "phoenix",
		"--advertise", second.Addr.String(), "--cgroup-root", second.CgroupRoot, "--prepare", "--passphrase-file"}
	if out, err := onMachine("n2", append(begin, pass+"-wrong")...); err == nil || !strings.Contains(out, "does not open") {
		t.Fatalf("the wrong passphrase: %v: %s", err, out)
	}
	out, err := onMachine("n2", append(begin, pass)...)
	if err != nil {
		t.Fatalf("restore: %v: %s", err, out)
	}
	t.Log(out)
	if err := e.Start(ctx, "n2"); err != nil {
		t.Fatal(err)
	}
	e.eventually("the cluster answers, with a node phoenix", func(ctx context.Context) error {
		if e.api, e.config, err = e.Client("n2"); err != nil {
			return err
		}
		n, err := e.api.CoreV1().Nodes().Get(ctx, "phoenix", metav1.GetOptions{})
		if err == nil && !nodeReady(n) {
			err = errors.New("it is not Ready")
		}
		return err
	})
	list, err := e.api.CoreV1().ConfigMaps(ns).List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	kept := 0
	for _, cm := range list.Items {
		if strings.HasPrefix(cm.Name, "cm-") && cm.Data["n"] == strings.TrimPrefix(cm.Name, "cm-") {
			kept++
		}
	}
	var old, now int64
	fmt.Sscan(after.ResourceVersion, &old)
	fmt.Sscan(list.ResourceVersion, &now)
	if kept != 20 || now <= old {
		t.Errorf("%d of 20 ConfigMaps, at revision %d after %d", kept, now, old)
	}
	w, err := e.api.CoreV1().ConfigMaps(ns).Watch(ctx, metav1.ListOptions{ResourceVersion: after.ResourceVersion})
	if err == nil {
		ev := <-w.ResultChan()
		w.Stop()
		err = apierrors.FromObject(ev.Object)
	}
	if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		t.Errorf("a watch from before goes on: %v", err)
	}
	members, _, _ := e.runOn("n2", "members")
	if strings.Contains(members, "n1") || strings.Contains(members, "n2 ") {
		t.Errorf("machines of the old cluster are members:\n%s", members)
	}

	// n1 wakes up: it learns of it, is reset, and joins again under its name.
	first := e.Nodes()[0]
	limit, cancel := context.WithTimeout(ctx, testTimeout)
	defer cancel()
	said, err := e.Exec(limit, "n1", e.Bin("clusterd"), "run", "--data", first.Data).CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 78 {
		t.Errorf("n1: %v: %s", err, said)
	}
	mustContain(t, "n1", string(said), "was left out when the cluster was restored", "clusterd reset --data")
	if out, err := onMachine("n1", "clusterd", "reset", "--data", first.Data); err != nil {
		t.Fatalf("reset: %v: %s", err, out)
	}
	line, errs, code := e.runOn("n2", "token", "create")
	i := strings.Index(line, "--token ")
	if code != 0 || i < 0 {
		t.Fatalf("token: %s%s", line, errs)
	}
	out, err = onMachine("n1", "clusterd", "join", second.Addr.String()+":6443", "--token", strings.Fields(line[i:])[1],
		"--data", first.Data, "--name", "n1", "--advertise", first.Addr.String(), "--cgroup-root", first.CgroupRoot, "--prepare")
	if err != nil {
		t.Fatalf("join: %v: %s", err, out)
	}
	if err := e.Start(ctx, "n1"); err != nil {
		t.Fatal(err)
	}
	e.eventually("n1 is a member again", func(context.Context) error {
		out, errs, _ := e.runOn("n2", "members")
		if !strings.Contains(out, "n1 ") || !strings.Contains(out, "nonvoter") {
			return errors.New(out + errs)
		}
		return nil
	})
}
