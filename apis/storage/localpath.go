package storage

import (
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
)

// What the leader, the nodes and the API server agree on about volumes that are
// folders on a node's disk.
const (
	// LocalPathProvisioner makes a folder for each claim.
	LocalPathProvisioner = "clusterd.io/local-path"
	// LocalPathNode is the label of a volume with the node that has its folder.
	LocalPathNode = "local-path.clusterd.io/node"
	// LocalPathFinalizer stays on a volume until its node has removed the folder.
	LocalPathFinalizer = "local-path.clusterd.io/folder"
	// LocalPathMade is the annotation by which the node says that the folder was
	// made: if it is missing after that, data is lost.
	LocalPathMade = "local-path.clusterd.io/made"
	// LocalPathFolder is the annotation of a Node with the folder that holds
	// those of its volumes.
	LocalPathFolder = "local-path.clusterd.io/folder"
)

// LocalPathOf returns the folder of a volume that was made on the node, whose
// volumes are below dir; ok is false for any other volume.
func LocalPathOf(v *corev1.PersistentVolume, node, dir string) (path string, ok bool) {
	if v.Labels[LocalPathNode] != node || v.Spec.Local == nil {
		return "", false
	}
	path = filepath.Join(dir, v.Name)
	return path, filepath.Dir(path) == filepath.Clean(dir) && v.Spec.Local.Path == path
}
