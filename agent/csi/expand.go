package csi

import (
	"context"
	"encoding/json"
	"fmt"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protojson"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// grown is the size that the volume has and its claim does not tell yet; nil:
// the two agree.
func grown(claim *v1.PersistentVolumeClaim, pv *v1.PersistentVolume) *resource.Quantity {
	has, tells := pv.Spec.Capacity[v1.ResourceStorage], claim.Status.Capacity[v1.ResourceStorage]
	if claim.Status.Phase != v1.ClaimBound || claim.Spec.VolumeName != pv.Name || has.Cmp(tells) <= 0 {
		return nil
	}
	return &has
}

// waitsForNode reports whether the resizer has left the rest to the
// node, and the node has not failed at it for good.
func waitsForNode(claim *v1.PersistentVolumeClaim) bool {
	switch claim.Status.AllocatedResourceStatuses[v1.ResourceStorage] {
	case v1.PersistentVolumeClaimNodeResizePending, v1.PersistentVolumeClaimNodeResizeInProgress:
		return true
	}
	for _, c := range claim.Status.Conditions {
		if c.Type == v1.PersistentVolumeClaimFileSystemResizePending && c.Status == v1.ConditionTrue {
			return true
		}
	}
	return false
}

// expandBefore has a volume that grew while it was not in use grow on the node
// before its pod sees it.
func (m *Manager) expandBefore(ctx context.Context, driver *driver, r *record, pv *v1.PersistentVolume, call *spec.NodePublishVolumeRequest) error {
	claim, err := m.cfg.Client.CoreV1().PersistentVolumeClaims(r.Namespace).Get(ctx, r.Claim, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if size := grown(claim, pv); size != nil && waitsForNode(claim) && !call.Readonly {
		path := call.StagingTargetPath
		if path == "" || r.Block {
			path = call.TargetPath
			if !r.Block {
				return nil // it has no path yet: the claim's watch does it
			}
		}
		return m.expandAt(ctx, driver, r, claim, pv, *size, path, call)
	}
	return nil
}

// expandAt has the driver expand the volume at a path, and tells the claim.
func (m *Manager) expandAt(ctx context.Context, driver *driver, r *record, claim *v1.PersistentVolumeClaim, pv *v1.PersistentVolume, size resource.Quantity, path string, call *spec.NodePublishVolumeRequest) error {
	secrets, err := m.secret(ctx, pv.Spec.CSI.NodeExpandSecretRef)
	if err != nil {
		return err
	}
	_, err = driver.node.NodeExpandVolume(ctx, &spec.NodeExpandVolumeRequest{
		VolumeId: r.Handle, VolumePath: path, StagingTargetPath: call.StagingTargetPath, VolumeCapability: call.VolumeCapability,
		CapacityRange: &spec.CapacityRange{RequiredBytes: size.Value()}, Secrets: secrets,
	})
	if err != nil {
		return driver.fault("NodeExpandVolume", err)
	}
	if err := m.tellGrown(ctx, claim, size); err != nil {
		return fmt.Errorf("volume %s has grown, its claim does not say so yet: %w", r.Spec, err)
	}
	m.cfg.Recorder.Event(claim, v1.EventTypeNormal, "FileSystemResizeSuccessful", "MountVolume.NodeExpandVolume succeeded for volume \""+r.Spec+"\"")
	return nil
}

// tellGrown writes the claim's new size, and that nothing is left to do.
func (m *Manager) tellGrown(ctx context.Context, claim *v1.PersistentVolumeClaim, size resource.Quantity) error {
	conditions := []v1.PersistentVolumeClaimCondition{}
	for _, c := range claim.Status.Conditions {
		switch c.Type {
		case v1.PersistentVolumeClaimResizing, v1.PersistentVolumeClaimFileSystemResizePending, v1.PersistentVolumeClaimControllerResizeError, v1.PersistentVolumeClaimNodeResizeError:
		default:
			conditions = append(conditions, c)
		}
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": claim.UID, "resourceVersion": claim.ResourceVersion},
		"status": map[string]any{
			"capacity": map[string]any{string(v1.ResourceStorage): size.String()}, "conditions": conditions,
			"allocatedResourceStatuses": map[string]any{string(v1.ResourceStorage): nil},
		},
	})
	if err != nil {
		return err
	}
	_, err = m.cfg.Client.CoreV1().PersistentVolumeClaims(claim.Namespace).Patch(ctx, claim.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

// expandUsed has a volume that its pod uses grow.
func (m *Manager) expandUsed(ctx context.Context, key recordKey, claim *v1.PersistentVolumeClaim) error {
	e := m.entry(key)
	if e == nil || !e.Called || len(e.Publish) == 0 || !waitsForNode(claim) {
		return nil
	}
	unlock, err := m.lock(ctx, e.volume())
	if err != nil {
		return err
	}
	defer unlock()
	if e = m.entry(key); e == nil {
		return nil
	}
	pv, err := m.cfg.Client.CoreV1().PersistentVolumes().Get(ctx, e.Spec, metav1.GetOptions{})
	if err != nil {
		return err
	}
	size := grown(claim, pv)
	if size == nil || pv.Spec.CSI == nil {
		return nil
	}
	call := &spec.NodePublishVolumeRequest{}
	if err := protojson.Unmarshal(e.Publish, call); err != nil {
		return err
	}
	if call.Readonly {
		return nil
	}
	driver := m.drivers.get(e.Driver)
	if driver == nil {
		return notRegistered(e.Driver)
	}
	can, err := driver.caps(ctx)
	if err != nil {
		return err
	}
	if !can.expand {
		return nil
	}
	return m.expandAt(ctx, driver, &e.record, claim, pv, *size, call.TargetPath, call)
}
