package csi

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/apimachinery/pkg/types"
)

// Release has the drivers unmount all that is mounted for the pod. It can be
// called again after it failed half-way.
func (m *Manager) Release(ctx context.Context, uid types.UID) error {
	if err := m.load(); err != nil {
		return err
	}
	var errs []error
	for _, e := range m.entries(func(e *entry) bool { return e.UID == uid }) {
		if err := m.release(ctx, e.key()); err != nil {
			errs = append(errs, fmt.Errorf("UnmountVolume.TearDown failed for volume %q : %w", e.Spec, err))
		}
	}
	return errors.Join(errs...)
}

// release undoes one volume of one pod, and what is staged if it was the last.
func (m *Manager) release(ctx context.Context, key recordKey) error {
	e := m.entry(key)
	if e == nil {
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
	m.unwatchClaim(&e.record)
	if e.Called {
		if err := m.unmount(ctx, &e.record); err != nil {
			return err
		}
	}
	if err := m.drop(e); err != nil {
		return err
	}
	if e.Attach {
		// It may be detached now. That the leader learns of it is not waited for.
		m.cfg.Node.Poke()
	}
	return nil
}

// unmount has the driver unpublish the volume and, if no other pod of the node
// uses it, unstage it.
func (m *Manager) unmount(ctx context.Context, r *record) error {
	driver := m.drivers.get(r.Driver)
	if driver == nil {
		return notRegistered(r.Driver)
	}
	target := m.paths.target(r)
	if _, err := driver.node.NodeUnpublishVolume(ctx, &spec.NodeUnpublishVolumeRequest{VolumeId: r.Handle, TargetPath: target}); err != nil {
		return driver.fault("NodeUnpublishVolume", err)
	}
	if err := m.removeEmpty(target); err != nil {
		return err
	}
	if r.Block {
		removeUpTo(filepath.Dir(target), m.paths.csi())
	}
	if !r.Stages {
		return nil
	}
	others := m.entries(func(e *entry) bool { return e.volume() == r.volume() && e.key() != r.key() && e.Stages })
	if len(others) > 0 {
		return nil
	}
	staging := m.paths.staging(r)
	if _, err := driver.node.NodeUnstageVolume(ctx, &spec.NodeUnstageVolumeRequest{VolumeId: r.Handle, StagingTargetPath: staging}); err != nil {
		return driver.fault("NodeUnstageVolume", err)
	}
	if err := m.removeEmpty(staging); err != nil {
		return err
	}
	removeUpTo(filepath.Dir(staging), m.paths.csi())
	return nil
}
