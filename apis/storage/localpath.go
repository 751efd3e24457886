package storage

import (
	"path/filepath"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/apis/names"
)

// LocalPathOf returns the directory of a volume that was made on the node, whose
// volumes are below dir; ok is false for any other volume.
func LocalPathOf(v *corev1.PersistentVolume, node, dir string) (path string, ok bool) {
	if v.Labels[names.LocalPathNode] != node || v.Spec.Local == nil {
		return "", false
	}
	path = filepath.Join(dir, v.Name)
	return path, filepath.Dir(path) == filepath.Clean(dir) && v.Spec.Local.Path == path
}
