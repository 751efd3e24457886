package podmon

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"

	"github.com/clusterd/clusterd/agent/podmon/api/frame"
	"golang.org/x/sys/unix"
)

// handoverVersion is that of handoverFile and of what comes with it: the
// arguments of the keeper, the messages on the link. It changes when a program
// that knows only the former one could not go on from it.
const handoverVersion = 1

// handover is what goes over to a program that a process executes to be the
// keeper: podmon, when its keeper was killed, or the keeper, when it is replaced.
// Its children stay with it anyway.
type handover struct {
	kept []*kept
	lock *os.File // the keeper's lock, held; nil: it has to be taken
}

// handoverFile is a handover as the executed program reads it. Descriptors have
// the same numbers there.
type handoverFile struct {
	Version int
	Kept    []handedKept
	LockFD  int `json:",omitempty"` // 0: none
}

type handedKept struct {
	kept
	FDs []int
}

// execute turns this process into a keeper: program (nil: the one it is) with
// podmon's arguments. It returns only on an error.
func (h handover) execute(program *os.File, args []string) (err error) {
	f := handoverFile{Version: handoverVersion}
	var opened []int
	defer func() { // nothing but an error leads here
		for _, fd := range opened {
			unix.Close(fd)
		}
		err = fmt.Errorf("become the keeper: %w", err)
	}()
	over := func(file *os.File) (int, error) {
		fd, err := dupAcrossExec(file)
		if err == nil {
			opened = append(opened, fd)
		}
		return fd, err
	}
	for _, k := range h.kept {
		e := handedKept{kept: *k}
		for _, file := range k.files {
			fd, err := over(file)
			if err != nil {
				return err
			}
			e.FDs = append(e.FDs, fd)
		}
		f.Kept = append(f.Kept, e)
	}
	if h.lock != nil {
		if f.LockFD, err = over(h.lock); err != nil {
			return err
		}
	}
	b, err := frame.Encode(f)
	if err != nil {
		return err
	}
	fd, err := unix.MemfdCreate("handover", 0)
	if err != nil {
		return fmt.Errorf("memfd_create: %w", err)
	}
	mem := os.NewFile(uintptr(fd), "handover")
	defer mem.Close()
	if _, err = mem.Write(b); err == nil {
		_, err = mem.Seek(0, 0)
	}
	if err != nil {
		return err
	}
	path := "/proc/self/exe"
	if program != nil {
		path = fmt.Sprintf("/proc/self/fd/%d", program.Fd())
	}
	argv := append([]string{"podmon"}, args...)
	argv = append(argv, "--keep", "--handover-fd", strconv.Itoa(fd))
	return syscall.Exec(path, argv, ownEnviron())
}

// readHandover reads what execute left in f, which it takes over.
func readHandover(f *os.File) (*handover, error) {
	defer f.Close()
	var in handoverFile
	if err := frame.Decode(f, &in); err != nil {
		return nil, fmt.Errorf("read what was handed over: %w", err)
	}
	h := &handover{}
	if in.LockFD > 0 {
		unix.CloseOnExec(in.LockFD)
		h.lock = os.NewFile(uintptr(in.LockFD), keeperLockName)
	}
	for _, e := range in.Kept {
		k := e.kept
		for _, fd := range e.FDs {
			unix.CloseOnExec(fd)
			k.files = append(k.files, os.NewFile(uintptr(fd), "kept"))
		}
		h.kept = append(h.kept, &k)
	}
	return h, nil
}

// dupAcrossExec makes a descriptor that a program executed here finds open.
func dupAcrossExec(f *os.File) (int, error) {
	rc, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	var fd int
	var dupErr error
	if err := rc.Control(func(old uintptr) { fd, dupErr = unix.FcntlInt(old, unix.F_DUPFD, 10) }); err != nil {
		return 0, err
	}
	return fd, errors.Join(dupErr)
}
