package claim

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/clusterd/clusterd/apis/names"
)

func setup(t *testing.T) (*Keeper, *fake.Clientset, *v1.Pod, string) {
	dir := filepath.Join(t.TempDir(), "claims")
	claim := &v1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "d", UID: "c1"},
		Spec:       v1.PersistentVolumeClaimSpec{VolumeName: "pvc-c1"}, Status: v1.PersistentVolumeClaimStatus{Phase: v1.ClaimBound},
	}
	volume := &v1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "pvc-c1", UID: "v1", Labels: map[string]string{names.LocalPathNode: "n1"}, Finalizers: []string{names.LocalPathFinalizer}},
		Spec: v1.PersistentVolumeSpec{
			PersistentVolumeSource:        v1.PersistentVolumeSource{Local: &v1.LocalVolumeSource{Path: filepath.Join(dir, "pvc-c1")}},
			ClaimRef:                      &v1.ObjectReference{Namespace: "d", Name: "c", UID: "c1"},
			PersistentVolumeReclaimPolicy: v1.PersistentVolumeReclaimDelete,
		},
	}
	client := fake.NewSimpleClientset(claim, volume)
	k := New(Config{Client: client, NodeName: "n1", Dir: dir, Recorder: record.NewFakeRecorder(9), Node: func() *v1.Node { return &v1.Node{} }})
	return k, client, &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "d"}}, dir
}

func TestADirIsMadeOnce(t *testing.T) {
	k, _, pod, dir := setup(t)
	if _, err := k.Volume(t.Context(), pod, "c"); err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(dir, "pvc-c1")
	st, err := os.Stat(folder)
	if err != nil || st.Mode().Perm() != 0o777 {
		t.Fatalf("%v %v", st, err)
	}
	if _, err := k.Volume(t.Context(), pod, "c"); err != nil {
		t.Errorf("the second time: %v", err)
	}
	if err := os.Remove(folder); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Volume(t.Context(), pod, "c"); err == nil || !strings.Contains(err.Error(), "its data with it") {
		t.Errorf("a folder that was lost: %v", err)
	}
	if _, err := os.Stat(folder); err == nil {
		t.Error("a lost folder was made again")
	}
}

func TestOnlyItsOwnDirIsRemoved(t *testing.T) {
	k, client, pod, dir := setup(t)
	v, err := k.Volume(t.Context(), pod, "c")
	if err != nil {
		t.Fatal(err)
	}
	kept := filepath.Join(t.TempDir(), "kept")
	if err := os.WriteFile(kept, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(dir, "pvc-c1")
	if err := os.Symlink(filepath.Dir(kept), filepath.Join(folder, "link")); err != nil {
		t.Fatal(err)
	}
	other := v.DeepCopy()
	other.Spec.Local.Path = filepath.Dir(kept)
	if err := k.remove(t.Context(), other); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(folder); err != nil {
		t.Errorf("by another path: %v", err)
	}
	if err := k.remove(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left are %v, %v", left, err)
	}
	if _, err := os.Stat(kept); err != nil {
		t.Errorf("behind a link: %v", err)
	}
	now, err := client.CoreV1().PersistentVolumes().Get(t.Context(), v.Name, metav1.GetOptions{})
	if err != nil || slices.Contains(now.Finalizers, names.LocalPathFinalizer) {
		t.Errorf("finalizers %v, %v", now.Finalizers, err)
	}
}
