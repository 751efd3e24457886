// Package netns makes, pins, enters and drops network namespaces. It is the
// only code that calls setns(2): a thread that is left in the wrong namespace
// is a fault that shows itself far away, so the discipline lives in one place.
//
// A namespace is pinned by a bind mount of its /proc file onto a file in one
// folder. It lives as long as the mount, a process in it, or an open
// descriptor of it; dropping the last of these is also the cheap way to remove
// every interface in it.
//
// Making, opening and entering are vishvananda/netns's. What that lacks is here:
// a directory of pins of our own that survives crashes in the middle, a thread that
// is ended when it cannot go back, and owners in user namespaces.
package netns

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sort"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// ErrNotNamespace is returned when a path is not a network namespace: the
// file is missing, or nothing is mounted on it.
var ErrNotNamespace = errors.New("not a network namespace")

// Dir is a directory of pinned network namespaces, one file per namespace. Its
// methods may be called concurrently for different names; calls for one name
// must not overlap.
type Dir struct {
	path string
}

// Open makes the directory if need be. The directory belongs to this package alone:
// whatever lies in it is taken for a namespace.
func Open(path string) (*Dir, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("network namespaces in %s: %w", path, err)
	}
	if err := os.MkdirAll(abs, 0o700); err != nil {
		return nil, fmt.Errorf("network namespaces in %s: %w", path, err)
	}
	return &Dir{path: abs}, nil
}

// Path is where the namespace of that name is pinned, whether it exists or not.
func (d *Dir) Path(name string) string { return filepath.Join(d.path, name) }

// Create makes and pins a new network namespace and returns its path. One that
// is pinned already is kept, with all that is in it. A file left behind by a
// crash between making and mounting is used again.
func (d *Dir) Create(name string) (string, error) {
	if err := checkName(name); err != nil {
		return "", err
	}
	path := d.Path(name)
	ok, err := isNamespace(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("create network namespace %s: %w", name, err)
	}
	if ok {
		return path, nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o400)
	if err != nil {
		return "", fmt.Errorf("create network namespace %s: %w", name, err)
	}
	_ = f.Close() // read-only and empty: nothing to lose
	err = onThread(func() error {
		made, err := netns.New()
		if err != nil {
			return fmt.Errorf("make it: %w", err)
		}
		defer func() { _ = made.Close() }()
		if err := unix.Mount(own, path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("pin at %s: %w", path, err)
		}
		return nil
	})
	if err != nil {
		_ = os.Remove(path) // best effort: the next Create copes with the file
		return "", fmt.Errorf("create network namespace %s: %w", name, err)
	}
	return path, nil
}

// Delete unpins the namespace; an unknown name is no error. The namespace and
// the interfaces in it go when the last process in it has ended; the kernel
// does that in the background.
func (d *Dir) Delete(name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	path := d.Path(name)
	for {
		// A crash between two Creates can have stacked mounts: take them all.
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break // nothing mounted (any more)
		}
		if err != nil {
			return fmt.Errorf("delete network namespace %s: unpin: %w", name, err)
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("delete network namespace %s: %w", name, err)
	}
	return nil
}

// List returns the names of everything in the directory, sorted: also of files on
// which nothing is mounted, so that a cleanup sees them.
func (d *Dir) List() ([]string, error) {
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return nil, fmt.Errorf("list network namespaces: %w", err)
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	sort.Strings(names)
	return names, nil
}

// Do runs fn on a thread that is inside the namespace at path and waits for
// it. Sockets and netlink handles that fn opens stay in that namespace for
// life, so a caller opens them inside and uses them outside. fn must not start
// goroutines and expect them to be inside: they run on other threads.
//
// If the thread cannot go back to where it was it is ended rather than given
// back to the runtime. A panic of fn is raised again in the caller.
func Do(path string, fn func() error) error {
	target, err := netns.GetFromPath(path)
	if err != nil {
		return fmt.Errorf("enter network namespace %s: %w", path, err)
	}
	defer func() { _ = target.Close() }()
	if ok, err := isNamespace(path); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", path, err)
	} else if !ok {
		return fmt.Errorf("enter %s: %w", path, ErrNotNamespace)
	}
	return onThread(func() error {
		if err := netns.Set(target); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", path, err)
		}
		return fn()
	})
}

// onThread runs fn in a goroutine locked to a thread of its own choice, which
// may change its network namespace; afterwards the thread is back in the
// namespace it came from, or gone.
//
// The process's main thread is never used: it cannot be ended, and
// /proc/<pid>/ns/net, which tools like nsenter read, is the main thread's.
func onThread(fn func() error) error {
	out := make(chan outcome, 1)
	go lockedRun(fn, out)
	o := <-out
	if o.panicked != nil {
		panic(o.panicked)
	}
	return o.err
}

// outcome is how a function run on another thread ended.
type outcome struct {
	err      error
	panicked any
}

func lockedRun(fn func() error, out chan<- outcome) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// Holding the main thread here makes the runtime pick another one.
		next := make(chan outcome, 1)
		go lockedRun(fn, next)
		o := <-next
		runtime.UnlockOSThread()
		out <- o
		return
	}
	home, err := netns.GetFromPath(own)
	if err != nil {
		runtime.UnlockOSThread()
		out <- outcome{err: fmt.Errorf("remember the network namespace: %w", err)}
		return
	}
	o := outcome{err: errors.New("the function ended its goroutine")} // runtime.Goexit in fn
	defer func() {
		if p := recover(); p != nil {
			o.panicked = p
		}
		if netns.Set(home) == nil {
			runtime.UnlockOSThread()
		} // else: still locked, so the runtime ends the thread with this goroutine
		_ = home.Close()
		out <- o
	}()
	o.err = fn()
}

// own is the namespace of the calling thread.
const own = "/proc/thread-self/ns/net"

// isNamespace says whether a namespace is mounted at path.
func isNamespace(path string) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return false, err
	}
	return st.Type == unix.NSFS_MAGIC, nil
}

func checkName(name string) error {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") || len(name) > unix.NAME_MAX {
		return fmt.Errorf("network namespace name %q: must be a plain file name", name)
	}
	return nil
}
