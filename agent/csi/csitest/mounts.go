package csitest

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// kernel makes real mounts.
type kernel struct{}

func (kernel) Bind(source, target string, readOnly bool) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return &os.PathError{Op: "bind", Path: target, Err: err}
	}
	if !readOnly {
		return nil
	}
	return unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
}

func (kernel) Unmount(target string) error { return unix.Unmount(target, 0) }

func (kernel) Mounted(target string) (bool, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, target, unix.AT_SYMLINK_NOFOLLOW, 0, &st); err != nil {
		return false, err
	}
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// Fake notes mounts and makes none. Its zero value is ready.
type Fake struct {
	mu sync.Mutex
	at map[string]string
}

// Bind implements Mounts.
func (f *Fake) Bind(source, target string, readOnly bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.at == nil {
		f.at = map[string]string{}
	}
	f.at[target] = fmt.Sprintf("%s %v", source, readOnly)
	return nil
}

// Unmount implements Mounts.
func (f *Fake) Unmount(target string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.at, target)
	return nil
}

// Mounted implements Mounts.
func (f *Fake) Mounted(target string) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.at[target] != "", nil
}

// Left are the mounts that there are.
func (f *Fake) Left() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []string
	for target := range f.at {
		out = append(out, target)
	}
	return out
}

// attachLoop puts a file behind a loop device.
func attachLoop(path string) (string, error) {
	file, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer file.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer control.Close()
	for range 10 { // another may take the free one first
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return "", err
		}
		name := fmt.Sprintf("/dev/loop%d", n)
		loop, err := os.OpenFile(name, os.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return "", err
		}
		err = unix.IoctlSetInt(int(loop.Fd()), unix.LOOP_SET_FD, int(file.Fd()))
		loop.Close()
		if !errors.Is(err, unix.EBUSY) {
			return name, err
		}
	}
	return "", errors.New("no loop device is free")
}

// detachLoop frees the loop device that is mounted at path, if one is.
func detachLoop(path string) error {
	st, err := os.Stat(path)
	if err != nil || st.Mode()&os.ModeDevice == 0 {
		return nil
	}
	loop, err := os.Open(path)
	if err != nil {
		return err
	}
	defer loop.Close()
	if err := unix.IoctlSetInt(int(loop.Fd()), unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		return err
	}
	return nil
}
