package kubectl

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/features"
)

// claim is one of the default class.
func claim(name string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: %s}\nspec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 16Mi}}}", name)
}

// claimed is a pod that has the claim at /data.
func claimed(name, claim, args string, more ...string) string {
	return with(name, args, "volumeMounts: [{name: data, mountPath: /data}]", append([]string{"volumes: [{name: data, persistentVolumeClaim: {claimName: " + claim + "}}]"}, more...)...)
}

// volumeOf is the volume that a claim is bound to.
func (k *kit) volumeOf(claim string) *corev1.PersistentVolume {
	k.Helper()
	v, err := k.api.CoreV1().PersistentVolumes().Get(k.Context(), k.field("pvc/"+claim, "{.spec.volumeName}"), metav1.GetOptions{})
	if err != nil {
		k.Fatal(err)
	}
	return v
}

// removed waits until a directory is gone from the disk.
func (k *kit) removed(path string) {
	k.Helper()
	k.eventually(path+" is removed", func(context.Context) error {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("it is there: %v", err)
		}
		return nil
	})
}

// TestE2EXClaims follows claims from the first pod that uses them to their end.
func TestE2EXClaims(t *testing.T) {
	t.Parallel()
	k := start(t, "claims")
	k.sub("a claim outlives its pods", func(k *kit) {
		features.Shows(k, 250)
		k.eventuallyHas([]string{"get", "storageclass"}, "local-path (default)")
		k.apply(claim("notes"))
		k.is("class", k.field("pvc/notes", "{.spec.storageClassName}"), "local-path")
		k.eventuallyHas([]string{"describe", "pvc", "notes"}, "WaitForFirstConsumer")
		k.apply(claimed("writer", "notes", "write, /data/note, kept", "restartPolicy: Never"))
		k.phase("writer", corev1.PodSucceeded)
		k.is("phase", k.field("pvc/notes", "{.status.phase}"), "Bound")
		k.ok("delete", "pod", "writer")
		k.apply(claimed("reader", "notes", "sleep"))
		k.ready("reader")
		k.has(k.exec("reader", "main", "cat", "/data/note"), "kept")
		folder := k.volumeOf("notes").Spec.Local.Path
		if b, err := os.ReadFile(folder + "/note"); err != nil || !strings.Contains(string(b), "kept") {
			k.Errorf("on the disk: %q, %v", b, err)
		}

		k.ok("patch", "pvc", "notes", "-p", `{"spec":{"resources":{"requests":{"storage":"32Mi"}}}}`)
		k.eventually("the claim has grown", func(context.Context) error {
			if got := k.field("pvc/notes", "{.status.capacity.storage}"); got != "32Mi" {
				return errors.New(got)
			}
			return nil
		})

		k.ok("delete", "pvc", "notes", "--wait=false")
		k.has(k.ok("get", "pvc", "notes"), "Terminating")
		k.has(k.exec("reader", "main", "cat", "/data/note"), "kept")
		k.ok("delete", "pod", "reader")
		k.ok("wait", "--for=delete", "pvc/notes", timeoutFlag)
		k.removed(folder)
	})
	k.sub("why a pod waits", func(k *kit) {
		k.apply(claimed("early", "later", "sleep"))
		k.eventuallyHas([]string{"describe", "pod", "early"}, `persistentvolumeclaim "later" not found`)
		k.apply(claim("later"))
		k.ready("early")
		k.ok("delete", "pod/early", "pvc/later")
	})
	k.sub("a StatefulSet's data", func(k *kit) {
		app, err := os.ReadFile("../../examples/apps/statefulset-claims.yaml")
		if err != nil {
			k.Fatal(err)
		}
		k.apply(string(app))
		k.ready("notes-1")
		k.exec("notes-1", "main", "write", "/data/who", "one")
		before := k.pod("notes-1").UID
		k.ok("delete", "pod", "notes-1")
		k.podIs("notes-1", "is another and Ready", func(p *corev1.Pod) bool {
			return p.UID != before && condition(p, corev1.PodReady) == corev1.ConditionTrue
		})
		k.has(k.exec("notes-1", "main", "cat", "/data/who"), "one")
		folder := k.volumeOf("data-notes-1").Spec.Local.Path
		k.ok("delete", "statefulset/notes", "service/notes")
		k.gone("notes-1")
		k.ok("delete", "pvc", "data-notes-0", "data-notes-1")
		k.removed(folder)
	})
	k.sub("an ephemeral volume goes with its pod", func(k *kit) {
		k.apply(with("scratch", "sleep", "volumeMounts: [{name: s, mountPath: /s}]", "securityContext: {fsGroup: 4321}",
			"volumes: [{name: s, ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOncePod], resources: {requests: {storage: 1Mi}}}}}}]"))
		k.ready("scratch")
		folder := k.volumeOf("scratch-s").Spec.Local.Path
		k.exec("scratch", "main", "write", "/s/x", "y")
		k.ok("delete", "pod", "scratch")
		k.ok("wait", "--for=delete", "pvc/scratch-s", timeoutFlag)
		k.removed(folder)
	})
	k.sub("a volume that somebody made", func(k *kit) {
		dir := k.T.TempDir()
		if err := os.Chmod(dir, 0o777); err != nil {
			k.Fatal(err)
		}
		k.applyAll(fmt.Sprintf("apiVersion: v1\nkind: PersistentVolume\nmetadata: {name: by-hand}\nspec: {capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce], storageClassName: '', hostPath: {path: %s}}", dir),
			"apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: hand}\nspec: {accessModes: [ReadWriteOnce], storageClassName: '', resources: {requests: {storage: 1Mi}}}",
			claimed("by-hand", "hand", "write, /data/x, kept", "restartPolicy: Never"))
		k.phase("by-hand", corev1.PodSucceeded)
		if _, err := os.Stat(dir + "/x"); err != nil {
			k.Error(err)
		}
		k.ok("delete", "pod/by-hand", "pvc/hand")
		k.eventuallyHas([]string{"get", "pv", "by-hand"}, "Released")
		k.ok("delete", "pv", "by-hand")
		if _, err := os.Stat(dir + "/x"); err != nil {
			k.Error(err)
		}
	})
}
