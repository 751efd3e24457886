package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/features"
)

// TestE2EDiskFull lets a node's disk run full: it says so, ends its pods one by
// one, takes no new ones, and their controller creates them elsewhere; with
// room again it takes part again.
func TestE2EDiskFull(t *testing.T) {
	features.Shows(t, 268)
	need(t)
	disk := filepath.Join(t.TempDir(), "disk")
	if err := os.Mkdir(disk, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=256m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // after the cluster was taken down
		if err := unix.Unmount(disk, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	e := startBare(t, 2, func(c *cluster.Config) {
		if err := os.MkdirAll(c.Dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(disk, filepath.Join(c.Dir, "n2")); err != nil {
			t.Fatal(err)
		}
		c.Args = []string{"--eviction-hard", "nodefs.available<16Mi", "--eviction-transition", "1s"}
	})
	e.ready(2)
	ns := e.namespace("full")
	e.createDeployment(ns, deployment("web", 4))
	on := map[string][]string{}
	for _, p := range e.podsReady(ns, "app=web", 4) {
		on[p.Spec.NodeName] = append(on[p.Spec.NodeName], p.Name)
	}
	if len(on["n1"]) == 0 || len(on["n2"]) == 0 {
		t.Fatalf("pods by node: %v", on)
	}

	fill := filepath.Join(disk, "fill")
	leave(t, disk, fill, 8<<20)
	e.nodeIs("n2", corev1.NodeDiskPressure, corev1.ConditionTrue)
	for _, name := range on["n2"] {
		p := e.podIs(ns, name, "Evicted, and has ended", func(p *corev1.Pod) error {
			if p.Status.Phase != corev1.PodFailed || p.Status.Reason != "Evicted" || len(p.Status.ContainerStatuses) != 1 || p.Status.ContainerStatuses[0].State.Terminated == nil {
				return errors.New("it is not")
			}
			return nil
		})
		if !strings.Contains(p.Status.Message, "The node was low on resource: ephemeral-storage") {
			t.Errorf("%s: %q", name, p.Status.Message)
		}
		e.eventuallyHas([]string{"-n", ns, "get", "events", "--field-selector", "reason=Evicted,involvedObject.name=" + name}, "low on resource")
	}
	e.eventually("4 pods are Ready on n1", func(ctx context.Context) error {
		list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=web"})
		if err != nil {
			return err
		}
		n := 0
		for i := range list.Items {
			if p := &list.Items[i]; p.Spec.NodeName == "n1" && podReady(p) {
				n++
			}
		}
		if n != 4 {
			return fmt.Errorf("%d of %d", n, len(list.Items))
		}
		return nil
	})
	late := pod("late", "sleep")
	late.Spec.NodeName = "n2"
	e.create(ns, late)
	p := e.podIs(ns, "late", "refused", func(p *corev1.Pod) error {
		if p.Status.Phase != corev1.PodFailed {
			return errors.New("it is not")
		}
		return nil
	})
	if p.Status.Reason != "Evicted" || !strings.Contains(p.Status.Message, "DiskPressure") {
		t.Errorf("refused with %s: %s", p.Status.Reason, p.Status.Message)
	}

	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	e.nodeIs("n2", corev1.NodeDiskPressure, corev1.ConditionFalse)
	e.ctl("image", "load", filepath.Join(e.binDir(), "hello.tar")) // it may have been removed to make room
	again := pod("again", "sleep")
	again.Spec.NodeName = "n2"
	e.create(ns, again)
	e.podReady(ns, "again")
}

// leave fills a disk up to so many bytes.
func leave(t *testing.T, disk, file string, bytes int64) {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(disk, &st); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(st.Bavail)*st.Bsize-bytes); err != nil {
		t.Fatal(err)
	}
}

// nodeIs waits until a node's condition has the status.
func (e *env) nodeIs(name string, kind corev1.NodeConditionType, status corev1.ConditionStatus) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("%s of %s is %s", kind, name, status), func(ctx context.Context) error {
		n, err := e.api.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range n.Status.Conditions {
			if c.Type == kind && c.Status == status {
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", n.Status.Conditions)
	})
}
