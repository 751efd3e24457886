package claim

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/agent/claim/projectquota"
)

// TestVMProjects keeps directories to a size on a disk with project quotas.
func TestVMProjects(t *testing.T) {
	if os.Getenv("CLUSTERD_VM") == "" {
		t.Skip("needs a disk with project quotas: make test-vm VM_TESTS=TestVMProjects")
	}
	k, client, pod, dir := setup(t)
	v, err := client.CoreV1().PersistentVolumes().Get(t.Context(), "pvc-c1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	sized := func(size string) *v1.PersistentVolume {
		v.Spec.Capacity = v1.ResourceList{v1.ResourceStorage: resource.MustParse(size)}
		v.Status.Phase = v1.VolumeBound
		if v, err = client.CoreV1().PersistentVolumes().Update(t.Context(), v, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		return v
	}
	sized("2Mi")
	if v, err = k.Volume(t.Context(), pod, "c"); err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(dir, "pvc-c1")
	project, err := projectOf(folder)
	if err != nil || project < projectquota.First {
		t.Fatalf("project %d, %v", project, err)
	}
	if err := os.Mkdir(filepath.Join(folder, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "sub", "a"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	asContainer(t)
	if err := os.WriteFile(filepath.Join(folder, "b"), make([]byte, 2<<20), 0o600); !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		t.Errorf("3 MiB of 2: %v", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(folder, &st); err != nil || int64(st.Blocks)*st.Bsize != 2<<20 { //nolint:unconvert // Bsize is no int64 everywhere
		t.Errorf("the volume shows %d blocks of %d, %v", st.Blocks, st.Bsize, err)
	}
	use, err := measure(t.Context(), folder, 2<<20)
	if err != nil || !use.Kept || use.Used < 1<<20 || use.Used > 2<<20 {
		t.Errorf("%+v %v", use, err)
	}
	// Another volume has another project; the pod's own change is not believed.
	other := filepath.Join(dir, "pvc-c2")
	if err := makeDir(other, 1<<20); err != nil {
		t.Fatal(err)
	}
	if p, err := projectOf(other); err != nil || p == project || p == 0 {
		t.Errorf("the other volume has project %d, %v", p, err)
	}
	if err := k.keep(sized("8Mi")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "b"), make([]byte, 5<<20), 0o600); err != nil {
		t.Errorf("6 MiB of 8: %v", err)
	}
	v.Spec.PersistentVolumeReclaimPolicy = v1.PersistentVolumeReclaimDelete
	if err := k.remove(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	err = onDir(dir, func(f projectquota.Folder) error {
		u, err := f.Usage(project)
		if u.Limit != 0 || u.Used != 0 {
			t.Errorf("left of the volume: %+v", u)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(projectFile(folder)); err == nil {
		t.Error("the record is still there")
	}
}

// asContainer takes from the rest of the test, on its thread, what lets root pass
// quotas, and containers do not have: CAP_SYS_RESOURCE.
func asContainer(t *testing.T) {
	t.Helper()
	runtime.LockOSThread() // for good: the thread ends with the test
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&head, &caps[0]); err != nil {
		t.Fatal(err)
	}
	caps[0].Effective &^= 1 << unix.CAP_SYS_RESOURCE
	if err := unix.Capset(&head, &caps[0]); err != nil {
		t.Fatal(err)
	}
}
