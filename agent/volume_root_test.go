package agent_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	ocispec "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/features"
)

// pushImage brings an image of a few files to a registry on the loopback and
// returns its name there; manifests counts how often it was asked for.
func (m *machine) pushImage(files map[string]string) (ref string, manifests *atomic.Int32) {
	m.t.Helper()
	manifests = &atomic.Int32{}
	images := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPut && strings.Contains(r.URL.Path, "/manifests/") {
			manifests.Add(1)
		}
		images.ServeHTTP(w, r)
	}))
	m.t.Cleanup(server.Close)
	host := strings.TrimPrefix(server.URL, "http://")
	m.plainHTTP(host)
	ref = host + "/model:1"
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for path, content := range files {
		if err := w.WriteHeader(&tar.Header{Name: path, Mode: 0o755, Size: int64(len(content))}); err != nil {
			m.t.Fatal(err)
		}
		if _, err := w.Write([]byte(content)); err != nil {
			m.t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		m.t.Fatal(err)
	}
	l := must(tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer.Bytes())), nil }))
	img := must(mutate.AppendLayers(empty.Image, l))
	img = must(mutate.ConfigFile(img, &ocispec.ConfigFile{OS: "linux", Architecture: goarch(), RootFS: must(img.ConfigFile()).RootFS}))
	if err := remote.Write(must(name.NewTag(ref)), img); err != nil {
		m.t.Fatal(err)
	}
	manifests.Store(0)
	return ref, manifests
}

// file reads a file in a serving container.
func (m *machine) file(p *v1.Pod, path string) string {
	m.t.Helper()
	return m.fetch(p, "/file?name="+url.QueryEscape(path))
}

// TestRootImageVolume: the files of an image in two containers of a pod, which
// cannot change or execute them; the image stays as long as the pod does.
func TestRootImageVolume(t *testing.T) {
	features.Conforms(t, 284)
	m := newMachine(t)
	ref, asked := m.pushImage(map[string]string{"weights": "42", "deep/tool": "#!/bin/app\n"})
	one, two := app("one", "serve", "8080"), app("two", "serve", "8081")
	one.VolumeMounts = []v1.VolumeMount{{Name: "model", MountPath: "/model"}, {Name: "model", MountPath: "/tools", SubPath: "deep"}}
	two.VolumeMounts = one.VolumeMounts[:1]
	p := newPod("web", one, two)
	p.Spec.Volumes = []v1.Volume{{Name: "model", VolumeSource: v1.VolumeSource{Image: &v1.ImageVolumeSource{Reference: ref, PullPolicy: v1.PullAlways}}}}
	m.create(p)
	p = m.ready("web")
	if got := m.file(p, "/model/weights"); got != "42" {
		t.Errorf("weights %q", got)
	}
	if got := m.file(p, "/tools/tool"); got != "#!/bin/app\n" {
		t.Errorf("by its subPath: %q", got)
	}
	for _, at := range []string{"/model", "/tools"} {
		flags := mountFlags(t, m.file(p, "/proc/self/mountinfo"), at)
		for _, want := range []string{"ro", "noexec", "nosuid", "nodev"} {
			if !slices.Contains(flags, want) {
				t.Errorf("%s is mounted %v, want %s", at, flags, want)
			}
		}
	}
	if got := m.fetch(p, "/fill?size=1&name=/model/new"); !strings.Contains(got, "read-only file system") {
		t.Errorf("a write: %q", got)
	}
	if err := m.images.Remove(t.Context(), ref); !errors.Is(err, image.ErrInUse) {
		t.Errorf("removing the image below the volume: %v", err)
	}
	st := p.Status.ContainerStatuses[1].VolumeMounts
	if img, _, err := m.images.Get(ref); err != nil || len(st) != 1 || st[0].VolumeStatus == nil || st[0].VolumeStatus.Image.ImageRef != img.RepoDigests[0] {
		t.Errorf("status %+v (%v)", st, err)
	}

	// Another agent goes on with what is mounted.
	m.stop()
	m.start()
	m.ready("web")
	if got := m.file(p, "/model/weights"); got != "42" {
		t.Errorf("after a restart of the agent: weights %q", got)
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("the registry was asked %d times, want once in the pod's life", n)
	}
	m.delete("web", 0)
	m.eventually("the volume's end", func() bool {
		owners, err := m.images.VolumeOwners()
		return err == nil && len(owners) == 0
	})
	if err := m.images.Remove(t.Context(), ref); err != nil {
		t.Error(err)
	}
}

// mountFlags are the options of what mountinfo (proc(5)) tells to be mounted at
// a place.
func mountFlags(t *testing.T, mountinfo, at string) []string {
	t.Helper()
	for line := range strings.Lines(mountinfo) {
		if f := strings.Fields(line); len(f) > 5 && f[4] == at {
			return strings.Split(f[5], ",")
		}
	}
	t.Errorf("nothing is mounted at %s:\n%s", at, mountinfo)
	return nil
}

// TestRootLocalStorageLimits: pods that take more of the disk than they may are
// evicted, with the reason, and no others.
func TestRootLocalStorageLimits(t *testing.T) {
	m := newMachine(t)
	limited := func(c v1.Container, limit string) v1.Container {
		c.Resources.Limits = v1.ResourceList{v1.ResourceEphemeralStorage: resource.MustParse(limit)}
		return c
	}
	emptyDir := func(p *v1.Pod, limit string) *v1.Pod {
		e := &v1.EmptyDirVolumeSource{}
		if limit != "" {
			e.SizeLimit = ptr.To(resource.MustParse(limit))
		}
		p.Spec.Volumes = []v1.Volume{{Name: "cache", VolumeSource: v1.VolumeSource{EmptyDir: e}}}
		p.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "cache", MountPath: "/cache"}}
		return p
	}
	pods := []struct {
		pod     *v1.Pod
		file    string // filled with 3 MiB
		message string // "": it stays
	}{
		{emptyDir(newPod("volume", app("web")), "1Mi"), "/cache/big", `Usage of EmptyDir volume "cache" exceeds the limit "1Mi". `},
		// The pod as a whole is over the sum of its containers' limits before a
		// single container is told of.
		{newPod("container", limited(app("web"), "1Mi"), limited(app("other", "serve", "8081"), "20Mi")), "/data/big",
			`Container web exceeded its local ephemeral storage limit "1Mi". `},
		{emptyDir(newPod("whole", limited(app("web"), "2Mi")), ""), "/cache/big", "Pod ephemeral local storage usage exceeds the total limit of containers 2Mi. "},
		{emptyDir(newPod("within", limited(app("web"), "20Mi")), "10Mi"), "/cache/big", ""},
		{emptyDir(newPod("free", app("web")), ""), "/cache/big", ""},
	}
	for _, tt := range pods {
		m.create(tt.pod)
	}
	for _, tt := range pods {
		p := m.ready(tt.pod.Name)
		m.fetch(p, "/") // it listens
		// Who is evicted may be gone before the answer.
		res, err := http.Get("http://" + p.Status.PodIP + ":8080/fill?size=3145728&name=" + tt.file)
		if err == nil {
			res.Body.Close()
		} else if tt.message == "" {
			t.Fatal(err)
		}
	}
	for _, tt := range pods {
		if tt.message == "" {
			continue
		}
		m.eventually("eviction of "+tt.pod.Name, func() bool { return m.get(tt.pod.Name).Status.Phase == v1.PodFailed })
		st := m.get(tt.pod.Name).Status
		if st.Reason != "Evicted" || st.Message != tt.message {
			t.Errorf("%s: %s %q, want %q", tt.pod.Name, st.Reason, st.Message, tt.message)
		}
		for _, c := range st.Conditions {
			if c.Type == v1.DisruptionTarget {
				t.Errorf("%s went by its own doing, and yet: %+v", tt.pod.Name, c)
			}
		}
	}
	for _, name := range []string{"within", "free"} {
		if st := m.ready(name).Status; st.Phase != v1.PodRunning {
			t.Errorf("%s: %+v", name, st)
		}
	}
}

// TestRootMemoryVolumeSize: a volume in memory holds what its limit says, and no
// more than the pod may use.
func TestRootMemoryVolumeSize(t *testing.T) {
	m := newMachine(t)
	c := app("web")
	c.Resources.Limits = v1.ResourceList{v1.ResourceMemory: resource.MustParse("64Mi")}
	memory := func(name, limit string) v1.Volume {
		e := &v1.EmptyDirVolumeSource{Medium: v1.StorageMediumMemory}
		if limit != "" {
			e.SizeLimit = ptr.To(resource.MustParse(limit))
		}
		c.VolumeMounts = append(c.VolumeMounts, v1.VolumeMount{Name: name, MountPath: "/" + name})
		return v1.Volume{Name: name, VolumeSource: v1.VolumeSource{EmptyDir: e}}
	}
	volumes := []v1.Volume{memory("small", "1Mi"), memory("open", ""), memory("vast", "1Gi")}
	p := newPod("web", c)
	p.Spec.Volumes = volumes
	m.create(p)
	p = m.ready("web")
	table := m.file(p, "/proc/self/mountinfo")
	for at, want := range map[string]string{"/small": "size=1024k", "/open": "size=65536k", "/vast": "size=65536k"} {
		found := false
		for line := range strings.Lines(table) {
			found = found || strings.Contains(line, " "+at+" ") && strings.Contains(line, " - tmpfs ") && strings.Contains(line, want)
		}
		if !found {
			t.Errorf("%s is no tmpfs of %s:\n%s", at, want, table)
		}
	}
	if got := m.fetch(p, "/fill?size=3145728&name=/small/big"); !strings.Contains(got, "no space left on device") {
		t.Errorf("more than it holds: %q", got)
	}
}
