// Command escape tries to get out of the container that it runs in, and prints one
// line for each way: its name, OPEN or shut, and what the kernel said. It changes
// nothing outside even where it could: files are opened and not written, calls of the
// kernel bear arguments that fail after the question whether they are allowed. What
// has to be seen from outside, it only sends.
//
//	escape attack          every way
//	escape gentle          the same, without what fills, floods or forks
//	escape show FILE...    print files, and why they cannot be printed
//	escape status          capabilities and user, as the kernel has them
//	escape flip DIR NAME TARGET
//	                       exchange DIR/NAME, a folder, and a link to TARGET, for ever
//	escape link TARGET NAME
//	                       make a link
//	escape inodes DIR      make files until no more can be made
//	escape fill DIR        write 64 MiB and wait
//	escape listen          print where packets to port 4000 come from
//	escape sleep           wait
package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// way is one way out.
type way struct {
	name string
	try  func() (open bool, said string)
	// heavy fills, floods or forks.
	heavy bool
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "escape:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		args = []string{"sleep"}
	}
	switch args[0] {
	case "attack", "gentle":
		for _, list := range [][]way{mounts(), namespaces(), kernelFiles(), systemCalls(), devices(), files(), limits(), network()} {
			for _, w := range list {
				if w.heavy && args[0] == "gentle" {
					continue
				}
				open, said := w.try()
				word := "shut"
				if open {
					word = "OPEN"
				}
				fmt.Printf("%s\t%s\t%s\n", w.name, word, strings.Join(strings.Fields(said), " "))
			}
		}
		fmt.Println("done")
	case "show":
		for _, name := range args[1:] {
			show(name)
		}
	case "status":
		show("/proc/self/status")
	case "flip":
		if len(args) != 4 {
			return errors.New("flip DIR NAME TARGET")
		}
		return flip(args[1], args[2], args[3])
	case "link":
		if len(args) != 3 {
			return errors.New("link TARGET NAME")
		}
		return os.Symlink(args[1], args[2])
	case "inodes":
		for i := 0; ; i++ {
			f, err := os.Create(filepath.Join(args[1], fmt.Sprint(i)))
			if err != nil {
				return fmt.Errorf("after %d files: %w", i, err)
			}
			_ = f.Close()
		}
	case "fill":
		if len(args) != 2 {
			return errors.New("fill DIR")
		}
		b := make([]byte, 64<<20)
		if err := os.WriteFile(filepath.Join(args[1], "filled"), b, 0o644); err != nil {
			return err
		}
		return run(nil)
	case "listen":
		return listen()
	case "sleep":
		wait := make(chan os.Signal, 1)
		signal.Notify(wait, syscall.SIGTERM, syscall.SIGINT)
		<-wait
	default:
		return fmt.Errorf("no subcommand %q", args[0])
	}
	return nil
}

// show prints the beginning of a file, without waiting for a writer.
func show(name string) {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		fmt.Printf("%s: %v\n", name, err)
		return
	}
	b := make([]byte, 8192)
	n, err := unix.Read(fd, b)
	_ = unix.Close(fd)
	if err != nil {
		fmt.Printf("%s: %v\n", name, err)
		return
	}
	fmt.Printf("%s: %s\n", name, b[:n])
}

// flip exchanges a directory and a link without a pause between.
func flip(dir, name, target string) error {
	folder, link := filepath.Join(dir, name), filepath.Join(dir, name+".link")
	if err := os.MkdirAll(folder, 0o777); err != nil {
		return err
	}
	if err := os.Symlink(target, link); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	fmt.Println("flipping")
	for {
		if err := unix.Renameat2(unix.AT_FDCWD, folder, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE); err != nil {
			return err
		}
	}
}

// listen prints where packets come from.
func listen() error {
	c, err := net.ListenPacket("udp4", ":4000")
	if err != nil {
		return err
	}
	fmt.Println("listening")
	b := make([]byte, 1500)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return err
		}
		fmt.Printf("%q from %s\n", b[:n], from)
		_, _ = c.WriteTo(b[:n], from)
	}
}

// errno is a verdict on a call: EPERM and the like shut it, every other answer means
// that it reached what it is for.
func errno(err error) (bool, string) {
	switch {
	case err == nil:
		return true, "done"
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EROFS):
		return false, err.Error()
	}
	return true, "the call is allowed: " + err.Error()
}

// call makes a system call by its number.
func call(name string, nr uintptr, args ...uintptr) way {
	return way{name: name, try: func() (bool, string) {
		for len(args) < 6 {
			args = append(args, 0)
		}
		_, _, e := unix.Syscall6(nr, args[0], args[1], args[2], args[3], args[4], args[5])
		if e == 0 {
			return errno(nil)
		}
		return errno(e)
	}}
}

// fails is a way that is shut by any error.
func fails(name string, do func() error) way {
	return way{name: name, try: func() (bool, string) {
		if err := do(); err != nil {
			return false, err.Error()
		}
		return true, "done"
	}}
}

// writes opens a file for writing and writes nothing.
func writes(file string) way {
	return fails("write "+file, func() error {
		f, err := os.OpenFile(file, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		return f.Close()
	})
}

// reads reads a file, of which something has to come.
func reads(file string) way {
	return fails("read "+file, func() error {
		fd, err := unix.Open(file, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		n, err := unix.Read(fd, make([]byte, 64))
		if err == nil && n == 0 {
			err = io.EOF
		}
		return err
	})
}
