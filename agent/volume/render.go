package volume

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/clusterd/clusterd/agent/internal/fieldref"
)

// file is one rendered file.
type file struct {
	data []byte
	mode int32
	// uid owns the file, nil: root.
	uid *int64
}

// render computes the files of a volume from its sources.
func (m *Manager) render(ctx context.Context, pod *v1.Pod, v *v1.Volume) (map[string]file, error) {
	out := map[string]file{}
	r := renderer{m: m, pod: pod, out: out}
	var err error
	switch {
	case v.ConfigMap != nil:
		s := v.ConfigMap
		err = r.configMap(ctx, s.Name, s.Items, mode(s.DefaultMode), optional(s.Optional))
	case v.Secret != nil:
		s := v.Secret
		err = r.secret(ctx, s.SecretName, s.Items, mode(s.DefaultMode), optional(s.Optional))
	case v.DownwardAPI != nil:
		err = r.downward(v.DownwardAPI.Items, mode(v.DownwardAPI.DefaultMode))
	case v.Projected != nil:
		def := mode(v.Projected.DefaultMode)
		r.dir = m.path(pod.UID, v)
		for i, s := range v.Projected.Sources {
			switch {
			case s.ConfigMap != nil:
				err = r.configMap(ctx, s.ConfigMap.Name, s.ConfigMap.Items, def, optional(s.ConfigMap.Optional))
			case s.Secret != nil:
				err = r.secret(ctx, s.Secret.Name, s.Secret.Items, def, optional(s.Secret.Optional))
			case s.DownwardAPI != nil:
				err = r.downward(s.DownwardAPI.Items, def)
			case s.ServiceAccountToken != nil:
				err = r.token(ctx, s.ServiceAccountToken, def)
			case s.ClusterTrustBundle != nil:
				err = r.anchors(ctx, s.ClusterTrustBundle, def)
			case s.PodCertificate != nil:
				err = r.certificate(ctx, CertificateSource{Volume: v.Name, Index: i, PodCertificateProjection: s.PodCertificate}, def)
			default:
				err = fmt.Errorf("%w: a source of a projected volume that this node does not know", ErrUnsupported)
			}
			if err != nil {
				break
			}
		}
	}
	return out, err
}

type renderer struct {
	m   *Manager
	pod *v1.Pod
	out map[string]file
	dir string // of the volume, with what it holds so far
}

func (r renderer) configMap(ctx context.Context, name string, items []v1.KeyToPath, def int32, optional bool) error {
	o, err := r.m.cfg.Objects.ConfigMap(ctx, r.pod.Namespace, name)
	if apierrors.IsNotFound(err) && optional {
		return nil
	}
	if err != nil {
		return err
	}
	data := map[string][]byte{}
	for k, v := range o.Data {
		data[k] = []byte(v)
	}
	for k, v := range o.BinaryData {
		data[k] = v
	}
	return r.keys("configmap", name, data, items, def, optional)
}

func (r renderer) secret(ctx context.Context, name string, items []v1.KeyToPath, def int32, optional bool) error {
	o, err := r.m.cfg.Objects.Secret(ctx, r.pod.Namespace, name)
	if apierrors.IsNotFound(err) && optional {
		return nil
	}
	if err != nil {
		return err
	}
	return r.keys("secret", name, o.Data, items, def, optional)
}

// keys adds all keys, or just the ones that items name.
func (r renderer) keys(kind, name string, data map[string][]byte, items []v1.KeyToPath, def int32, optional bool) error {
	if len(items) == 0 {
		for k, v := range data {
			if err := r.add(k, file{data: v, mode: def}); err != nil {
				return err
			}
		}
		return nil
	}
	for _, it := range items {
		v, ok := data[it.Key]
		if !ok {
			if optional {
				continue
			}
			return fmt.Errorf("references non-existent %s key: %s/%s: %s", kind, r.pod.Namespace, name, it.Key)
		}
		f := file{data: v, mode: def}
		if it.Mode != nil {
			f.mode = *it.Mode
		}
		if err := r.add(it.Path, f); err != nil {
			return err
		}
	}
	return nil
}

// anchors adds the certificates of the bundles that a source names, merged. One
// that may be missing, and is, gives an empty file.
func (r renderer) anchors(ctx context.Context, p *v1.ClusterTrustBundleProjection, def int32) error {
	if r.m.cfg.TrustBundles == nil {
		return fmt.Errorf("%w: clusterTrustBundle source of a projected volume, without an API", ErrUnsupported)
	}
	bundles, err := r.bundles(ctx, p)
	if err != nil {
		return err
	}
	return r.add(p.Path, file{data: mergeAnchors(bundles), mode: def})
}

func (r renderer) bundles(ctx context.Context, p *v1.ClusterTrustBundleProjection) ([]*certificatesv1.ClusterTrustBundle, error) {
	if p.Name != nil {
		b, err := r.m.cfg.TrustBundles.TrustBundle(ctx, *p.Name)
		if apierrors.IsNotFound(err) && optional(p.Optional) {
			return nil, nil
		}
		return []*certificatesv1.ClusterTrustBundle{b}, err
	}
	// No selector selects nothing, an empty one everything.
	selector, err := metav1.LabelSelectorAsSelector(p.LabelSelector)
	if err != nil {
		return nil, fmt.Errorf("labelSelector of a clusterTrustBundle source: %w", err)
	}
	signer := ""
	if p.SignerName != nil {
		signer = *p.SignerName
	}
	all, err := r.m.cfg.TrustBundles.TrustBundlesOf(ctx, signer)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(slices.Clone(all), func(b *certificatesv1.ClusterTrustBundle) bool { return !selector.Matches(labels.Set(b.Labels)) })
	if len(all) == 0 && !optional(p.Optional) {
		return nil, fmt.Errorf("no ClusterTrustBundle of signer %q has labels that fit %q", signer, metav1.FormatLabelSelector(p.LabelSelector))
	}
	return all, nil
}

func (r renderer) downward(items []v1.DownwardAPIVolumeFile, def int32) error {
	for _, it := range items {
		f := file{mode: def}
		if it.Mode != nil {
			f.mode = *it.Mode
		}
		switch {
		case it.FieldRef != nil:
			v, ok := fieldref.Metadata(r.pod, it.FieldRef.FieldPath)
			if !ok {
				return fmt.Errorf("unsupported fieldPath: %s", it.FieldRef.FieldPath)
			}
			f.data = []byte(v)
		case it.ResourceFieldRef != nil:
			var alloc v1.ResourceList
			if r.m.cfg.Allocatable != nil {
				alloc = r.m.cfg.Allocatable()
			}
			v, err := fieldref.Resource(r.pod, it.ResourceFieldRef, it.ResourceFieldRef.ContainerName, alloc)
			if err != nil {
				return err
			}
			f.data = []byte(v)
		}
		if err := r.add(it.Path, f); err != nil {
			return err
		}
	}
	return nil
}

func (r renderer) token(ctx context.Context, t *v1.ServiceAccountTokenProjection, def int32) error {
	if r.m.cfg.Tokens == nil {
		return fmt.Errorf("%w: serviceAccountToken", ErrUnsupported)
	}
	expires := int64(3600)
	if t.ExpirationSeconds != nil {
		expires = *t.ExpirationSeconds
	}
	tok, err := r.m.cfg.Tokens.Token(ctx, r.pod, t.Audience, expires)
	if err != nil {
		return fmt.Errorf("failed to fetch token: %w", err)
	}
	return r.add(t.Path, r.secretFile([]byte(tok), def))
}

// onlyUser is the user all containers run as, nil when they differ or it is
// left to the image.
func onlyUser(pod *v1.Pod) *int64 {
	var uid *int64
	all := append(append([]v1.Container{}, pod.Spec.InitContainers...), pod.Spec.Containers...)
	for _, c := range all {
		var u *int64
		if pod.Spec.SecurityContext != nil {
			u = pod.Spec.SecurityContext.RunAsUser
		}
		if c.SecurityContext != nil && c.SecurityContext.RunAsUser != nil {
			u = c.SecurityContext.RunAsUser
		}
		if u == nil || uid != nil && *uid != *u {
			return nil
		}
		uid = u
	}
	return uid
}

// add takes a file under its path inside the volume; the API's validation has
// refused bad paths, this refuses them again where they would do harm.
func (r renderer) add(p string, f file) error {
	clean := path.Clean(p)
	if p == "" || path.IsAbs(p) || clean == "." || clean == ".." || strings.HasPrefix(clean, "../") || strings.HasPrefix(clean, "..") {
		return fmt.Errorf("invalid path %q in a volume", p)
	}
	r.out[clean] = f
	return nil
}

func mode(m *int32) int32 {
	if m == nil {
		return 0o644
	}
	return *m
}

func optional(b *bool) bool { return b != nil && *b }
