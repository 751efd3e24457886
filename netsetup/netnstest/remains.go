package netnstest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// A namespace is pinned in a directory that is named for the process that made it
// and for that process's start, so that one with a used pid is distinguished.
const prefix = "netnstest-"

var sweep sync.Once

func marked(pid int) (string, error) {
	start, err := startTime(pid)
	return fmt.Sprintf("%s%d-%s", prefix, pid, start), err
}

// startTime is field 22 of proc(5) stat.
func startTime(pid int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 20 {
		return "", fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	return fields[19], nil
}

// dead says whether a directory is that of a process that has ended.
func dead(folder string) bool {
	rest, ok := strings.CutPrefix(folder, prefix)
	text, start, cut := strings.Cut(rest, "-")
	pid, err := strconv.Atoi(text)
	if !ok || !cut || err != nil {
		return false
	}
	now, err := startTime(pid)
	return err != nil || now != start
}

// dropRemains drops the namespaces that killed tests left in the directory for
// temporary files. Their interfaces go with them.
func dropRemains() error {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("nsfs"))
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range mounts {
		dir := filepath.Dir(m.Mountpoint)
		if !strings.HasPrefix(dir, filepath.Clean(os.TempDir())+"/") || !dead(filepath.Base(dir)) {
			continue
		}
		err := unix.Unmount(m.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err == nil {
			err = os.RemoveAll(dir)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
