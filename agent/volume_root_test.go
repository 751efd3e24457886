package agent_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	ocispec "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/image"
)

// addImage brings an image of a few files to the machine.
func (m *machine) addImage(ref string, files map[string]string) {
	m.t.Helper()
	var layer, out bytes.Buffer
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
	if err := tarball.Write(must(name.NewTag(ref)), img, &out); err != nil {
		m.t.Fatal(err)
	}
	if _, err := m.images.Load(m.t.Context(), &out); err != nil {
		m.t.Fatal(err)
	}
}

// file reads a file in a serving container.
func (m *machine) file(p *v1.Pod, path string) string {
	m.t.Helper()
	return m.fetch(p, "/file?name="+url.QueryEscape(path))
}

// TestRootImageVolume: the files of an image in two containers of a pod, which
// cannot change or execute them; the image stays as long as the pod does.
func TestRootImageVolume(t *testing.T) {
	m := newMachine(t)
	const ref = "example.com/model:1"
	m.addImage(ref, map[string]string{"weights": "42", "deep/tool": "#!/bin/app\n"})
	one, two := app("one", "serve", "8080"), app("two", "serve", "8081")
	one.VolumeMounts = []v1.VolumeMount{{Name: "model", MountPath: "/model"}, {Name: "model", MountPath: "/tools", SubPath: "deep"}}
	two.VolumeMounts = one.VolumeMounts[:1]
	p := newPod("web", one, two)
	p.Spec.Volumes = []v1.Volume{{Name: "model", VolumeSource: v1.VolumeSource{Image: &v1.ImageVolumeSource{Reference: ref, PullPolicy: v1.PullIfNotPresent}}}}
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
	if out, code := m.exec("web", "two", nil, "/bin/app", "write", "/model/new", "x"); code != 1 || !strings.Contains(out, "read-only file system") {
		t.Errorf("a write: %d %q", code, out)
	}
	if err := m.images.Remove(t.Context(), ref); !errors.Is(err, image.ErrInUse) {
		t.Errorf("removing the image below the volume: %v", err)
	}
	st := p.Status.ContainerStatuses[1].VolumeMounts
	if img, _, err := m.images.Get(ref); err != nil || len(st) != 1 || st[0].VolumeStatus == nil || st[0].VolumeStatus.Image.ImageRef != img.ID {
		t.Errorf("status %+v (%v)", st, err)
	}

	// Another agent goes on with what is mounted.
	m.stop()
	m.start()
	m.ready("web")
	if got := m.file(p, "/model/weights"); got != "42" {
		t.Errorf("after a restart of the agent: weights %q", got)
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
