package volume_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/agenttest"
	"github.com/clusterd/clusterd/agent/volume"
)

type tokens struct{}

func (tokens) Token(_ context.Context, pod *v1.Pod, audience string, seconds int64) (string, error) {
	return pod.Name + " for " + audience, nil
}

// TestTokenModes: a token is its user's alone where the user is known.
func TestTokenModes(t *testing.T) {
	m := volume.New(volume.Config{Dir: t.TempDir(), Mounter: &agenttest.Mounter{}, Tokens: tokens{}})
	me, group := int64(os.Getuid()), int64(os.Getgid()) // owners that any user may give
	as := func(uid *int64) *v1.SecurityContext { return &v1.SecurityContext{RunAsUser: uid} }
	for _, tt := range []struct {
		name string
		pod  *v1.PodSecurityContext
		ctr  []*v1.SecurityContext
		mode string
	}{
		{"nothing is known", nil, []*v1.SecurityContext{nil}, "-rw-r--r--"},
		{"one user", &v1.PodSecurityContext{RunAsUser: &me}, []*v1.SecurityContext{nil, nil}, "-rw-------"},
		{"one user, said by each", nil, []*v1.SecurityContext{as(&me), as(&me)}, "-rw-------"},
		{"two users", &v1.PodSecurityContext{RunAsUser: &me}, []*v1.SecurityContext{nil, as(ptr.To(me + 1))}, "-rw-r--r--"},
		{"one is left to its image", nil, []*v1.SecurityContext{as(&me), nil}, "-rw-r--r--"},
		{"a group", &v1.PodSecurityContext{FSGroup: &group}, []*v1.SecurityContext{nil}, "-rw-r-----"},
		{"a group and users", &v1.PodSecurityContext{FSGroup: &group}, []*v1.SecurityContext{as(&me), as(ptr.To(me + 1))}, "-rw-r-----"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := pod(v1.Volume{Name: "v", VolumeSource: v1.VolumeSource{Projected: &v1.ProjectedVolumeSource{Sources: []v1.VolumeProjection{
				{ServiceAccountToken: &v1.ServiceAccountTokenProjection{Path: "token", Audience: "them"}},
			}}}})
			p.Spec.SecurityContext = tt.pod
			for _, c := range tt.ctr {
				p.Spec.Containers = append(p.Spec.Containers, v1.Container{SecurityContext: c})
			}
			if err := m.Setup(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			if got := read(t, m, p, "token"); got != "p for them" {
				t.Errorf("token %q", got)
			}
			src, _, _ := m.Source(p, "v")
			if st, err := os.Stat(filepath.Join(src, "token")); err != nil || st.Mode().String() != tt.mode {
				t.Errorf("mode %v, want %s (%v)", st.Mode(), tt.mode, err)
			}
			if err := m.Teardown(t.Context(), p.UID); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestUnknownSources: what a projected volume cannot hold here is named.
func TestUnknownSources(t *testing.T) {
	m, _, _ := newManager(t)
	for want, source := range map[string]v1.VolumeProjection{
		"clusterTrustBundle":  {ClusterTrustBundle: &v1.ClusterTrustBundleProjection{Name: ptr.To("b"), Path: "p"}},
		"podCertificate":      {PodCertificate: &v1.PodCertificateProjection{SignerName: "s", CredentialBundlePath: "b"}},
		"serviceAccountToken": {ServiceAccountToken: &v1.ServiceAccountTokenProjection{Path: "t"}}, // a node without an API
	} {
		p := pod(v1.Volume{Name: "v", VolumeSource: v1.VolumeSource{Projected: &v1.ProjectedVolumeSource{Sources: []v1.VolumeProjection{source}}}})
		if err := m.Setup(t.Context(), p); !errors.Is(err, volume.ErrUnsupported) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// sized remembers how large a tmpfs was made.
type sized struct {
	agenttest.Mounter
	size int64
}

func (s *sized) Tmpfs(target string, size int64) error {
	s.size = size
	return s.Mounter.Tmpfs(target, size)
}

// TestMemorySize: the smallest of what the volume, the pod and the node allow.
func TestMemorySize(t *testing.T) {
	const mi = 1 << 20
	for _, tt := range []struct {
		limit string
		pod   int64
		want  int64
	}{
		{"", 0, 0}, {"", 64 * mi, 64 * mi}, {"1Mi", 0, mi}, {"1Mi", 64 * mi, mi}, {"1Gi", 64 * mi, 64 * mi}, {"0", 64 * mi, 64 * mi},
	} {
		mounter := &sized{}
		m := volume.New(volume.Config{Dir: t.TempDir(), Mounter: mounter, Memory: func(*v1.Pod) int64 { return tt.pod }})
		e := &v1.EmptyDirVolumeSource{Medium: v1.StorageMediumMemory}
		if tt.limit != "" {
			e.SizeLimit = ptr.To(resource.MustParse(tt.limit))
		}
		if err := m.Setup(t.Context(), pod(v1.Volume{Name: "v", VolumeSource: v1.VolumeSource{EmptyDir: e}})); err != nil {
			t.Fatal(err)
		}
		if mounter.size != tt.want {
			t.Errorf("limit %q in a pod of %d: %d bytes, want %d", tt.limit, tt.pod, mounter.size, tt.want)
		}
	}
}

// TestEmptyDirKeepsItsMode: what a pod has made of its directory outlives another
// Setup, on disk and in memory; one that a crash left half made is made again.
func TestEmptyDirKeepsItsMode(t *testing.T) {
	for _, medium := range []v1.StorageMedium{v1.StorageMediumDefault, v1.StorageMediumMemory} {
		m, _, _ := newManager(t)
		p := pod(v1.Volume{Name: "v", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{Medium: medium}}})
		src, _, _ := m.Source(p, "v")
		if err := os.MkdirAll(filepath.Join(filepath.Dir(src), ".new~v"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := m.Setup(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		if st, err := os.Stat(src); err != nil || st.Mode().Perm() != 0o777 {
			t.Errorf("%q: mode %v (%v)", medium, st.Mode(), err)
		}
		if err := os.Chmod(src, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := m.Setup(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		if st, err := os.Stat(src); err != nil || st.Mode().Perm() != 0o700 {
			t.Errorf("%q: mode %v after another Setup (%v)", medium, st.Mode(), err)
		}
	}
}
