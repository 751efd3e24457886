package checkpoint

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/apis/names"
)

var key = bytes.Repeat([]byte{7}, KeySize)

func open(t *testing.T, dir string, key []byte) *Store {
	t.Helper()
	s, err := Open(dir, key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func runs(name string) *v1.Pod {
	now := metav1.NewTime(time.Unix(1e9, 0))
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID("uid-" + name)},
		Spec:       v1.PodSpec{NodeName: "n1", RestartPolicy: v1.RestartPolicyAlways},
		Status:     v1.PodStatus{Phase: v1.PodRunning, StartTime: &now},
	}
}

const word = "a-word-of-a-secret"

func withSecret(t *testing.T, name string) *Pod {
	t.Helper()
	o, err := Encode(&v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s", Namespace: "default"}, StringData: map[string]string{"k": word}})
	must(t, err)
	return &Pod{Pod: runs(name), Objects: []Object{o}, Tokens: []Token{{Seconds: 3607, Token: word, Ends: time.Unix(2e9, 0).UTC()}}}
}

// TestStore: what is put is loaded again; a record that is damaged, of another version,
// of another pod or of another key is left out with the reason, and the others are not.
func TestStore(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, key)
	want := withSecret(t, "a")
	must(t, s.PutPod(want))
	for _, name := range []string{"flipped", "empty", "future", "renamed"} {
		must(t, s.PutPod(withSecret(t, name)))
	}
	must(t, s.PutPod(&Pod{Pod: runs("gone")}))
	must(t, s.RemovePods("uid-gone"))
	must(t, s.RemovePods("uid-gone"))
	must(t, s.PutCluster(&Cluster{Node: &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}}))

	file := func(name string) string { return filepath.Join(dir, podsDir, "uid-"+name) }
	b, err := os.ReadFile(file("flipped"))
	must(t, err)
	if bytes.Contains(b, []byte(word)) {
		t.Error("the Secret is in the file")
	}
	b[len(b)/2] ^= 1
	must(t, os.WriteFile(file("flipped"), b, 0o600))
	must(t, os.WriteFile(file("empty"), nil, 0o600))
	must(t, os.WriteFile(file("future"), []byte(`{"version":2}`), 0o600))
	must(t, os.Rename(file("renamed"), file("other")))

	pods, cluster, faults := open(t, dir, key).Load()
	if len(pods) != 1 || cluster == nil || cluster.Node.Name != "n1" {
		t.Fatalf("%d pods, %v", len(pods), cluster)
	}
	if diff := cmp.Diff(want, pods[0]); diff != "" {
		t.Error(diff)
	}
	var all []string
	for _, err := range faults {
		all = append(all, err.Error())
	}
	text := strings.Join(all, "\n")
	for _, name := range []string{"uid-flipped: it is damaged", "uid-empty: it is damaged", "uid-future: version 2 is not known", "uid-other: it is damaged"} {
		if !strings.Contains(text, name) {
			t.Errorf("no %q in:\n%s", name, text)
		}
	}
	if len(faults) != 4 {
		t.Errorf("faults:\n%s", text)
	}
	if pods, cluster, faults := open(t, dir, bytes.Repeat([]byte{8}, KeySize)).Load(); len(pods) > 0 || cluster != nil || len(faults) != 6 {
		t.Errorf("with another key: %d pods, %v, %v", len(pods), cluster, faults)
	}
}

// TestStoreWritesChanges: a record is written again when it has changed, and not else, also
// by the next process.
func TestStoreWritesChanges(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, key)
	must(t, s.PutPod(withSecret(t, "a")))
	file := filepath.Join(dir, podsDir, "uid-a")
	written := func(put func() error) bool {
		before, err := os.ReadFile(file)
		must(t, err)
		must(t, put())
		after, err := os.ReadFile(file)
		must(t, err)
		return !bytes.Equal(before, after) // the nonce is another each time
	}
	if written(func() error { return s.PutPod(withSecret(t, "a")) }) {
		t.Error("the same record was written again")
	}
	next := open(t, dir, key)
	if pods, _, faults := next.Load(); len(pods) != 1 || len(faults) > 0 {
		t.Fatal(pods, faults)
	}
	if written(func() error { return next.PutPod(withSecret(t, "a")) }) {
		t.Error("the same record was written again by the next process")
	}
	if !written(func() error {
		p := withSecret(t, "a")
		p.Pod.Status.Phase = v1.PodPending
		return next.PutPod(p)
	}) {
		t.Error("a changed record was not written")
	}
}

// TestUnconfirmed: which pods are is read without the key, until none is.
func TestUnconfirmed(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, key)
	must(t, s.MarkUnconfirmed(time.Now(), []types.UID{"a", "b"}))
	if u, err := ReadUnconfirmed(dir); err != nil || len(u.Pods) != 2 {
		t.Error(u, err)
	}
	must(t, s.MarkUnconfirmed(time.Time{}, nil))
	if u, err := ReadUnconfirmed(dir); err != nil || len(u.Pods) != 0 {
		t.Error(u, err)
	}
	must(t, os.WriteFile(filepath.Join(dir, unconfirmedFile), []byte(`{"version":2}`), 0o600))
	if _, err := ReadUnconfirmed(dir); err == nil || !strings.Contains(err.Error(), "version 2") {
		t.Error(err)
	}
}

// TestStartable: what may run elsewhere by now, and what had ended, is not started.
func TestStartable(t *testing.T) {
	claimed := func(pod *v1.Pod) {
		pod.Spec.Volumes = []v1.Volume{{Name: "v", VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}}}
	}
	volume := func(source v1.PersistentVolumeSource) []Claim {
		return []Claim{{
			Claim:  &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "c"}},
			Volume: &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: v1.PersistentVolumeSpec{PersistentVolumeSource: source}},
		}}
	}
	for name, tc := range map[string]struct {
		change func(*Pod)
		reason string // "": it may be started
	}{
		"it ran":          {func(*Pod) {}, ""},
		"never restarted": {func(p *Pod) { p.Pod.Spec.RestartPolicy = v1.RestartPolicyNever }, ""},
		"of another node": {func(p *Pod) { p.Pod.Spec.NodeName = "n2" }, `bound to node "n2"`},
		"deleted":         {func(p *Pod) { p.Pod.DeletionTimestamp = &metav1.Time{} }, "ending"},
		"done":            {func(p *Pod) { p.Pod.Status.Phase = v1.PodSucceeded }, "ending"},
		"failed":          {func(p *Pod) { p.Pod.Status.Phase = v1.PodFailed }, "ending"},
		"mirror":          {func(p *Pod) { p.Pod.Annotations = map[string]string{v1.MirrorPodAnnotationKey: "x"} }, "ending"},
		"an emptyDir":     {func(p *Pod) { p.Pod.Spec.Volumes = []v1.Volume{{Name: "e"}} }, ""},
		"an NFS directory": {func(p *Pod) {
			p.Pod.Spec.Volumes = []v1.Volume{{Name: "e", VolumeSource: v1.VolumeSource{NFS: &v1.NFSVolumeSource{}}}}
		}, `"e" is a directory of an NFS server`},
		"fenced": {func(p *Pod) {
			p.Pod.Status.Conditions = []v1.PodCondition{{Type: names.SelfFencingCondition, Status: v1.ConditionTrue}}
		}, "self-fencing"},
		"no longer fenced": {func(p *Pod) {
			p.Pod.Status.Conditions = []v1.PodCondition{{Type: names.SelfFencingCondition, Status: v1.ConditionFalse}}
		}, ""},
		"unknown volume": {func(p *Pod) { claimed(p.Pod) }, `claim "c" is not on record`},
		"a disk of its own": {func(p *Pod) {
			claimed(p.Pod)
			p.Claims = volume(v1.PersistentVolumeSource{Local: &v1.LocalVolumeSource{Path: "/x"}})
		}, ""},
		"a disk of all": {func(p *Pod) {
			claimed(p.Pod)
			p.Claims = volume(v1.PersistentVolumeSource{CSI: &v1.CSIPersistentVolumeSource{}})
		}, `other nodes reach volume "pv"`},
	} {
		p := &Pod{Pod: runs("a")}
		tc.change(p)
		err := p.Startable("n1")
		if tc.reason == "" && err != nil || tc.reason != "" && (err == nil || !strings.Contains(err.Error(), tc.reason)) {
			t.Errorf("%s: %v, not %q", name, err, tc.reason)
		}
	}
}
