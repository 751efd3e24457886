package e2e

import (
	"context"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/features"
)

// TestE2ERace is a server and an agent that were built with the race detector,
// while clients make, change and delete what all caches of objects hold.
func TestE2ERace(t *testing.T) {
	need(t)
	usual := bin(t)
	program := filepath.Join(usual, "race", "clusterd")
	if _, err := os.Stat(program); errors.Is(err, fs.ErrNotExist) {
		t.Skip("there is no clusterd with the race detector: make build-race")
	}
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	raced := false
	for _, s := range info.Settings {
		raced = raced || s.Key == "-race" && s.Value == "true"
	}
	if !raced {
		t.Fatalf("%s was built without the race detector: make build-race", program)
	}
	features.Shows(t, 109)
	programs, reports := t.TempDir(), filepath.Join(t.TempDir(), "race")
	for name, path := range map[string]string{"clusterd": program, "clusterctl": filepath.Join(usual, "clusterctl"), "hello.tar": filepath.Join(usual, "hello.tar")} {
		if err := os.Symlink(path, filepath.Join(programs, name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("GORACE", "log_path="+reports) // one file a process that has something to report
	e := startBare(t, 1, func(c *cluster.Config) {
		c.Bin, c.Agents = programs, 1
	})
	e.ready(2)
	ns := e.namespace("race")

	const clients, rounds = 4, 4
	faults := make(chan error, clients)
	var work sync.WaitGroup
	for c := range clients {
		work.Go(func() {
			for i := range rounds {
				if err := e.churn(t.Context(), ns, fmt.Sprintf("churn-%d-%d", c, i)); err != nil {
					faults <- err
					return
				}
			}
		})
	}
	work.Wait()
	close(faults)
	for err := range faults {
		t.Error(err)
	}
	e.eventually("nothing is left of it", func(ctx context.Context) error {
		pods, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d pods are", len(pods.Items))
		}
		return err
	})
	// What a program has seen by its end counts, too.
	for _, n := range e.Nodes() {
		if err := e.Stop(t.Context(), n.Name); err != nil {
			t.Error(err)
		}
	}
	found, err := filepath.Glob(reports + ".*")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range found {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Errorf("%d reports of the race detector, the first of them:\n%s", strings.Count(string(b), "WARNING: DATA RACE"), head(string(b), 80))
	}
}

// churn makes a Deployment with a Service, and a ConfigMap beside them,
// changes what others look at, and deletes all of it again.
func (e *env) churn(ctx context.Context, ns, name string) error {
	d := deployment(name, 2)
	_, err := e.api.AppsV1().Deployments(ns).Create(ctx, d, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	if _, err := e.api.CoreV1().Services(ns).Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Selector: d.Spec.Selector.MatchLabels, Ports: []corev1.ServicePort{{Port: 8080}}}}, metav1.CreateOptions{}); err != nil {
		return err
	}
	if _, err := e.api.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
		return err
	}
	for i, patch := range []string{`{"spec":{"replicas":4}}`, `{"spec":{"template":{"metadata":{"annotations":{"round":"two"}}}}}`, `{"spec":{"replicas":1}}`} {
		// The server tries a patch again some times when others write; these are many.
		if err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
			_, err := e.api.AppsV1().Deployments(ns).Patch(ctx, name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
			return err
		}); err != nil {
			return err
		}
		label := fmt.Appendf(nil, `{"metadata":{"labels":{"%s":"%d"}}}`, name, i)
		if err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
			_, err := e.api.CoreV1().Nodes().Patch(ctx, e.Nodes()[i%2].Name, types.StrategicMergePatchType, label, metav1.PatchOptions{})
			return err
		}); err != nil {
			return err
		}
		if _, err := e.api.CoreV1().ConfigMaps(ns).Patch(ctx, name, types.StrategicMergePatchType, fmt.Appendf(nil, `{"data":{"at":"%d"}}`, i), metav1.PatchOptions{}); err != nil {
			return err
		}
	}
	policy := metav1.DeletePropagationForeground
	return errors.Join(
		e.api.AppsV1().Deployments(ns).Delete(ctx, name, metav1.DeleteOptions{PropagationPolicy: &policy}),
		e.api.CoreV1().Services(ns).Delete(ctx, name, metav1.DeleteOptions{}),
		e.api.CoreV1().ConfigMaps(ns).Delete(ctx, name, metav1.DeleteOptions{}),
	)
}

func head(s string, n int) string {
	lines := strings.Split(s, "\n")
	return strings.Join(lines[:min(n, len(lines))], "\n")
}
