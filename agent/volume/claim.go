package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/storage/ephemeral"
)

// Claims finds the volumes of claims.
type Claims interface {
	// Volume is the volume that the pod's claim is bound to. Its directory exists,
	// if it is one of this node.
	Volume(ctx context.Context, pod *v1.Pod, claim string) (*v1.PersistentVolume, error)
}

// isClaim reports whether the volume is bound by a claim.
func isClaim(v *v1.Volume) bool { return v.PersistentVolumeClaim != nil || v.Ephemeral != nil }

// claim mounts a claim's volume at the pod's own place for it. What is mounted
// stays as it is: after a restart of the agent the API need not answer.
func (m *Manager) claim(ctx context.Context, pod *v1.Pod, v *v1.Volume) error {
	if m.cfg.Claims == nil {
		return fmt.Errorf("%w: %s, without an API", ErrUnsupported, kindName(v))
	}
	target := m.path(pod.UID, v)
	for _, place := range []string{target, m.device(pod.UID, v.Name)} {
		if done, err := m.mountedAt(place); done || err != nil {
			return err
		}
	}
	name, readOnly := "", false
	if c := v.PersistentVolumeClaim; c != nil {
		name, readOnly = c.ClaimName, c.ReadOnly
	} else {
		name = ephemeral.VolumeClaimName(pod, v)
	}
	pv, err := m.cfg.Claims.Volume(ctx, pod, name)
	if err != nil {
		return err
	}
	block := pv.Spec.VolumeMode != nil && *pv.Spec.VolumeMode == v1.PersistentVolumeBlock
	if block {
		target = m.device(pod.UID, v.Name)
	}
	key := string(pod.UID) + "/" + v.Name
	switch {
	case pv.Spec.CSI != nil:
		return m.driven(ctx, pod, Driven{Name: v.Name, PV: pv, Claim: name, ReadOnly: readOnly}, target)
	case block && pv.Spec.Local != nil:
		return m.hung.do(ctx, key, "local volume "+pv.Spec.Local.Path, func() error {
			if err := blockDevice(pv.Spec.Local.Path); err != nil {
				return fmt.Errorf("volumeMode Block of persistentvolume %q: %w", pv.Name, err)
			}
			return m.bindPath(pv.Spec.Local.Path, target)
		})
	case block:
		return fmt.Errorf("%w: volumeMode Block of persistentvolume %q: only local and csi volumes can be block devices", ErrUnsupported, pv.Name)
	case pv.Spec.Local != nil:
		return m.hung.do(ctx, key, "local volume "+pv.Spec.Local.Path, func() error {
			if group := fsGroup(pod); group != nil && !readOnly {
				if err := own(pv.Spec.Local.Path, int(*group), rootOnly(pod)); err != nil {
					return err
				}
			}
			return m.bindPath(pv.Spec.Local.Path, target)
		})
	case pv.Spec.HostPath != nil:
		return m.hung.do(ctx, key, "hostPath "+pv.Spec.HostPath.Path, func() error {
			if err := hostPath(pv.Spec.HostPath); err != nil {
				return err
			}
			return m.bindPath(pv.Spec.HostPath.Path, target)
		})
	case pv.Spec.NFS != nil:
		return m.nfs(ctx, key, pv.Spec.NFS, pv.Spec.NFS.ReadOnly || readOnly, target, pv.Spec.MountOptions)
	}
	return fmt.Errorf("%w: the source of persistentvolume %q is none of csi, local, hostPath and nfs", ErrUnsupported, pv.Name)
}

// bindPath mounts a file or directory of the host at target.
func (m *Manager) bindPath(path, target string) error {
	source, err := os.OpenFile(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer source.Close()
	st, err := source.Stat()
	if err != nil {
		return err
	}
	if st.IsDir() {
		err = os.MkdirAll(target, 0o755)
	} else if err = os.MkdirAll(filepath.Dir(target), 0o755); err == nil {
		err = os.WriteFile(target, nil, 0o644) //nolint:forbidigo // what a mount covers
	}
	if err != nil {
		return err
	}
	return m.cfg.Mounter.Bind(source, target)
}

// nfs mounts a directory of an NFS server at target; key is the pod's volume. A server
// that does not answer holds up the caller until ctx ends, and no other caller.
func (m *Manager) nfs(ctx context.Context, key string, source *v1.NFSVolumeSource, readOnly bool, target string, options []string) error {
	if readOnly {
		options = append(options[:len(options):len(options)], "ro")
	}
	return m.hung.do(ctx, key, "NFS server "+source.Server, func() error {
		return mountNFS(ctx, source.Server, source.Path, target, options)
	})
}

// mountNFS mounts by the program that comes with the system's NFS client.
func mountNFS(ctx context.Context, server, path, target string, options []string) error {
	program, err := exec.LookPath("mount.nfs")
	if err != nil {
		return errors.New("mount.nfs is not on this node: install its NFS client (nfs-common, nfs-utils)")
	}
	if strings.HasPrefix(server, "-") {
		return fmt.Errorf("NFS server %q: not a host name", server)
	}
	if strings.Contains(server, ":") && !strings.HasPrefix(server, "[") {
		server = "[" + server + "]"
	}
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	args := []string{server + ":" + path, target}
	if len(options) > 0 {
		args = append(args, "-o", strings.Join(options, ","))
	}
	out, err := exec.CommandContext(ctx, program, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("mount.nfs %s:%s: %w: %s", server, path, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// rootOnly reports whether the volume's owner is looked at only at its root.
func rootOnly(pod *v1.Pod) bool {
	p := pod.Spec.SecurityContext.FSGroupChangePolicy
	return p != nil && *p == v1.FSGroupChangeOnRootMismatch
}

// own gives a volume to a group, which may then do in it what its owner may.
// Names are looked up inside the volume only: a pod that uses it meanwhile may
// put links anywhere.
func own(dir string, group int, onMismatch bool) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	if onMismatch {
		st, err := root.Stat(".")
		if err != nil {
			return err
		}
		if sys, ok := st.Sys().(*syscall.Stat_t); ok && int(sys.Gid) == group && st.Mode()&fs.ModeSetgid != 0 && st.Mode().Perm()&0o070 == 0o070 {
			return nil
		}
	}
	return fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it went meanwhile
		}
		if err != nil {
			return err
		}
		if err := root.Lchown(path, -1, group); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		info, err := d.Info()
		if err != nil || info.Mode()&fs.ModeSymlink != 0 {
			return nil
		}
		mode := info.Mode() & (fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky)
		if info.IsDir() {
			mode |= 0o070 | fs.ModeSetgid
		} else {
			mode |= 0o060
		}
		if err := root.Chmod(path, mode); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	})
}

// emptyPlaces removes the places of claims' volumes in a pod's directory, after
// they were unmounted. It fails if anything is in one: what is there belongs to
// the volume, not to the pod.
func emptyPlaces(dir string) error {
	patterns := []string{filepath.Join(dir, devicesDir, "*")}
	for _, kind := range []v1.VolumeSource{{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{}}, {Ephemeral: &v1.EphemeralVolumeSource{}}, {CSI: &v1.CSIVolumeSource{}}, {NFS: &v1.NFSVolumeSource{}}} {
		patterns = append(patterns, filepath.Join(dir, volumesDir, "kubernetes.io~"+kindName(&v1.Volume{VolumeSource: kind}), "*"))
	}
	for _, pattern := range patterns {
		places, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		for _, place := range places {
			if err := os.Remove(place); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("UnmountVolume.TearDown failed: %w", err)
			}
		}
	}
	return nil
}
