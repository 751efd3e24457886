package claim

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
)

func TestAVolumeBeyondItsSizeIsNamed(t *testing.T) {
	k, client, pod, dir := setup(t)
	events := record.NewFakeRecorder(9)
	k.cfg.Recorder = events
	if _, err := k.Volume(t.Context(), pod, "c"); err != nil {
		t.Fatal(err)
	}
	claim := types.NamespacedName{Namespace: "d", Name: "c"}
	volume := func(size string) []*v1.PersistentVolume {
		v, err := client.CoreV1().PersistentVolumes().Get(t.Context(), "pvc-c1", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		v.Status.Phase = v1.VolumeBound
		v.Spec.Capacity = v1.ResourceList{v1.ResourceStorage: resource.MustParse(size)}
		return []*v1.PersistentVolume{v}
	}
	said := func() string {
		select {
		case e := <-events.Events:
			return e
		default:
			return ""
		}
	}
	now := time.Now()
	k.look(t.Context(), volume("1Mi"), now)
	if e := said(); e != "" {
		t.Errorf("an empty volume: %s", e)
	}
	if err := os.WriteFile(filepath.Join(dir, "pvc-c1", "f"), make([]byte, 3<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	now = now.Add(time.Hour)
	k.look(t.Context(), volume("1Mi"), now)
	u, ok := k.Use(claim)
	if !ok || u.Used < 3<<20 || u.Used > 4<<20 || u.Size != 1<<20 || u.Available != 0 || u.Kept {
		t.Errorf("%+v %v", u, ok)
	}
	if e := said(); !strings.Contains(e, "Warning VolumeFull volume pvc-c1 holds 3Mi, more than its 1Mi") || !strings.Contains(e, "spec.resources.requests.storage") {
		t.Errorf("event %q", e)
	}
	// It is said again after a while, and not at each look.
	k.look(t.Context(), volume("1Mi"), now.Add(sayEvery/2))
	if e := said(); e != "" {
		t.Errorf("said too soon: %s", e)
	}
	k.look(t.Context(), volume("1Mi"), now.Add(sayEvery))
	if e := said(); e == "" {
		t.Error("not said again")
	}
	// A claim that grew has room.
	k.look(t.Context(), volume("8Mi"), now.Add(3*sayEvery))
	if u, _ = k.Use(claim); u.Size != 8<<20 || u.Available < 4<<20 || said() != "" {
		t.Errorf("after it grew: %+v", u)
	}
	k.look(t.Context(), nil, now.Add(4*sayEvery))
	if _, ok := k.Use(claim); ok {
		t.Error("a volume that is gone is still known")
	}
}

// A directory that takes long to add up is not added up all the time.
func TestMeasuringHasItsShare(t *testing.T) {
	k, client, pod, _ := setup(t)
	v, err := k.Volume(t.Context(), pod, "c")
	if err != nil {
		t.Fatal(err)
	}
	if v, err = client.CoreV1().PersistentVolumes().Get(t.Context(), v.Name, metav1.GetOptions{}); err != nil {
		t.Fatal(err)
	}
	v.Status.Phase = v1.VolumeBound
	claim := types.NamespacedName{Namespace: "d", Name: "c"}
	now := time.Now()
	k.uses[claim] = measured{Use: Use{Used: 7}, known: true, next: now.Add(time.Second)}
	k.look(t.Context(), []*v1.PersistentVolume{v}, now)
	if u, _ := k.Use(claim); u.Used != 7 {
		t.Errorf("measured before its time: %+v", u)
	}
	k.look(t.Context(), []*v1.PersistentVolume{v}, now.Add(2*time.Second))
	if u, _ := k.Use(claim); u.Used == 7 || !k.uses[claim].next.After(now.Add(2*time.Second)) {
		t.Errorf("not measured: %+v, next %s", u, k.uses[claim].next)
	}

	// One that cannot be measured has its pause too, and no figures.
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := measure(ended, k.cfg.Dir+"/pvc-c1", 1); err == nil {
		t.Fatal("measured after the end")
	}
	if err := os.WriteFile(projectFile(k.cfg.Dir+"/pvc-c1"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	now = now.Add(time.Hour)
	k.look(t.Context(), []*v1.PersistentVolume{v}, now)
	if _, ok := k.Use(claim); ok || !k.uses[claim].next.After(now) {
		t.Errorf("not known: %+v", k.uses[claim])
	}
}

func TestADamagedRecordIsNamed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pvc-1")
	if p, err := projectOf(dir); p != 0 || err != nil {
		t.Errorf("without a record: %d, %v", p, err)
	}
	if err := os.WriteFile(projectFile(dir), []byte("x7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := projectOf(dir); err == nil || !strings.Contains(err.Error(), ".project~pvc-1") || !strings.Contains(err.Error(), "lsattr") {
		t.Errorf("%v", err)
	}
	if err := os.WriteFile(projectFile(dir), []byte("1668022273\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if p, err := projectOf(dir); p != 1668022273 || err != nil {
		t.Errorf("%d, %v", p, err)
	}
}
