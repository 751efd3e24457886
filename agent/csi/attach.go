package csi

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// attachment names the VolumeAttachment of a volume at a node, by the rule that
// external attachers know.
func attachment(handle, driver, node string) string {
	return fmt.Sprintf("csi-%x", sha256.Sum256([]byte(handle+driver+node)))
}

// awaitAttached waits until the volume is attached to this node, and gives what
// the driver's controller has said about it.
//
// The node first says that the volume is in use, and goes by an object of the
// API that came after: the leader, which takes a volume back by a write that
// names the version it has read, then either sees that it is in use, or has
// taken it back before.
func (m *Manager) awaitAttached(ctx context.Context, r *record) (map[string]string, error) {
	name := r.unique()
	if err := m.cfg.Node.StatusWritten(ctx); err != nil {
		return nil, fmt.Errorf("tell that volume %s is in use: %w", r.Spec, err)
	}
	err := m.cfg.Node.Until(ctx, func(n *v1.Node) bool {
		return slices.Contains(n.Status.VolumesInUse, name) &&
			slices.ContainsFunc(n.Status.VolumesAttached, func(a v1.AttachedVolume) bool { return a.Name == name })
	})
	va, getErr := m.cfg.Client.StorageV1().VolumeAttachments().Get(context.WithoutCancel(ctx), attachment(r.Handle, r.Driver, m.cfg.NodeName), metav1.GetOptions{})
	switch {
	case err != nil && getErr == nil && va.Status.AttachError != nil:
		return nil, fmt.Errorf("volume %s is not attached to this node: %s", r.Spec, va.Status.AttachError.Message)
	case err != nil && getErr == nil:
		return nil, fmt.Errorf("volume %s is not attached to this node yet: VolumeAttachment %s is not answered: is the external attacher of driver %s running? %w", r.Spec, va.Name, r.Driver, err)
	case err != nil:
		return nil, fmt.Errorf("volume %s is not attached to this node yet: %w", r.Spec, err)
	case apierrors.IsNotFound(getErr):
		return nil, fmt.Errorf("volume %s was detached again", r.Spec)
	case getErr != nil:
		return nil, getErr
	case !va.Status.Attached || va.DeletionTimestamp != nil:
		return nil, errors.New("volume " + r.Spec + " is being detached")
	}
	return va.Status.AttachmentMetadata, nil
}
