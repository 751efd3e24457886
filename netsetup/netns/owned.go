package netns

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// CreateOwned makes and pins a new network namespace that belongs to a new user
// namespace, whose users and groups 0 to count-1 are the host's from first on,
// and returns its path. Root in there may configure this network and nothing
// else of the host's (user_namespaces(7)). The user namespace needs no pin of
// its own: it lives as long as what it owns, and Owner opens it.
//
// Unlike with Create, what is pinned under that name already is an error.
func (d *Dir) CreateOwned(name string, first, count uint32) (string, error) {
	if err := checkName(name); err != nil {
		return "", err
	}
	if err := d.createOwned(d.Path(name), first, count); err != nil {
		return "", fmt.Errorf("create network namespace %s in a user namespace: %w", name, err)
	}
	return d.Path(name), nil
}

func (d *Dir) createOwned(path string, first, count uint32) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o400)
	if err != nil {
		return err
	}
	_ = f.Close() // read-only and empty: nothing to lose
	if ok, err := isNamespace(path); err != nil {
		return err
	} else if ok {
		return os.ErrExist
	}
	err = withOwned(first, count, func(pid int) error {
		return unix.Mount("/proc/"+strconv.Itoa(pid)+"/ns/net", path, "", unix.MS_BIND, "")
	})
	if err != nil {
		_ = os.Remove(path) // best effort: the next one copes with the file
	}
	return err
}

// withOwned calls fn with a process that is in a new user namespace and a
// network namespace of that one's. The process is this program, stopped before
// its first instruction (a thread of ours could not go there: setns(2) and
// unshare(2) want a process with a single one), and it ends with the call.
func withOwned(first, count uint32, fn func(pid int) error) error {
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(first), Size: int(count)}}
	// The thread that starts it is its tracer, and must not end before.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pid, err := syscall.ForkExec("/proc/self/exe", []string{"user-namespace"}, &syscall.ProcAttr{
		Sys: &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
			UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true,
			Ptrace: true, Pdeathsig: unix.SIGKILL,
		},
	})
	if err != nil {
		return explain(err)
	}
	err = fn(pid)
	_ = unix.Kill(pid, unix.SIGKILL) // a child not waited for keeps its number
	for {
		var ws unix.WaitStatus
		if _, werr := unix.Wait4(pid, &ws, 0, nil); werr != nil && werr != unix.EINTR {
			return errors.Join(err, fmt.Errorf("wait for the namespace's first process: %w", werr))
		} else if werr == nil && (ws.Exited() || ws.Signaled()) {
			return err
		}
	}
}

// explain says what a refused user namespace means (clone(2)).
func explain(err error) error {
	switch {
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("the kernel is built without user namespaces (CONFIG_USER_NS): %w", err)
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EUSERS):
		return fmt.Errorf("the kernel's limit is reached (sysctl user.max_user_namespaces or user.max_net_namespaces): %w", err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("the kernel does not permit user namespaces here: %w", err)
	}
	return err
}

// Owner opens the user namespace that the network namespace at path belongs to
// (ioctl_nsfs(2)). The file is the caller's.
func Owner(path string) (*os.File, error) {
	ns, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("user namespace of a network namespace: %w", err)
	}
	defer ns.Close()
	if ok, err := isNamespace(path); err != nil || !ok {
		return nil, fmt.Errorf("user namespace of %s: %w", path, errors.Join(ErrNotNamespace, err))
	}
	fd, err := unix.IoctlRetInt(int(ns.Fd()), unix.NS_GET_USERNS)
	if err != nil {
		return nil, fmt.Errorf("user namespace of %s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), "user namespace of "+path), nil
}

// TryOwned calls fn with a new user namespace that holds nothing, of users and
// groups as with CreateOwned; it is gone when fn has returned and closed what
// it made with it. The error of a kernel that cannot make one says why.
func TryOwned(first, count uint32, fn func(users *os.File) error) error {
	return withOwned(first, count, func(pid int) error {
		users, err := os.Open("/proc/" + strconv.Itoa(pid) + "/ns/user")
		if err != nil {
			return err
		}
		defer users.Close()
		return fn(users)
	})
}
