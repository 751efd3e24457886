package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// canary is a file of the node, by its path there.
var canary = os.Getenv("CANARY")

// ownMounts are what is mounted from the node into every pod; the root is the image.
var ownMounts = []string{"/", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/dev/termination-log", "/var/run/secrets/kubernetes.io/serviceaccount", "/run/secrets/kubernetes.io/serviceaccount", "/small"}

func files() []way {
	out := []way{
		fails("the node's files by their path", func() error { return there(canary) }),
		fails("the node's files by the first process's root", func() error { return there("/proc/1/root" + canary) }),
		fails("the node's files by many steps up", func() error { return there(strings.Repeat("../", 64) + canary) }),
		fails("the node's files by the working folder", func() error { return there("/proc/self/cwd/" + strings.Repeat("../", 64) + canary) }),
		fails("the node's files by an open folder", func() error {
			names, err := filepath.Glob("/proc/self/fd/*")
			if err != nil {
				return err
			}
			for _, name := range names {
				if err := there(name + "/" + strings.Repeat("../", 64) + canary); err == nil {
					return nil
				}
			}
			return fmt.Errorf("by none of %d", len(names))
		}),
		fails("the node's files by chroot and back", func() error {
			fd, err := unix.Open("/", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			if err := os.MkdirAll("/tmp/jail", 0o755); err != nil {
				return err
			}
			if err := unix.Chroot("/tmp/jail"); err != nil {
				return err
			}
			if err := unix.Fchdir(fd); err != nil {
				return err
			}
			for range 64 {
				_ = unix.Chdir("..")
			}
			if err := unix.Chroot("."); err != nil {
				return err
			}
			return there(canary)
		}),
		fails("other pods' folders", func() error {
			for _, dir := range []string{"/var/lib/clusterd", "/var/lib/kubelet/pods", "/var/log/pods", "/run/clusterd", filepath.Dir(filepath.Dir(canary)) + "/c"} {
				if _, err := os.Stat(dir); err == nil {
					return nil
				}
			}
			return errors.New("none is seen")
		}),
		fails("sockets of the node's programs", func() error {
			found := ""
			_ = filepath.WalkDir("/", func(path string, d fs.DirEntry, err error) error {
				if err != nil || path == "/proc" || path == "/sys" {
					return fs.SkipDir
				}
				if d.Type() == fs.ModeSocket {
					found = path
					return fs.SkipAll
				}
				return nil
			})
			if found == "" {
				return errors.New("there are none")
			}
			return nil
		}),
		fails("abstract sockets of the node's programs", func() error {
			b, err := os.ReadFile("/proc/net/unix")
			if err != nil {
				return err
			}
			if strings.Contains(string(b), "@") {
				return nil
			}
			return errors.New("there are none")
		}),
		fails("a mount that is no pod's", func() error {
			b, err := os.ReadFile("/proc/self/mountinfo")
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(b)) {
				left, right, _ := strings.Cut(line, " - ")
				at, kind := strings.Fields(left)[4], strings.Fields(right)[0]
				switch kind {
				case "proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2", "overlay":
					continue
				}
				known := strings.HasPrefix(at, "/proc/") || strings.HasPrefix(at, "/dev/")
				for _, own := range ownMounts {
					known = known || at == own
				}
				if !known {
					return nil
				}
			}
			return errors.New("all are known")
		}),
		fails("write into the token's folder", func() error {
			return os.WriteFile("/var/run/secrets/kubernetes.io/serviceaccount/token", []byte("x"), 0o600)
		}),
		fails("make a link of the termination message", func() error {
			if err := os.Remove("/dev/termination-log"); err != nil {
				return err
			}
			return os.Symlink(canary, "/dev/termination-log")
		}),
		fails("make a FIFO of the termination message", func() error {
			if err := unix.Mkfifo("/tmp/fifo", 0o666); err != nil {
				return err
			}
			return os.Rename("/tmp/fifo", "/dev/termination-log")
		}),
		fails("make a link of the hosts file", func() error {
			if err := os.Remove("/etc/hosts"); err != nil {
				return err
			}
			return os.Symlink(canary, "/etc/hosts")
		}),
		fails("overwrite the program that runs containers", func() error {
			// Between exec and the container's first instruction the helper's file is there.
			for _, name := range []string{"/proc/1/exe", "/proc/self/exe"} {
				target, err := os.Readlink(name)
				if err != nil {
					return err
				}
				if !strings.HasPrefix(target, "/escape") {
					return nil
				}
			}
			return errors.New("the program is the image's")
		}),
	}
	return out
}

// there is nil when a file is there and holds what the node's does.
func there(file string) error {
	if canary == "" {
		return errors.New("no file of the node was named")
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if !strings.Contains(string(b), "canary") {
		return errors.New("another file")
	}
	return nil
}

func limits() []way {
	return []way{
		{name: "processes without end", heavy: true, try: func() (bool, string) {
			const enough = 8192
			made := 0
			defer func() {
				_ = unix.Kill(-1, unix.SIGKILL) // all but the first process, which this is
				for range made {
					_, _ = unix.Wait4(-1, nil, 0, nil)
				}
			}()
			for made < enough {
				pid, _, e := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
				if e != 0 {
					return false, fmt.Sprintf("after %d: %v", made, e)
				}
				if pid == 0 {
					for {
						unix.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
					}
				}
				made++
			}
			return true, fmt.Sprintf("%d were made", made)
		}},
		fill("shared memory without end", "/dev/shm", 128<<20),
		fill("a folder in memory without end", "/small", 64<<20),
	}
}

// fill writes into a directory until no more goes in.
func fill(name, dir string, enough int) way {
	return way{name: name, heavy: true, try: func() (bool, string) {
		file := filepath.Join(dir, "filled")
		f, err := os.Create(file)
		if err != nil {
			return true, "it could not be tried: " + err.Error()
		}
		defer os.Remove(file)
		defer f.Close()
		b := make([]byte, 1<<20)
		for n := 0; n < enough; n += len(b) {
			if _, err := f.Write(b); err != nil {
				return false, fmt.Sprintf("after %d MiB: %v", n>>20, err)
			}
		}
		return true, fmt.Sprintf("%d MiB", enough>>20)
	}}
}
