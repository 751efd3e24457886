package podmon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// process is a running process held by a pidfd, so that a signal never reaches
// another one that got its number later.
type process struct {
	pid   int
	start uint64 // /proc/PID/stat's start time, in clock ticks since boot
	fd    *os.File
}

// exitStatus is how a process ended. Lost: unknown.
type exitStatus struct {
	code   int // 128+signal for a killed one
	signal int
	lost   bool
}

// lostExit is reported when the exit code could not be read.
var lostExit = exitStatus{code: 255, lost: true}

// openProcess takes hold of a running process. With start set it must also be
// the one that started then; os.ErrProcessDone says it has ended.
func openProcess(pid int, start uint64) (*process, error) {
	p, err := openProcessDead(pid, start)
	if err != nil {
		return nil, err
	}
	if st, err := readProcStat(pid); start != 0 && (err != nil || st.start != start || st.state == 'Z' || st.state == 'X') {
		p.close()
		return nil, os.ErrProcessDone
	}
	return p, nil
}

// openProcessDead is openProcess, but it also takes hold of one that has ended
// and has not been reaped yet.
func openProcessDead(pid int, start uint64) (*process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return nil, os.ErrProcessDone
	}
	if err != nil {
		return nil, fmt.Errorf("pidfd_open %d: %w", pid, err)
	}
	p := &process{pid: pid, fd: os.NewFile(uintptr(fd), "pidfd")}
	st, err := readProcStat(pid)
	if err == nil && start != 0 && (st.start != start || st.state == 'X') {
		err = os.ErrProcessDone
	}
	if err != nil {
		p.fd.Close()
		return nil, err
	}
	p.start = st.start
	return p, nil
}

// exited waits until the process has ended (it may still be a zombie). It holds
// no thread while it waits.
func (p *process) exited(ctx context.Context) error {
	rc, err := p.fd.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = p.fd.SetReadDeadline(past) })
	defer stop()
	var pollErr error
	err = rc.Read(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		if err != nil && err != unix.EINTR && err != unix.EAGAIN {
			pollErr = err
			return true
		}
		return n > 0
	})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errors.Join(err, pollErr)
}

// use calls f with the pidfd, which stays open meanwhile. File.Fd would not see
// to that: the number could be another file's by the time it is used.
func (p *process) use(f func(fd int) error) error {
	rc, err := p.fd.SyscallConn()
	if err == nil {
		var ferr error
		if err = rc.Control(func(fd uintptr) { ferr = f(int(fd)) }); err == nil {
			return ferr
		}
	}
	if errors.Is(err, os.ErrClosed) {
		return os.ErrProcessDone
	}
	return err
}

// dead tells whether the process has ended, reaped or not.
func (p *process) dead() bool {
	st, err := readProcStat(p.pid)
	return err != nil || st.start != p.start || st.state == 'Z' || st.state == 'X'
}

// signal sends sig to the process alone.
func (p *process) signal(sig unix.Signal) error {
	err := p.use(func(fd int) error { return unix.PidfdSendSignal(fd, sig, nil, 0) })
	if errors.Is(err, unix.ESRCH) {
		return os.ErrProcessDone
	}
	return err
}

// killGroup kills every process of the group it leads.
func (p *process) killGroup() {
	const signalProcessGroup = 1 << 2 // PIDFD_SIGNAL_PROCESS_GROUP, Linux 6.9
	err := p.use(func(fd int) error { return unix.PidfdSendSignal(fd, unix.SIGKILL, nil, signalProcessGroup) })
	if errors.Is(err, unix.EINVAL) && p.signal(0) == nil {
		err = unix.Kill(-p.pid, unix.SIGKILL)
	}
	if err != nil {
		_ = p.signal(unix.SIGKILL)
	}
}

func (p *process) close() { p.fd.Close() }

// reap collects the exit status of a child that has ended.
func (p *process) reap() exitStatus {
	var ws unix.WaitStatus
	for {
		pid, err := unix.Wait4(p.pid, &ws, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil || pid != p.pid {
			return p.nonChildExit()
		}
		return waitStatus(ws)
	}
}

// reapIfOurs collects the process if it is our child, as after podmon became
// the keeper of its successor.
func (p *process) reapIfOurs() {
	_, _ = unix.Wait4(p.pid, nil, unix.WNOHANG, nil)
}

func waitStatus(ws unix.WaitStatus) exitStatus {
	if ws.Signaled() {
		return exitStatus{code: 128 + int(ws.Signal()), signal: int(ws.Signal())}
	}
	return exitStatus{code: ws.ExitStatus()}
}

// pidfdInfo is struct pidfd_info of the kernel's first version of it.
type pidfdInfo struct {
	mask                     uint64
	cgroupid                 uint64
	pid, tgid, ppid          uint32
	ruid, rgid, euid, egid   uint32
	suid, sgid, fsuid, fsgid uint32
	exitCode                 int32
}

const (
	pidfdGetInfo  = 0xc040ff0b // _IOWR(0xFF, 11, 64 bytes)
	pidfdInfoExit = 1 << 3
)

// nonChildExit finds out how a process that is not (any more) our child ended.
// While it is a zombie its exit code can be read; once its parent has reaped it
// only the pidfd knows, on kernels from 6.15.
func (p *process) nonChildExit() exitStatus {
	for range 20 { // it may go from the one to the other between the questions
		if st, err := readProcStat(p.pid); err == nil && st.start == p.start && st.state == 'Z' {
			return waitStatus(st.exit)
		}
		if st := p.reapedExit(); !st.lost {
			return st
		}
		time.Sleep(5 * time.Millisecond)
	}
	return lostExit
}

func (p *process) reapedExit() exitStatus {
	info := pidfdInfo{mask: pidfdInfoExit}
	err := p.use(func(fd int) error {
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), pidfdGetInfo, uintptr(unsafe.Pointer(&info))); errno != 0 {
			return errno
		}
		return nil
	})
	if err != nil || info.mask&pidfdInfoExit == 0 {
		return lostExit
	}
	return waitStatus(unix.WaitStatus(info.exitCode))
}

type procStat struct {
	state byte
	ppid  int
	start uint64
	exit  unix.WaitStatus // of a zombie
}

func readProcStat(pid int) (procStat, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return procStat{}, os.ErrProcessDone
	}
	if err != nil {
		return procStat{}, err
	}
	return parseProcStat(b)
}

// parseProcStat reads the fields behind the command's name, which is in
// parentheses and may contain anything.
func parseProcStat(b []byte) (procStat, error) {
	i := bytes.LastIndexByte(b, ')')
	if i < 0 {
		return procStat{}, fmt.Errorf("no command in process stat %q", b)
	}
	f := bytes.Fields(b[i+1:])
	if len(f) < 20 {
		return procStat{}, fmt.Errorf("short process stat %q", b)
	}
	ppid, err := strconv.Atoi(string(f[1]))
	if err != nil {
		return procStat{}, err
	}
	start, err := strconv.ParseUint(string(f[19]), 10, 64)
	if err != nil {
		return procStat{}, err
	}
	st := procStat{state: f[0][0], ppid: ppid, start: start}
	if len(f) >= 50 {
		exit, err := strconv.ParseUint(string(f[49]), 10, 32)
		if err != nil {
			return procStat{}, err
		}
		st.exit = unix.WaitStatus(exit)
	}
	return st, nil
}

// setOOMScore writes the kernel's victim preference. Lowering it below our own
// needs a right we may not have: then the pid keeps what it inherited.
func setOOMScore(pid, score int) {
	_ = os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte(strconv.Itoa(score)), 0)
}
