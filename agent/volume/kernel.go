package volume

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Kernel is the Mounter that makes real mounts. It needs root.
type Kernel struct{}

// Tmpfs mounts a tmpfs; size 0: the kernel's default (half of memory).
func (Kernel) Tmpfs(target string, size int64) error {
	opts := "mode=0777"
	if size > 0 {
		opts += fmt.Sprintf(",size=%d", size)
	}
	if err := unix.Mount("tmpfs", target, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, opts); err != nil {
		return &os.PathError{Op: "mount tmpfs", Path: target, Err: err}
	}
	return nil
}

// Hugetlbfs mounts huge pages of so many bytes each.
func (Kernel) Hugetlbfs(target string, page int64) error {
	if err := unix.Mount("nodev", target, "hugetlbfs", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("mode=0777,pagesize=%d", page)); err != nil {
		return &os.PathError{Op: "mount hugetlbfs", Path: target, Err: err}
	}
	return nil
}

// Bind mounts the open file onto target, whatever its name means by now, with the
// mounts below it. What is mounted there by the host later appears at target, too;
// what is unmounted at target stays at its source.
func (Kernel) Bind(source *os.File, target string) error {
	from := "/proc/self/fd/" + strconv.Itoa(int(source.Fd()))
	if err := unix.Mount(from, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return &os.PathError{Op: "bind", Path: target, Err: err}
	}
	if err := unix.Mount("", target, "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return errors.Join(&os.PathError{Op: "bind as slave", Path: target, Err: err}, unix.Unmount(target, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW))
	}
	return nil
}

// Unmount detaches target: names vanish at once, the rest when the last user
// has gone. A mount point that is none is no error.
func (Kernel) Unmount(target string) error {
	err := unix.Unmount(target, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "unmount", Path: target, Err: err}
	}
	return nil
}

// Mounted asks the kernel about this one directory, and not the server of what is
// mounted there, which may not answer; before Linux 5.8 it cannot tell.
func (k Kernel) Mounted(dir string) (bool, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, 0, &st); err != nil {
		return false, &os.PathError{Op: "statx", Path: dir, Err: err}
	}
	if st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		at, err := k.Below(dir)
		return slices.Contains(at, dir), err
	}
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// Below looks into the mount table.
func (Kernel) Below(dir string) ([]string, error) {
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, nil // no such directory: nothing is mounted there
	}
	points, err := mountPoints.read()
	if err != nil {
		return nil, err
	}
	var out []string
	for _, p := range points {
		if p == real || strings.HasPrefix(p, real+"/") {
			out = append(out, dir+strings.TrimPrefix(p, real))
		}
	}
	sort.SliceStable(out, func(i, j int) bool { return len(out[i]) > len(out[j]) })
	return out, nil
}

// mountPoints is the mount table. To print it takes the kernel the longer the
// more pods there are, so those who want it at the same time share one reading.
var mountPoints mountTable

type mountTable struct {
	reading sync.Mutex // held by the one who reads

	mu   sync.Mutex // guards next
	next *tableRead // not begun: who comes now may join; nil: none
}

type tableRead struct {
	done   chan struct{} // closed when the rest is set
	points []string
	err    error
}

// read gives every mount point, as of a moment after the call. The result is
// shared: it must not be changed.
func (t *mountTable) read() ([]string, error) {
	t.mu.Lock()
	r := t.next
	if r != nil {
		t.mu.Unlock()
		<-r.done
		return r.points, r.err
	}
	r = &tableRead{done: make(chan struct{})}
	t.next = r
	t.mu.Unlock()

	t.reading.Lock()
	defer t.reading.Unlock()
	t.mu.Lock()
	t.next = nil // from here on it may be too old for others
	t.mu.Unlock()
	r.points, r.err = readMountPoints()
	close(r.done)
	return r.points, r.err
}

func readMountPoints() ([]string, error) {
	table, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer table.Close()
	mounts, err := mountinfo.GetMountsFromReader(table, nil)
	if err != nil {
		return nil, err
	}
	out := make([]string, len(mounts))
	for i, m := range mounts {
		out[i] = m.Mountpoint
	}
	return out, nil
}
