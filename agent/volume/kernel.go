package volume

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"

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

// Bind mounts the open file onto target, whatever its name means by now.
func (Kernel) Bind(source *os.File, target string) error {
	from := "/proc/self/fd/" + strconv.Itoa(int(source.Fd()))
	if err := unix.Mount(from, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return &os.PathError{Op: "bind", Path: target, Err: err}
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

// Below reads the mount table.
func (Kernel) Below(dir string) ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, nil // no such folder: nothing is mounted there
	}
	var out []string
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		fields := strings.Fields(s.Text())
		if len(fields) < 5 {
			continue
		}
		p := unescape(fields[4])
		if p == real || strings.HasPrefix(p, real+"/") {
			out = append(out, dir+strings.TrimPrefix(p, real))
		}
	}
	sort.SliceStable(out, func(i, j int) bool { return len(out[i]) > len(out[j]) })
	return out, s.Err()
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
