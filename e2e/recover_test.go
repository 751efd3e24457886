package e2e

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestE2ERecover loses two of three voters permanently. The cluster goes on from
// the newest of what is left, on every member that is left; the lost ones are
// refused when they come back, and say why.
func TestE2ERecover(t *testing.T) {
	e := startBare(t, 4)
	ctx := t.Context()
	ns := e.namespace("kept")
	var voters []string
	e.eventually("three of four vote", func(context.Context) error {
		if voters = e.voters(); len(voters) != 3 {
			return fmt.Errorf("%v", voters)
		}
		return nil
	})
	spare := e.other(voters...)
	said := e.refused("", "recover", "--yes")
	mustContain(t, "recover while all is well", said, "there is nothing to recover")

	var before int64
	for i := range 20 {
		cm, err := e.api.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("cm-%d", i)}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		fmt.Sscan(cm.ResourceVersion, &before)
	}
	e.eventually("every member has applied the last write", func(ctx context.Context) error {
		for _, n := range e.Nodes() {
			api, _, err := e.Client(n.Name)
			if err != nil {
				return err
			}
			// From this server's cache, as old as it is.
			if _, err := api.CoreV1().ConfigMaps(ns).Get(ctx, "cm-19", metav1.GetOptions{ResourceVersion: "0"}); err != nil {
				return err
			}
		}
		return nil
	})
	left := e.leader()
	lost := []string{}
	for _, v := range voters {
		if v != left {
			lost = append(lost, v)
		}
	}
	for _, n := range lost {
		if err := e.Kill(n); err != nil {
			t.Fatal(err)
		}
	}
	// The one that is left starts again, alone.
	if err := e.Kill(left); err != nil {
		t.Fatal(err)
	}
	if err := e.Start(ctx, left); err != nil {
		t.Fatal(err)
	}
	e.use(left)
	var table string
	e.eventually("the two that are left answer", func(context.Context) error {
		out, errs, _ := e.runOn(left, "recover", "--from", "unknown")
		table = out
		if n := strings.Count(out, "reachable"); n != 2 {
			return fmt.Errorf("%d do: %s%s", n, out, errs)
		}
		return nil
	})
	mustContain(t, "the survey", table, "TERM/INDEX", "(most recent)", lost[0], lost[1])
	// A member that followed the lost leader may take a moment to miss it.
	e.eventually("recover asks first", func(context.Context) error {
		out, errs, code := e.runOn(left, "recover")
		if code == 0 || !strings.Contains(out+errs, "nothing was changed") {
			return fmt.Errorf("exit %d: %s%s", code, out, errs)
		}
		return nil
	})
	out, errs, code := e.runOn(left, "recover", "--yes")
	if code != 0 {
		t.Fatalf("exit %d: %s%s", code, out, errs)
	}
	mustContain(t, "recover", out, "The cluster goes on in epoch 2", "Removed: "+strings.Join(lost, ", "))
	t.Log(out)

	for _, n := range []string{left, spare} {
		e.use(n)
		e.eventually(n+" takes writes and knows what was written", func(ctx context.Context) error {
			list, err := e.api.CoreV1().ConfigMaps(ns).List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			kept := 0
			for _, cm := range list.Items {
				if strings.HasPrefix(cm.Name, "cm-") {
					kept++
				}
			}
			var rev int64
			fmt.Sscan(list.ResourceVersion, &rev)
			if kept != 20 || rev <= before {
				return fmt.Errorf("%d of 20, at revision %d after %d", kept, rev, before)
			}
			_, err = e.api.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "new-"}}, metav1.CreateOptions{})
			return err
		})
	}
	e.eventually("both are members of one cluster", func(context.Context) error {
		for _, n := range []string{left, spare} {
			out, errs, _ := e.runOn(n, "members")
			if strings.Contains(out, lost[0]) || strings.Contains(out, lost[1]) || strings.Count(out, "voter") != 2 || !strings.Contains(out, "(leader)") {
				return fmt.Errorf("%s says %s%s", n, out, errs)
			}
		}
		return nil
	})

	// Both come back: together they would be a majority of the past.
	for _, n := range lost {
		if err := e.Start(ctx, n); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range lost {
		e.eventually(n+" ends", func(context.Context) error {
			if _, err := e.Pid(n); err == nil {
				return errors.New("it runs")
			}
			return nil
		})
		limit, cancel := context.WithTimeout(ctx, testTimeout)
		defer cancel()
		again := e.Exec(limit, n, e.Bin("clusterd"), "run", "--data", e.data(n))
		said, err := again.CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 78 {
			t.Errorf("%s, started again: %v: %s", n, err, said)
		}
		mustContain(t, n, string(said), "was left out when the cluster was recovered on", "goes on in epoch 2", "clusterd reset --data")
		if lines := strings.Split(strings.TrimSpace(string(said)), "\n"); len(lines) != 1 {
			t.Errorf("not one sentence:\n%s", said)
		}
	}
	e.use(left)
	if _, err := e.api.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "last-"}}, metav1.CreateOptions{}); err != nil {
		t.Error(err)
	}
}

// runOn runs clusterctl against one node.
func (e *env) runOn(node string, args ...string) (stdout, stderr string, code int) {
	e.t.Helper()
	for _, n := range e.Nodes() {
		if n.Name == node {
			return e.run("clusterctl", "", append(args, "--kubeconfig", n.Kubeconfig())...)
		}
	}
	e.t.Fatalf("no node %s", node)
	return "", "", 0
}

func (e *env) data(node string) string {
	for _, n := range e.Nodes() {
		if n.Name == node {
			return n.Data
		}
	}
	return ""
}
