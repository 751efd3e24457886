package isolate

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// harmless are the mount flags of everything in the program's root.
const harmless = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// Enter gives up what the spec does not name, for all threads of this process. It has to
// run in a mount and a PID namespace that a Runner made for it. After an error the
// process must end.
func Enter(s Spec) error {
	if err := setFile("/proc/self/comm", filepath.Base(os.Args[0])); err != nil { // it runs from a number
		return err
	}
	// All threads, which are this process group: clusterd comes first.
	if err := unix.Setpriority(unix.PRIO_PGRP, 0, niceness); err != nil {
		return fmt.Errorf("a lower priority: %w", err)
	}
	// The kernel is to end this process before any other.
	if err := setFile("/proc/self/oom_score_adj", "1000"); err != nil {
		return fmt.Errorf("be the first to be killed for memory: %w", err)
	}
	if err := limit(s.Memory); err != nil {
		return err
	}
	if err := enterRoot(s); err != nil {
		return fmt.Errorf("a root of its own: %w", err)
	}
	if s.FileSize > 0 { // not of those that were copied
		n := uint64(s.FileSize)
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: n, Max: n}); err != nil {
			return fmt.Errorf("limit files to %d bytes: %w", n, err)
		}
	}
	// Filters are per thread until the kernel hands them to all.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := drop(s); err != nil {
		return fmt.Errorf("give up privileges: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	if err := filter(s.Network); err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	return nil
}

// niceness is how far the program stands back for others that want the processors.
const niceness = 10

// slop is what Go has mapped and does not use: it takes memory in arenas of 64 MiB.
const slop = 96 << 20

func limit(memory int64) error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("no core files: %w", err)
	}
	if memory == 0 {
		return nil
	}
	n := uint64(memory) + slop
	if err := unix.Setrlimit(unix.RLIMIT_DATA, &unix.Rlimit{Cur: n, Max: n}); err != nil {
		return fmt.Errorf("limit the memory to %d bytes: %w", n, err)
	}
	return nil
}

// enterRoot makes a file system with what the spec names, and nothing else, the root.
func enterRoot(s Spec) error {
	copied := map[string][]byte{}
	for _, name := range s.Files {
		b, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		copied[name] = b
	}
	// What is mounted here stays here; what the machine unmounts goes here, too.
	if err := mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return err
	}
	if err := mount("tmpfs", s.Root, "tmpfs", harmless, "mode=0755,size=4m"); err != nil {
		return err
	}
	for name, b := range copied {
		at := filepath.Join(s.Root, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(at, b, 0o644); err != nil { //nolint:forbidigo // in memory
			return err
		}
	}
	for _, b := range s.Binds {
		at := filepath.Join(s.Root, b.To)
		if err := os.Mkdir(at, 0o755); err != nil {
			return err
		}
		if err := mount(b.From, at, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		flags := uintptr(unix.MS_BIND | unix.MS_REMOUNT | harmless)
		if !b.Write {
			flags |= unix.MS_RDONLY
		}
		if err := mount("", at, "", flags, ""); err != nil {
			return err
		}
	}
	if s.Proc {
		if err := mountProc(filepath.Join(s.Root, "proc")); err != nil {
			return err
		}
	}
	return pivot(s.Root)
}

// mountProc shows this process alone, and no switches of the kernel where the kernel can
// leave them out (Linux 5.8).
func mountProc(at string) error {
	if err := os.Mkdir(at, 0o755); err != nil {
		return err
	}
	err := mount("proc", at, "proc", harmless|unix.MS_RDONLY, "subset=pid")
	if errors.Is(err, unix.EINVAL) {
		err = mount("proc", at, "proc", harmless|unix.MS_RDONLY, "")
	}
	return err
}

func pivot(root string) error {
	if err := os.Chdir(root); err != nil {
		return err
	}
	// With both names the same, the old root comes to lie on the new one.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root %s: %w", root, err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leave the old root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	return mount("", "/", "", unix.MS_REMOUNT|unix.MS_RDONLY|harmless, "")
}

func mount(from, at, kind string, flags uintptr, data string) error {
	if err := unix.Mount(from, at, kind, flags, data); err != nil {
		return fmt.Errorf("mount %s: %w", at, err)
	}
	return nil
}

// drop gives up the user or its capabilities.
func drop(s Spec) error {
	if s.User != 0 {
		if err := syscall.Setgroups(nil); err != nil {
			return fmt.Errorf("setgroups: %w", err)
		}
		if err := syscall.Setresgid(s.User, s.User, s.User); err != nil {
			return fmt.Errorf("become group %d: %w", s.User, err)
		}
		if err := syscall.Setresuid(s.User, s.User, s.User); err != nil {
			return fmt.Errorf("become user %d: %w", s.User, err)
		}
		// The change of user has undone it.
		if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
			return fmt.Errorf("end with the parent: %w", err)
		}
		return nil
	}
	var keep [2]unix.CapUserData
	for _, c := range s.Capabilities {
		keep[c/32].Permitted |= 1 << (c % 32)
		keep[c/32].Effective |= 1 << (c % 32)
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&keep[0])), 0)
	if errno != 0 {
		return fmt.Errorf("keep %s: %w", strconv.Itoa(len(s.Capabilities))+" capabilities", errno)
	}
	return nil
}
