package volume

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Certificates gets certificates for pods, each with a key of its own.
type Certificates interface {
	// Certificate returns the newest key and chain of one source of a pod's
	// volume, both in PEM. It asks the signer for one where that is due, and does
	// not wait: while there is none it fails.
	Certificate(ctx context.Context, pod *v1.Pod, source CertificateSource) (key, chain []byte, err error)
	// Forget drops all that is known of a pod.
	Forget(pod types.UID)
}

// CertificateSource is a podCertificate source of a projected volume.
type CertificateSource struct {
	Volume string
	Index  int // among the volume's sources
	*v1.PodCertificateProjection
}

// certificate adds the key and the certificates of a source. A pod that runs
// keeps those it has while others are asked for: an agent that was started
// again knows no keys any more.
func (r renderer) certificate(ctx context.Context, s CertificateSource, def int32) error {
	if r.m.cfg.Certificates == nil {
		return fmt.Errorf("%w: podCertificate source of a projected volume, without an API", ErrUnsupported)
	}
	key, chain, err := r.m.cfg.Certificates.Certificate(ctx, r.pod, s)
	files := []struct {
		path string
		data []byte
	}{
		{s.CredentialBundlePath, append(append([]byte{}, key...), chain...)}, {s.KeyPath, key}, {s.CertificateChainPath, chain},
	}
	for _, f := range files {
		if f.path == "" {
			continue
		}
		out := r.secretFile(f.data, def)
		if err != nil {
			old, oldErr := os.ReadFile(filepath.Join(r.dir, dataLink, filepath.Clean("/"+f.path)))
			if oldErr != nil {
				return err
			}
			out.data = old
		}
		if err := r.add(f.path, out); err != nil {
			return err
		}
	}
	return nil
}

// secretFile is a file with a secret of the pod: readable by its user alone,
// where that is known: the fsGroup, to which the writer opens every file, or
// the one user that all containers run as (KEP-2451).
func (r renderer) secretFile(data []byte, def int32) file {
	f := file{data: data, mode: def}
	if fsGroup(r.pod) != nil {
		f.mode = 0o600
	} else if f.uid = onlyUser(r.pod); f.uid != nil {
		f.mode = 0o600
	}
	return f
}
