package vm

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/agent/claim/projectquota"
)

// TestVMVolumeSize fills a volume of the default class on a disk with project
// quotas: it holds what its claim asks for and no more, shows that as its size,
// holds more after the claim has grown, and leaves no limit behind.
func TestVMVolumeSize(t *testing.T) {
	e := newEnv(t)
	claims := e.api.CoreV1().PersistentVolumeClaims(e.ns)
	pvc := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "data", Namespace: e.ns},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("4Mi")}},
		},
	}
	if _, err := claims.Create(t.Context(), pvc, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p := e.pod("writer", "sleep")
	p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/v"}}
	e.run(p)

	e.exec("writer", "/hello", "fill", "/v/a", "3")
	out, err := ctl("-n", e.ns, "exec", "writer", "--", "/hello", "fill", "/v/b", "3")
	if err == nil || !strings.Contains(err.Error(), "disk quota exceeded") {
		t.Errorf("6 MiB of 4: %s %v", out, err)
	}
	e.eventually("the claim says that its volume is full", func() error {
		list, err := e.api.CoreV1().Events(e.ns).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		var seen []string
		for i := range list.Items {
			seen = append(seen, list.Items[i].Reason+": "+list.Items[i].Message)
		}
		if all := strings.Join(seen, "\n"); !strings.Contains(all, "VolumeFull: volume ") || !strings.Contains(all, "is full: it holds 4Mi of 4Mi") {
			return fmt.Errorf("events:\n%s", all)
		}
		return nil
	})

	bound, err := claims.Get(t.Context(), "data", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(data, "claims")
	record, err := os.ReadFile(filepath.Join(dir, ".project~"+bound.Spec.VolumeName))
	if err != nil {
		t.Fatal(err)
	}
	number, err := strconv.ParseUint(strings.TrimSpace(string(record)), 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	project := uint32(number)
	e.limit(dir, project, 4<<20)
	patch := `{"spec":{"resources":{"requests":{"storage":"16Mi"}}}}`
	if _, err := claims.Patch(t.Context(), "data", types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	e.limit(dir, project, 16<<20)
	e.exec("writer", "/hello", "fill", "/v/c", "6")
	if err := e.api.CoreV1().Pods(e.ns).Delete(t.Context(), "writer", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := claims.Delete(t.Context(), "data", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	e.limit(dir, project, 0)
	if left, err := filepath.Glob(filepath.Join(dir, ".project~"+bound.Spec.VolumeName)); err != nil || len(left) > 0 {
		t.Errorf("left: %q %v", left, err)
	}
}

// limit waits until the project has the limit.
func (e *env) limit(dir string, project uint32, limit int64) {
	e.t.Helper()
	f, err := projectquota.Open(dir)
	if err != nil {
		e.t.Fatal(err)
	}
	defer f.Close()
	e.eventually(fmt.Sprintf("the limit is %d", limit), func() error {
		u, err := f.Usage(project)
		if err == nil && u.Limit != limit {
			err = fmt.Errorf("project %d has %+v", project, u)
		}
		return err
	})
}
