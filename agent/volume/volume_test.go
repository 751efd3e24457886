package volume_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/agenttest"
	"github.com/clusterd/clusterd/agent/volume"
)

type store struct {
	mu   sync.Mutex
	data map[string]map[string]string
}

func (s *store) set(name string, data map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.data[name] = data
}

func (s *store) ConfigMap(_ context.Context, _, name string) (*v1.ConfigMap, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d, ok := s.data[name]; ok {
		return &v1.ConfigMap{Data: d}, nil
	}
	return nil, apierrors.NewNotFound(v1.Resource("configmaps"), name)
}

func (s *store) Secret(ctx context.Context, ns, name string) (*v1.Secret, error) {
	c, err := s.ConfigMap(ctx, ns, name)
	if err != nil {
		return nil, err
	}
	out := &v1.Secret{Data: map[string][]byte{}}
	for k, v := range c.Data {
		out.Data[k] = []byte(v)
	}
	return out, nil
}

func pod(volumes ...v1.Volume) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns", UID: "u", Labels: map[string]string{"a": "1"}}, Spec: v1.PodSpec{Volumes: volumes}}
}

func configMap(name string, change ...func(*v1.ConfigMapVolumeSource)) v1.Volume {
	s := &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: name}}
	for _, c := range change {
		c(s)
	}
	return v1.Volume{Name: "v", VolumeSource: v1.VolumeSource{ConfigMap: s}}
}

func newManager(t *testing.T, change ...func(*volume.Config)) (*volume.Manager, *store, string) {
	s := &store{data: map[string]map[string]string{}}
	dir := t.TempDir()
	cfg := volume.Config{Dir: dir, Objects: s, Mounter: &agenttest.Mounter{}}
	for _, f := range change {
		f(&cfg)
	}
	return volume.New(cfg), s, dir
}

func read(t *testing.T, m *volume.Manager, p *v1.Pod, name string) string {
	t.Helper()
	src, _, err := m.Source(p, "v")
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(src, name))
	if err != nil {
		t.Error(err)
	}
	return string(b)
}

func TestConfigMapFollowsItsSource(t *testing.T) {
	m, s, _ := newManager(t)
	p := pod(configMap("cm"))
	if err := m.Setup(t.Context(), p); !apierrors.IsNotFound(errors.Unwrap(err)) || !strings.HasPrefix(err.Error(), `MountVolume.SetUp failed for volume "v" : configmaps "cm" not found`) {
		t.Fatalf("error %v", err)
	}
	s.set("cm", map[string]string{"one": "1", "two": "2"})
	if err := m.Setup(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if read(t, m, p, "one") != "1" || read(t, m, p, "two") != "2" {
		t.Error("content")
	}
	src, ro, _ := m.Source(p, "v")
	before, _ := os.Readlink(filepath.Join(src, "..data"))
	if err := m.Refresh(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if after, _ := os.Readlink(filepath.Join(src, "..data")); after != before {
		t.Error("unchanged content was written again")
	}
	if !ro {
		t.Error("rendered files must be read-only")
	}
	s.set("cm", map[string]string{"two": "2b", "three": "3"})
	if err := m.Refresh(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if read(t, m, p, "two") != "2b" || read(t, m, p, "three") != "3" {
		t.Error("new content")
	}
	if _, err := os.Lstat(filepath.Join(src, "one")); !errors.Is(err, fs.ErrNotExist) {
		t.Error("a key that is gone is still there")
	}
	entries, _ := os.ReadDir(src)
	if len(entries) != 4 { // ..data, its directory, two keys
		t.Errorf("left behind: %v", entries)
	}
	if st, err := os.Stat(filepath.Join(src, "two")); err != nil || st.Mode().Perm() != 0o644 {
		t.Errorf("mode %v %v", st.Mode(), err)
	}
}

// TestReadersSeeOneVersion: two files that change together are never seen
// apart by a reader that holds on to ..data.
func TestReadersSeeOneVersion(t *testing.T) {
	m, s, _ := newManager(t)
	p := pod(configMap("cm"))
	s.set("cm", map[string]string{"a": "0", "b": "0"})
	if err := m.Setup(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	src, _, _ := m.Source(p, "v")
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			dir, err := os.OpenRoot(filepath.Join(src, "..data"))
			if errors.Is(err, fs.ErrNotExist) {
				continue // the version it found was replaced before it was opened
			}
			if err != nil {
				t.Errorf("..data: %v", err)
				return
			}
			a, err1 := dir.ReadFile("a")
			b, err2 := dir.ReadFile("b")
			dir.Close()
			if err1 == nil && err2 == nil && string(a) != string(b) {
				t.Errorf("torn: %s %s", a, b)
			}
		}
	})
	for i := range 100 {
		v := strings.Repeat("x", i)
		s.set("cm", map[string]string{"a": v, "b": v})
		if err := m.Refresh(t.Context(), p); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	wg.Wait()
}

func TestItemsModesAndOptional(t *testing.T) {
	m, s, _ := newManager(t)
	s.set("cm", map[string]string{"k": "v", "other": "o"})
	p := pod(configMap("cm", func(c *v1.ConfigMapVolumeSource) {
		c.DefaultMode = ptr.To(int32(0o600))
		c.Items = []v1.KeyToPath{{Key: "k", Path: "deep/er/file", Mode: ptr.To(int32(0o400))}}
	}))
	if err := m.Setup(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if read(t, m, p, "deep/er/file") != "v" {
		t.Error("content")
	}
	src, _, _ := m.Source(p, "v")
	if st, err := os.Stat(filepath.Join(src, "deep/er/file")); err != nil || st.Mode().Perm() != 0o400 {
		t.Errorf("mode %v %v", st.Mode(), err)
	}
	missing := pod(configMap("cm", func(c *v1.ConfigMapVolumeSource) { c.Items = []v1.KeyToPath{{Key: "no", Path: "x"}} }))
	if err := m.Setup(t.Context(), missing); err == nil || !strings.Contains(err.Error(), "references non-existent configmap key: ns/cm: no") {
		t.Errorf("error %v", err)
	}
	opt := pod(configMap("absent", func(c *v1.ConfigMapVolumeSource) { c.Optional = ptr.To(true) }))
	opt.UID = "opt"
	if err := m.Setup(t.Context(), opt); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"../up", "/abs", "..data/x", "a/../../b", ""} {
		p := pod(configMap("cm", func(c *v1.ConfigMapVolumeSource) { c.Items = []v1.KeyToPath{{Key: "k", Path: bad}} }))
		if err := m.Setup(t.Context(), p); err == nil {
			t.Errorf("path %q was taken", bad)
		}
	}
}

func TestProjectedAndDownward(t *testing.T) {
	m, s, _ := newManager(t)
	s.set("cm", map[string]string{"c": "1"})
	s.set("sec", map[string]string{"s": "2"})
	p := pod(v1.Volume{Name: "v", VolumeSource: v1.VolumeSource{Projected: &v1.ProjectedVolumeSource{Sources: []v1.VolumeProjection{
		{ConfigMap: &v1.ConfigMapProjection{LocalObjectReference: v1.LocalObjectReference{Name: "cm"}}},
		{Secret: &v1.SecretProjection{LocalObjectReference: v1.LocalObjectReference{Name: "sec"}}},
		{DownwardAPI: &v1.DownwardAPIProjection{Items: []v1.DownwardAPIVolumeFile{
			{Path: "labels", FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.labels"}},
			{Path: "name", FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.name"}},
		}}},
	}}}})
	if err := m.Setup(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"c": "1", "s": "2", "labels": `a="1"`, "name": "p"} {
		if got := read(t, m, p, name); got != want {
			t.Errorf("%s: %q", name, got)
		}
	}
	p.Labels["b"] = "2"
	if err := m.Refresh(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if got := read(t, m, p, "labels"); got != "a=\"1\"\nb=\"2\"" {
		t.Errorf("labels %q", got)
	}
	if err := m.Teardown(t.Context(), p.UID); err != nil {
		t.Fatal(err)
	}
	if left, _ := m.Pods(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestEmptyDirAndHostPath(t *testing.T) {
	m, _, _ := newManager(t)
	p := pod(v1.Volume{Name: "v", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}})
	if err := m.Setup(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	src, ro, _ := m.Source(p, "v")
	if st, err := os.Stat(src); err != nil || st.Mode().Perm() != 0o777 || ro {
		t.Errorf("%v %v %t", st.Mode(), err, ro)
	}
	if err := os.WriteFile(filepath.Join(src, "kept"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := m.Setup(t.Context(), p); err != nil { // as after a restart of the agent
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(src, "kept")); err != nil {
		t.Error("a second setup lost the content")
	}

	host := t.TempDir()
	file := filepath.Join(host, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		path string
		kind v1.HostPathType
		ok   bool
	}{
		{filepath.Join(host, "absent"), v1.HostPathUnset, true},
		{filepath.Join(host, "new"), v1.HostPathDirectoryOrCreate, true},
		{file, v1.HostPathDirectory, false},
		{filepath.Join(host, "no"), v1.HostPathDirectory, false},
		{file, v1.HostPathFile, true},
		{filepath.Join(host, "newfile"), v1.HostPathFileOrCreate, true},
		{host, v1.HostPathFileOrCreate, false},
		{file, v1.HostPathSocket, false},
		{"/dev/null", v1.HostPathCharDev, true},
		{"/dev/null", v1.HostPathBlockDev, false},
	} {
		p := pod(v1.Volume{Name: "v", VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: tt.path, Type: &tt.kind}}})
		if err := m.Setup(t.Context(), p); (err == nil) != tt.ok {
			t.Errorf("%s as %q: %v", tt.path, tt.kind, err)
		}
	}
}

func TestUnsupported(t *testing.T) {
	m, _, _ := newManager(t)
	p := pod(v1.Volume{Name: "v", VolumeSource: v1.VolumeSource{ISCSI: &v1.ISCSIVolumeSource{}}})
	if err := m.Setup(t.Context(), p); !errors.Is(err, volume.ErrUnsupported) || !strings.Contains(err.Error(), "unknown") {
		t.Errorf("error %v", err)
	}
	huge := pod(v1.Volume{Name: "v", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{Medium: "HugePages-1e-2000000000"}}})
	if err := m.Setup(t.Context(), huge); err == nil || !strings.Contains(err.Error(), "no size of page") {
		t.Errorf("pages of a size that nothing can compute with: %v", err)
	}
	for _, uid := range []types.UID{"", "..", "a/b"} {
		if err := m.Teardown(t.Context(), uid); err == nil {
			t.Errorf("uid %q was taken for a folder", uid)
		}
	}
}

func TestSubPath(t *testing.T) {
	m, _, dir := newManager(t)
	p := pod(v1.Volume{Name: "v", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}})
	if err := m.Setup(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	src, _, _ := m.Source(p, "v")
	if _, err := m.SubPath(t.Context(), p, "v", "c", 0, "made/on/demand"); err != nil {
		t.Error(err)
	}
	for _, made := range []string{"made", "made/on/demand"} { // whoever may write to the volume may write there
		if st, err := os.Stat(filepath.Join(src, made)); err != nil || !st.IsDir() || st.Mode().Perm() != 0o777 {
			t.Errorf("%s: %v, %v", made, st, err)
		}
	}
	if err := os.WriteFile(filepath.Join(src, "file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if target, err := m.SubPath(t.Context(), p, "v", "c", 1, "file"); err != nil {
		t.Error(err)
	} else if st, err := os.Stat(target); err != nil || st.IsDir() {
		t.Errorf("a file's target is no file: %v", err)
	}
	// Links that lead out are refused, whoever made them.
	for name, to := range map[string]string{"out": "/etc", "up": "../../../..", "in": "made"} {
		if err := os.Symlink(to, filepath.Join(src, name)); err != nil {
			t.Fatal(err)
		}
	}
	for sub, ok := range map[string]bool{"out": false, "out/x": false, "up": false, "up/x": false, "in": true, "in/on": true, "../x": false, "/etc": false, "a/../../b": false} {
		if _, err := m.SubPath(t.Context(), p, "v", "c", 2, sub); (err == nil) != ok {
			t.Errorf("%s: %v", sub, err)
		}
	}
	if err := m.Teardown(t.Context(), p.UID); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "u")); !errors.Is(err, fs.ErrNotExist) {
		t.Error("folder stays")
	}
}
