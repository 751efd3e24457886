// Package volume makes a pod's volumes: directories, files rendered from
// ConfigMaps, Secrets and the pod's own fields, and paths of the host. It
// mounts only what needs a mount (tmpfs, claims' volumes and subPath binds); binding volumes
// into containers is podmon's work.
//
// On disk, below the data directory:
//
//	pods/UID/volumes/kubernetes.io~KIND/NAME     one folder a volume
//	pods/UID/volume-subpaths/NAME/CONTAINER/N    bind mounts of subPaths
//	pods/UID/volume-devices/NAME                 bind mounts of block devices
package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	certificatesv1 "k8s.io/api/certificates/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/apis/quantity"
)

// Objects gives the ConfigMaps and Secrets that pods name.
type Objects interface {
	ConfigMap(ctx context.Context, namespace, name string) (*v1.ConfigMap, error)
	Secret(ctx context.Context, namespace, name string) (*v1.Secret, error)
}

// TrustBundles gives the ClusterTrustBundles that pods mount.
type TrustBundles interface {
	// TrustBundle returns one by its name, or fails with a NotFound StatusError.
	TrustBundle(ctx context.Context, name string) (*certificatesv1.ClusterTrustBundle, error)
	// TrustBundlesOf returns those of a signer, in the order of their names.
	TrustBundlesOf(ctx context.Context, signer string) ([]*certificatesv1.ClusterTrustBundle, error)
}

// Tokens makes service account tokens bound to a pod. The returned token is
// renewed by calling again.
type Tokens interface {
	Token(ctx context.Context, pod *v1.Pod, audience string, expirationSeconds int64) (string, error)
}

// Mounter makes the few mounts that volumes need. The real one is Kernel.
type Mounter interface {
	Tmpfs(target string, size int64) error
	// Hugetlbfs mounts memory in huge pages of so many bytes.
	Hugetlbfs(target string, page int64) error
	// Bind mounts an open file or directory onto target.
	Bind(source *os.File, target string) error
	// Unmount detaches target; nil when nothing is mounted there.
	Unmount(target string) error
	// Mounted says whether dir, which exists, is a mount point.
	Mounted(dir string) (bool, error)
	// Below lists mount points at or below dir, deepest first. It reads the
	// machine's whole mount table.
	Below(dir string) ([]string, error)
}

// Config of a Manager.
type Config struct {
	Dir     string // holds one directory per pod UID; required
	Objects Objects
	// TrustBundles: nil on a node without an API.
	TrustBundles TrustBundles
	Tokens       Tokens // nil: serviceAccountToken sources are refused
	// Certificates: nil on a node without an API.
	Certificates Certificates
	Mounter      Mounter
	Claims       Claims // nil: claims are refused
	// Drivers mount the volumes of CSI drivers; nil: those are refused.
	Drivers Drivers
	// ImagePath is where the image of a volume is mounted, by the component that pulls
	// it; nil: image volumes are refused.
	ImagePath func(podUID, volume string) string
	// Memory is the most that the pod's volumes in memory can hold, in bytes, 0:
	// not known; nil: of no pod.
	Memory func(pod *v1.Pod) int64
	// Allocatable answers resourceFieldRef limits that are not set.
	Allocatable func() v1.ResourceList
}

// Manager makes and removes volumes. Methods may be called concurrently for
// different pods; for one pod the caller serializes.
type Manager struct {
	cfg  Config
	hung hungCalls // with the host's paths
}

// New returns a Manager.
func New(cfg Config) *Manager { return &Manager{cfg: cfg} }

// ErrUnsupported is returned for a kind of volume this node cannot make. It
// does not heal by trying again.
var ErrUnsupported = errors.New("volume kind is not supported")

// ErrImageVolume is returned when an image does not have what a container wants
// to mount of it.
var ErrImageVolume = errors.New("ImageVolumeMountFailed")

// Setup makes every volume of the pod. It is idempotent: after a restart of
// the agent, or a change of a source, it brings the files up to date.
func (m *Manager) Setup(ctx context.Context, pod *v1.Pod) error {
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if err := m.setup(ctx, pod, v); err != nil {
			return fmt.Errorf("MountVolume.SetUp failed for volume %q : %w", v.Name, err)
		}
	}
	return nil
}

// Refresh renders the volumes whose sources may change.
func (m *Manager) Refresh(ctx context.Context, pod *v1.Pod) error {
	var errs []error
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if v.ConfigMap == nil && v.Secret == nil && v.Projected == nil && v.DownwardAPI == nil {
			continue
		}
		if err := m.setup(ctx, pod, v); err != nil {
			errs = append(errs, fmt.Errorf("MountVolume.SetUp failed for volume %q : %w", v.Name, err))
		}
	}
	return errors.Join(errs...)
}

func (m *Manager) setup(ctx context.Context, pod *v1.Pod, v *v1.Volume) error {
	switch {
	case v.HostPath != nil:
		return m.hung.do(ctx, string(pod.UID)+"/"+v.Name, "hostPath "+v.HostPath.Path, func() error { return hostPath(v.HostPath) })
	case v.EmptyDir != nil:
		return m.emptyDir(pod, v)
	case isClaim(v):
		return m.claim(ctx, pod, v)
	case v.CSI != nil:
		return m.inline(ctx, pod, v)
	case v.NFS != nil:
		target := m.path(pod.UID, v)
		if done, err := m.mountedAt(target); done || err != nil {
			return err
		}
		return m.nfs(ctx, string(pod.UID)+"/"+v.Name, v.NFS, v.NFS.ReadOnly, target, nil)
	case v.Image != nil && m.cfg.ImagePath != nil:
		return nil // pulling takes its own time: see ImagePath
	case v.ConfigMap != nil, v.Secret != nil, v.Projected != nil, v.DownwardAPI != nil:
		files, err := m.render(ctx, pod, v)
		if err != nil {
			return err
		}
		dir := m.path(pod.UID, v)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if secretive(v) {
			if err := m.tmpfs(dir, 0); err != nil {
				return err
			}
		}
		return writeFiles(dir, files, fsGroup(pod))
	}
	return fmt.Errorf("%w: %s", ErrUnsupported, kindName(v))
}

// secretive volumes are kept in memory.
func secretive(v *v1.Volume) bool {
	if v.Secret != nil {
		return true
	}
	if v.Projected != nil {
		for _, s := range v.Projected.Sources {
			if s.Secret != nil || s.ServiceAccountToken != nil || s.PodCertificate != nil {
				return true
			}
		}
	}
	return false
}

func (m *Manager) tmpfs(dir string, size int64) error {
	return m.mountOnce(dir, func() error { return m.cfg.Mounter.Tmpfs(dir, size) })
}

// mountOnce mounts unless something is mounted at dir already.
func (m *Manager) mountOnce(dir string, mount func() error) error {
	mounted, err := m.cfg.Mounter.Mounted(dir)
	if err != nil || mounted {
		return err
	}
	return mount()
}

// pageSize is the size in bytes of the pages of a medium "HugePages-2Mi", or of
// the one size that the pod asks for with "HugePages".
func pageSize(pod *v1.Pod, medium v1.StorageMedium) (int64, error) {
	if size, ok := strings.CutPrefix(string(medium), string(v1.StorageMediumHugePagesPrefix)); ok {
		q, err := quantity.Parse(size)
		if err != nil {
			return 0, fmt.Errorf("emptyDir medium %q: %q is no size of page such as 2Mi", medium, size)
		}
		return q.Value(), nil
	}
	if medium != v1.StorageMediumHugePages {
		return 0, fmt.Errorf("%w: emptyDir medium %q", ErrUnsupported, medium)
	}
	sizes := map[int64]bool{}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for name := range c.Resources.Limits {
			if size, ok := strings.CutPrefix(string(name), v1.ResourceHugePagesPrefix); ok {
				if q, err := quantity.Parse(size); err == nil {
					sizes[q.Value()] = true
				}
			}
		}
	}
	if len(sizes) != 1 {
		return 0, fmt.Errorf("emptyDir medium HugePages: the pod asks for %d sizes of huge pages, not for one: name the size, as in HugePages-2Mi", len(sizes))
	}
	for size := range sizes {
		return size, nil
	}
	return 0, nil
}

// memorySize is what a volume in memory may hold, in bytes: its own limit, and
// no more than the pod could fill (KEP-1967); 0: as the kernel thinks best.
func (m *Manager) memorySize(pod *v1.Pod, e *v1.EmptyDirVolumeSource) int64 {
	size := int64(0)
	if m.cfg.Memory != nil {
		size = m.cfg.Memory(pod)
	}
	if l := e.SizeLimit; l != nil && l.Sign() > 0 && (size <= 0 || l.Value() < size) {
		size = l.Value()
	}
	return size
}

func (m *Manager) emptyDir(pod *v1.Pod, v *v1.Volume) error {
	dir := m.path(pod.UID, v)
	if v.EmptyDir.Medium == v1.StorageMediumDefault {
		return makeEmptyDir(dir, fsGroup(pod))
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	mount := func() error { return m.cfg.Mounter.Tmpfs(dir, m.memorySize(pod, v.EmptyDir)) }
	if v.EmptyDir.Medium != v1.StorageMediumMemory {
		size, err := pageSize(pod, v.EmptyDir.Medium)
		if err != nil {
			return err
		}
		mount = func() error { return m.cfg.Mounter.Hugetlbfs(dir, size) }
	}
	return m.mountOnce(dir, func() error {
		if err := mount(); err != nil {
			return err
		}
		return openToAll(dir, fsGroup(pod))
	})
}

// makeEmptyDir makes a directory on disk, unless it is there: what the pod has made
// of it stays. It appears ready or not at all.
func makeEmptyDir(dir string, group *int64) error {
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	tmp := filepath.Join(filepath.Dir(dir), ".new~"+filepath.Base(dir)) // no name of a volume
	if err := os.Mkdir(tmp, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := openToAll(tmp, group); err != nil {
		return err
	}
	return os.Rename(tmp, dir) //nolint:forbidigo // an empty folder: it is made again
}

// openToAll lets everybody write to a directory; what is made in it belongs to the
// group, if there is one.
func openToAll(dir string, group *int64) error {
	mode := fs.FileMode(0o777)
	if group != nil {
		if err := os.Chown(dir, -1, int(*group)); err != nil {
			return err
		}
		mode |= fs.ModeSetgid
	}
	return os.Chmod(dir, mode) // Mkdir is subject to the umask
}

// Present looks once more, before a container is made, whether a path of the
// host is there, and makes it if it is to be made. Other volumes stay as Setup
// has made them.
func (m *Manager) Present(ctx context.Context, pod *v1.Pod, name, container string) error {
	for i := range pod.Spec.Volumes {
		if v := &pod.Spec.Volumes[i]; v.Name == name && v.HostPath != nil {
			err := m.hung.do(ctx, string(pod.UID)+"/"+name+"/"+container, "hostPath "+v.HostPath.Path, func() error { return hostPath(v.HostPath) })
			if err != nil {
				return fmt.Errorf("volume %q: %w", name, err)
			}
		}
	}
	return nil
}

// hostPath checks or makes a path of the host as its type says. One without a
// type becomes a directory if it is missing.
func hostPath(h *v1.HostPathVolumeSource) error {
	t := v1.HostPathUnset
	if h.Type != nil {
		t = *h.Type
	}
	switch t {
	case v1.HostPathDirectoryOrCreate:
		if _, err := os.Stat(h.Path); errors.Is(err, fs.ErrNotExist) {
			return os.MkdirAll(h.Path, 0o755)
		}
	case v1.HostPathFileOrCreate:
		// O_NONBLOCK: a pod may have left a FIFO there before.
		f, err := os.OpenFile(h.Path, os.O_CREATE|os.O_RDONLY|unix.O_NONBLOCK, 0o644)
		if err == nil {
			err = f.Close()
		}
		if err != nil && !errors.Is(err, fs.ErrExist) {
			if st, serr := os.Stat(h.Path); serr == nil && st.IsDir() {
				return fmt.Errorf("hostPath type check failed: %s is not a file", h.Path)
			}
			return err
		}
	}
	if t == v1.HostPathUnset {
		if _, err := os.Stat(h.Path); errors.Is(err, fs.ErrNotExist) {
			return os.MkdirAll(h.Path, 0o755)
		}
		return nil // whatever it is: its mount will tell
	}
	st, err := os.Stat(h.Path)
	if err != nil {
		return fmt.Errorf("hostPath type check failed: %s is not %s", h.Path, hostPathWord(t))
	}
	mode := st.Mode()
	ok := false
	switch t {
	case v1.HostPathDirectory, v1.HostPathDirectoryOrCreate:
		ok = mode.IsDir()
	case v1.HostPathFile, v1.HostPathFileOrCreate:
		ok = mode.IsRegular()
	case v1.HostPathSocket:
		ok = mode&fs.ModeSocket != 0
	case v1.HostPathCharDev:
		ok = mode&fs.ModeCharDevice != 0
	case v1.HostPathBlockDev:
		ok = mode&fs.ModeDevice != 0 && mode&fs.ModeCharDevice == 0
	}
	if !ok {
		return fmt.Errorf("hostPath type check failed: %s is not %s", h.Path, hostPathWord(t))
	}
	return nil
}

func hostPathWord(t v1.HostPathType) string {
	switch t {
	case v1.HostPathDirectory, v1.HostPathDirectoryOrCreate:
		return "a directory"
	case v1.HostPathFile, v1.HostPathFileOrCreate:
		return "a file"
	case v1.HostPathSocket:
		return "a socket file"
	case v1.HostPathCharDev:
		return "a character device"
	case v1.HostPathBlockDev:
		return "a block device"
	}
	return string(t)
}

// Source is where a volume is on the host, for a bind mount.
func (m *Manager) Source(pod *v1.Pod, name string) (path string, readOnly bool, err error) {
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if v.Name != name {
			continue
		}
		if v.HostPath != nil {
			return v.HostPath.Path, false, nil
		}
		if v.Image != nil {
			return m.cfg.ImagePath(string(pod.UID), v.Name), true, nil
		}
		if isClaim(v) {
			return m.path(pod.UID, v), v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ReadOnly, nil
		}
		if v.CSI != nil {
			return m.path(pod.UID, v), v.CSI.ReadOnly != nil && *v.CSI.ReadOnly, nil
		}
		// Rendered files belong to their sources: a writer would be undone.
		return m.path(pod.UID, v), v.EmptyDir == nil, nil
	}
	return "", false, fmt.Errorf("volume %q is not defined", name)
}

// Directories of a pod's directory.
const (
	volumesDir  = "volumes"
	subPathsDir = "volume-subpaths"
	devicesDir  = "volume-devices" // volumes that are block devices
)

func (m *Manager) podDir(uid types.UID) string { return filepath.Join(m.cfg.Dir, string(uid)) }

func (m *Manager) path(uid types.UID, v *v1.Volume) string {
	return filepath.Join(m.podDir(uid), volumesDir, "kubernetes.io~"+kindName(v), v.Name)
}

// Teardown unmounts and removes everything of the pod's directory. It refuses to
// remove anything while a mount is left below it, or while the kernel still
// works on one of the pod's volumes.
func (m *Manager) Teardown(ctx context.Context, uid types.UID) error {
	if uid == "" || strings.ContainsAny(string(uid), "/") || uid == "." || uid == ".." {
		return fmt.Errorf("pod folder of uid %q: not a folder name", uid)
	}
	if m.cfg.Certificates != nil {
		m.cfg.Certificates.Forget(uid)
	}
	dir := m.podDir(uid)
	if _, err := os.Lstat(dir); err == nil {
		if since, hangs := m.hung.below(string(uid) + "/"); hangs {
			return hungError("UnmountVolume.TearDown failed: a volume", since)
		}
		if err := m.hung.do(ctx, string(uid)+"/", "folder "+dir, func() error { return m.teardown(dir) }); err != nil {
			return err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if m.cfg.Drivers == nil {
		return nil
	}
	return m.cfg.Drivers.Release(ctx, uid)
}

func (m *Manager) teardown(dir string) error {
	may, err := mayHoldMounts(dir)
	if err != nil {
		return err
	}
	if !may {
		return os.RemoveAll(dir)
	}
	mounts, err := m.cfg.Mounter.Below(dir)
	if err != nil {
		return err
	}
	for _, p := range mounts {
		if err := m.cfg.Mounter.Unmount(p); err != nil {
			return fmt.Errorf("UnmountVolume.TearDown failed for %s: %w", p, err)
		}
	}
	if len(mounts) > 0 {
		if mounts, err = m.cfg.Mounter.Below(dir); err != nil {
			return err
		}
	}
	if len(mounts) > 0 {
		return fmt.Errorf("UnmountVolume.TearDown failed: %s is still mounted", mounts[0])
	}
	if err := emptyPlaces(dir); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// mayHoldMounts says whether something can be mounted below a pod's directory: its
// volumes and the places of subPaths can, and containers that mount what the
// node shall see do it there. All else in the directory is files of the agent. The
// mount table, which tells for certain, takes the longer the more pods there are.
func mayHoldMounts(dir string) (bool, error) {
	for _, name := range []string{volumesDir, subPathsDir, devicesDir} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			return err == nil, err
		}
	}
	return false, nil
}

// Pods lists the pods that have a directory, or something that a driver mounted.
func (m *Manager) Pods() ([]types.UID, error) {
	entries, err := os.ReadDir(m.cfg.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	var out []types.UID
	for _, e := range entries {
		out = append(out, types.UID(e.Name()))
	}
	if m.cfg.Drivers == nil {
		return out, err
	}
	driven, driversErr := m.cfg.Drivers.Pods()
	for _, uid := range driven {
		if !slices.Contains(out, uid) {
			out = append(out, uid)
		}
	}
	return out, errors.Join(err, driversErr)
}

func kindName(v *v1.Volume) string {
	switch {
	case v.EmptyDir != nil:
		return "empty-dir"
	case v.HostPath != nil:
		return "host-path"
	case v.ConfigMap != nil:
		return "configmap"
	case v.Secret != nil:
		return "secret"
	case v.Projected != nil:
		return "projected"
	case v.DownwardAPI != nil:
		return "downward-api"
	case v.PersistentVolumeClaim != nil:
		return "persistentVolumeClaim"
	case v.CSI != nil:
		return "csi"
	case v.NFS != nil:
		return "nfs"
	case v.Image != nil:
		return "image"
	case v.Ephemeral != nil:
		return "ephemeral"
	}
	return "unknown"
}

func fsGroup(pod *v1.Pod) *int64 {
	if pod.Spec.SecurityContext == nil {
		return nil
	}
	return pod.Spec.SecurityContext.FSGroup
}
