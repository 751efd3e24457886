package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Driven is a volume that a CSI driver mounts.
type Driven struct {
	Name     string               // of the pod's volume
	PV       *v1.PersistentVolume // nil: inline
	Claim    string               // that PV is bound to
	Inline   *v1.CSIVolumeSource
	ReadOnly bool // the pod wants it so
}

// Place is where a driver has published a volume: a directory, or a block device.
type Place struct {
	Path string
	// Own: what is in it is to be given to the pod's group.
	Own bool
}

// Drivers are the node's CSI drivers.
type Drivers interface {
	// Mount has the volume's driver publish it. It can be called again.
	Mount(ctx context.Context, pod *v1.Pod, d Driven) (Place, error)
	// Release undoes all that Mount did for the pod.
	Release(ctx context.Context, uid types.UID) error
	// Pods are those with something to release.
	Pods() ([]types.UID, error)
}

// driven has a driver mount the volume and binds it to the pod's own place, by
// which the rest of the node knows it.
func (m *Manager) driven(ctx context.Context, pod *v1.Pod, d Driven, target string) error {
	if m.cfg.Drivers == nil {
		return fmt.Errorf("%w: csi, without an API", ErrUnsupported)
	}
	place, err := m.cfg.Drivers.Mount(ctx, pod, d)
	if err != nil {
		return err
	}
	return m.hung.do(ctx, string(pod.UID)+"/"+d.Name, "volume "+place.Path, func() error {
		if place.Own {
			if err := own(place.Path, int(*fsGroup(pod)), rootOnly(pod)); err != nil {
				return err
			}
		}
		return m.bindPath(place.Path, target)
	})
}

// inline mounts a volume that a driver makes for this pod alone.
func (m *Manager) inline(ctx context.Context, pod *v1.Pod, v *v1.Volume) error {
	target := m.path(pod.UID, v)
	if done, err := m.mountedAt(target); done || err != nil {
		return err
	}
	return m.driven(ctx, pod, Driven{Name: v.Name, Inline: v.CSI, ReadOnly: v.CSI.ReadOnly != nil && *v.CSI.ReadOnly}, target)
}

// mountedAt reports whether something is mounted at a path that may not exist.
func (m *Manager) mountedAt(target string) (bool, error) {
	mounted, err := m.cfg.Mounter.Mounted(target)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return mounted, err
}

// device is the pod's own place for a volume that is a block device.
func (m *Manager) device(uid types.UID, name string) string {
	return filepath.Join(m.podDir(uid), devicesDir, name)
}

// IsDevice reports whether a volume of the pod, which was set up, is a block
// device: then containers have it as a device, not as a directory.
func (m *Manager) IsDevice(pod *v1.Pod, name string) bool {
	_, err := os.Lstat(m.device(pod.UID, name))
	return err == nil
}

// Device is where a volume that is a block device is on the host.
func (m *Manager) Device(pod *v1.Pod, name string) (path string, readOnly bool, err error) {
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if v.Name != name {
			continue
		}
		if !m.IsDevice(pod, name) {
			return "", false, fmt.Errorf("volume %q is not a block device: its volumeMode is Filesystem, but it is named in volumeDevices: name it in volumeMounts", name)
		}
		return m.device(pod.UID, name), v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ReadOnly, nil
	}
	return "", false, fmt.Errorf("volume %q is not defined", name)
}

// blockDevice says why path is no block device.
func blockDevice(path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	if st.Mode()&fs.ModeDevice == 0 || st.Mode()&fs.ModeCharDevice != 0 {
		return fmt.Errorf("%s is not a block device", path)
	}
	return nil
}
