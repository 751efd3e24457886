package volume_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/agent/volume"
)

// signers issues what it is told to.
type signers struct {
	key, chain string
	err        error
	forgot     types.UID
}

func (s *signers) Certificate(_ context.Context, _ *v1.Pod, from volume.CertificateSource) (key, chain []byte, err error) {
	if from.Volume != "v" || from.Index != 1 || from.SignerName != "example.com/lab" {
		return nil, nil, errors.New("another source")
	}
	return []byte(s.key), []byte(s.chain), s.err
}

func (s *signers) Forget(uid types.UID) { s.forgot = uid }

func TestCertificates(t *testing.T) {
	pending := errors.New("not issued yet")
	s := &signers{err: pending}
	m, _, _ := newManager(t, func(c *volume.Config) { c.Certificates = s })
	p := pod(v1.Volume{Name: "v", VolumeSource: v1.VolumeSource{Projected: &v1.ProjectedVolumeSource{Sources: []v1.VolumeProjection{
		{DownwardAPI: &v1.DownwardAPIProjection{Items: []v1.DownwardAPIVolumeFile{{Path: "name", FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.name"}}}}},
		{PodCertificate: &v1.PodCertificateProjection{SignerName: "example.com/lab", CredentialBundlePath: "tls/b.pem", KeyPath: "k", CertificateChainPath: "c"}},
	}}}})
	me := int64(os.Getuid())
	p.Spec.SecurityContext = &v1.PodSecurityContext{RunAsUser: &me}
	p.Spec.Containers = []v1.Container{{}}
	if err := m.Setup(t.Context(), p); !errors.Is(err, pending) {
		t.Fatalf("without a certificate: %v", err)
	}
	check := func(when, key, chain string) {
		t.Helper()
		for file, want := range map[string]string{"tls/b.pem": key + chain, "k": key, "c": chain, "name": "p"} {
			if got := read(t, m, p, file); got != want {
				t.Errorf("%s: %s %q, want %q", when, file, got, want)
			}
		}
	}
	s.key, s.chain, s.err = "K1", "C1", nil
	if err := m.Setup(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	check("issued", "K1", "C1")
	src, _, _ := m.Source(p, "v")
	if st, err := os.Stat(filepath.Join(src, "k")); err != nil || st.Mode().String() != "-rw-------" {
		t.Errorf("mode of the key %v (%v)", st.Mode(), err)
	}
	// As after a restart of the agent, which knows no key.
	s.key, s.chain, s.err = "", "", pending
	if err := m.Setup(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	check("while the next is pending", "K1", "C1")
	s.key, s.chain, s.err = "K2", "C2", nil
	if err := m.Refresh(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	check("renewed", "K2", "C2")
	if err := m.Teardown(t.Context(), p.UID); err != nil || s.forgot != p.UID {
		t.Errorf("%v, forgot %q", err, s.forgot)
	}
}
