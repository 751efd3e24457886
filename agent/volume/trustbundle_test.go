package volume_test

import (
	"context"
	"encoding/pem"
	"os"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/volume"
)

type bundles []*certificatesv1.ClusterTrustBundle

func (b bundles) TrustBundle(_ context.Context, name string) (*certificatesv1.ClusterTrustBundle, error) {
	for _, one := range b {
		if one.Name == name {
			return one, nil
		}
	}
	return nil, apierrors.NewNotFound(certificatesv1.Resource("clustertrustbundle"), name)
}

func (b bundles) TrustBundlesOf(_ context.Context, signer string) (out []*certificatesv1.ClusterTrustBundle, _ error) {
	for _, one := range b {
		if one.Spec.SignerName == signer {
			out = append(out, one)
		}
	}
	return out, nil
}

func TestTrustBundles(t *testing.T) {
	anchor := func(text string) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte(text)}))
	}
	bundle := func(name, signer, tier string, anchors ...string) *certificatesv1.ClusterTrustBundle {
		b := &certificatesv1.ClusterTrustBundle{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"tier": tier}}}
		b.Spec.SignerName = signer
		for _, a := range anchors {
			b.Spec.TrustBundle += "a remark\n" + anchor(a)
		}
		return b
	}
	m, _, _ := newManager(t, func(c *volume.Config) {
		c.TrustBundles = bundles{bundle("own", "", "", "A"), bundle("s:x:1", "s/x", "live", "B", "C"), bundle("s:x:2", "s/x", "old", "C", "D"), bundle("s:y:1", "s/y", "live", "E")}
	})
	live := &metav1.LabelSelector{MatchLabels: map[string]string{"tier": "live"}}
	for name, tt := range map[string]struct {
		source v1.ClusterTrustBundleProjection
		want   string // of the file, or else
		fault  string // of Setup
	}{
		"by name":                    {v1.ClusterTrustBundleProjection{Name: ptr.To("own")}, anchor("A"), ""},
		"missing":                    {v1.ClusterTrustBundleProjection{Name: ptr.To("none")}, "", `"none" not found`},
		"missing, optional":          {v1.ClusterTrustBundleProjection{Name: ptr.To("none"), Optional: ptr.To(true)}, "", ""},
		"all of a signer":            {v1.ClusterTrustBundleProjection{SignerName: ptr.To("s/x"), LabelSelector: &metav1.LabelSelector{}}, anchor("B") + anchor("C") + anchor("D"), ""},
		"with labels":                {v1.ClusterTrustBundleProjection{SignerName: ptr.To("s/x"), LabelSelector: live}, anchor("B") + anchor("C"), ""},
		"no selector":                {v1.ClusterTrustBundleProjection{SignerName: ptr.To("s/x")}, "", `no ClusterTrustBundle of signer "s/x"`},
		"no selector, optional":      {v1.ClusterTrustBundleProjection{SignerName: ptr.To("s/x"), Optional: ptr.To(true)}, "", ""},
		"none of a signer":           {v1.ClusterTrustBundleProjection{SignerName: ptr.To("s/z"), LabelSelector: live}, "", `no ClusterTrustBundle of signer "s/z" has labels that fit "tier=live"`},
		"none of a signer, optional": {v1.ClusterTrustBundleProjection{SignerName: ptr.To("s/z"), LabelSelector: live, Optional: ptr.To(true)}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			tt.source.Path = "ca/roots.pem"
			p := pod(v1.Volume{Name: "v", VolumeSource: v1.VolumeSource{Projected: &v1.ProjectedVolumeSource{Sources: []v1.VolumeProjection{{ClusterTrustBundle: &tt.source}}}}})
			err := m.Setup(t.Context(), p)
			if tt.fault != "" {
				if err == nil || !strings.Contains(err.Error(), tt.fault) {
					t.Errorf("%v, want %s", err, tt.fault)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			dir, _, err := m.Source(p, "v")
			if err != nil {
				t.Fatal(err)
			}
			if got, err := os.ReadFile(dir + "/ca/roots.pem"); err != nil || string(got) != tt.want {
				t.Errorf("%q %v, want %q", got, err, tt.want)
			}
			if err := m.Teardown(t.Context(), p.UID); err != nil {
				t.Error(err)
			}
		})
	}
}
