package podmon

import (
	"errors"
	"fmt"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

const cgroupMountpoint = "/sys/fs/cgroup"

// cgroupHierarchy is one of cgroup version 1 that the machine has mounted.
type cgroupHierarchy struct {
	folder  string // name below /sys/fs/cgroup: "memory", "cpu,cpuacct", "systemd"
	options []string
}

// cgroupHierarchies are the machine's, read once; none where cgroup v2 is alone.
var cgroupHierarchies = sync.OnceValues(func() ([]cgroupHierarchy, error) {
	if cgroups.IsCgroup2UnifiedMode() {
		return nil, nil
	}
	mounts, err := cgroups.GetCgroupMounts(false)
	if err == nil && len(mounts) == 0 {
		err = errors.New("none is mounted")
	}
	if err != nil {
		return nil, fmt.Errorf("find the cgroup hierarchies: %w", err)
	}
	controllers, err := cgroups.GetAllSubsystems()
	if err != nil {
		return nil, fmt.Errorf("find the cgroup controllers: %w", err)
	}
	var all []cgroupHierarchy
	for _, m := range mounts {
		h := cgroupHierarchy{folder: path.Base(m.Mountpoint)}
		for _, name := range m.Subsystems {
			if slices.Contains(controllers, name) {
				h.options = append(h.options, name)
			} else { // one with a name instead of controllers
				h.options = append(h.options, cgroups.CgroupNamePrefix+name)
			}
		}
		all = append(all, h)
	}
	return all, nil
})

// takeCgroupTree takes /sys/fs/cgroup out of what libcontainer is to mount, and
// says whether it did: mountCgroupTree is then to be called. It leaves it there
// on cgroup v2, where it is one mount, for containers with a user namespace, and
// where a mount of the user's has to come after it.
func takeCgroupTree(cfg *configs.Config) bool {
	if cgroups.IsCgroup2UnifiedMode() || cfg.Namespaces.Contains(configs.NEWUSER) {
		return false
	}
	found := false
	for _, m := range cfg.Mounts {
		switch at := path.Clean(m.Destination); {
		case m.Device == "cgroup" && at == cgroupMountpoint:
			found = true
		case m.Device == "sysfs" && at == "/sys":
		case strings.HasPrefix(cgroupMountpoint+"/", at+"/"), strings.HasPrefix(at, cgroupMountpoint+"/"):
			return false
		}
	}
	if found {
		cfg.Mounts = slices.DeleteFunc(cfg.Mounts, func(m *configs.Mount) bool { return m.Device == "cgroup" })
	}
	return found
}

// mountCgroupTree mounts /sys/fs/cgroup of cgroup version 1 in the container
// whose init, pid, waits to become the user's program: a tmpfs with each
// hierarchy in a directory of its own, as the machine has it, each showing the
// container's own cgroup as its root.
//
// libcontainer can do the same, but reads the machine's whole mount table for it
// at each start, which takes the longer the more pods there are, and walks to
// each directory with care that is not needed here: nothing of the container's has
// run yet, and what lies on /sys is the kernel's.
func mountCgroupTree(pid int, readonly bool) error {
	hierarchies, err := cgroupHierarchies()
	if err != nil || len(hierarchies) == 0 {
		return err
	}
	done := make(chan error)
	go func() {
		// The thread ends with the goroutine: it is never unlocked.
		runtime.LockOSThread()
		done <- enterAndMountCgroups(pid, hierarchies, readonly)
	}()
	if err := <-done; err != nil {
		return fmt.Errorf("mount %s: %w", cgroupMountpoint, err)
	}
	return nil
}

func enterAndMountCgroups(pid int, hierarchies []cgroupHierarchy, readonly bool) error {
	init, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err
	}
	defer unix.Close(init)
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Setns(init, unix.CLONE_NEWNS|unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("enter the container: %w", err)
	}
	// Descriptors all the way: in here /proc is the container's, which does not
	// know this thread.
	at, err := unix.Openat2(unix.AT_FDCWD, cgroupMountpoint, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return &os.PathError{Op: "open", Path: cgroupMountpoint, Err: err}
	}
	defer unix.Close(at)
	tree, err := newMount("tmpfs", []string{"mode=755"}, 0)
	if err != nil {
		return fmt.Errorf("tmpfs: %w", err)
	}
	defer unix.Close(tree)
	if err := unix.MoveMount(tree, "", at, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("tmpfs: move_mount: %w", err)
	}
	attrs := 0
	if readonly {
		attrs = unix.MOUNT_ATTR_RDONLY
	}
	for _, h := range hierarchies {
		if err := mountHierarchy(tree, h, attrs); err != nil {
			return fmt.Errorf("%s: %w", h.folder, err)
		}
	}
	if !readonly {
		return nil
	}
	return unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
}

// mountHierarchy mounts h into its directory of tree, which it makes. The directories
// of controllers that share a hierarchy get links to it, as usual.
func mountHierarchy(tree int, h cgroupHierarchy, attrs int) error {
	if err := unix.Mkdirat(tree, h.folder, 0o755); err != nil {
		return err
	}
	mnt, err := newMount("cgroup", h.options, attrs)
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	if err := unix.MoveMount(mnt, "", tree, h.folder, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}
	if len(h.options) < 2 {
		return nil
	}
	for _, controller := range h.options {
		if err := unix.Symlinkat(h.folder, tree, controller); err != nil && err != unix.EEXIST {
			return err
		}
	}
	return nil
}

// newMount makes a mount that is nowhere yet. Options are flags, or KEY=VALUE.
func newMount(fstype string, options []string, attrs int) (int, error) {
	fs, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen: %w", err)
	}
	defer unix.Close(fs)
	for _, o := range options {
		key, value, hasValue := strings.Cut(o, "=")
		if hasValue {
			err = unix.FsconfigSetString(fs, key, value)
		} else {
			err = unix.FsconfigSetFlag(fs, key)
		}
		if err != nil {
			return -1, fmt.Errorf("option %s: %w", o, err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("create: %w", err)
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attrs|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsmount: %w", err)
	}
	return mnt, nil
}
