package cluster

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netns"
)

// A machine's clock. All machines of a netns cluster share the kernel's, and time
// namespaces move the monotonic clocks alone. A program reads the wall clock in the
// vDSO, which the kernel maps into each process, and of which a process that is traced
// gets a copy of its own when it is written to. So the program under test stays as it
// ships: only what the kernel tells it is another time. Files and other processes
// (podmon, containers) keep the machine's.

// clockCode asks the kernel and adds what lies behind it to the seconds of
// CLOCK_REALTIME; the monotonic clocks are left as they are. For x86-64:
//
//	mov eax, SYS_clock_gettime; syscall
//	test edi, edi; jne end
//	mov rcx, [rip+clockShift-18]; add [rsi], rcx
//	end: ret
var clockCode = []byte{
	0xb8, 0xe4, 0x00, 0x00, 0x00, 0x0f, 0x05,
	0x85, 0xff, 0x75, 0x0a,
	0x48, 0x8b, 0x0d, clockShift - 18, 0, 0, 0, 0x48, 0x01, 0x0e,
	0xc3,
}

// clockShift is where the seconds lie, from the beginning of the code: the kernel
// aligns its functions to 16 bytes, so that they are written in one go.
const clockShift = 32

// ErrClock is returned where a machine's clock cannot be moved.
var ErrClock = errors.New("the clock of a process cannot be moved here")

// SetClock moves the wall clock of clusterd on the node, to that much ahead of the
// machine's, at once, and for its later starts. The cluster must have been made with Config.Clocks.
func (c *Netns) SetClock(name string, ahead time.Duration) error {
	if !c.cfg.Clocks {
		return errors.New("the cluster was not made with Config.Clocks")
	}
	if _, err := c.node(name); err != nil {
		return err
	}
	c.clockMu.Lock()
	defer c.clockMu.Unlock()
	c.clocks[name] = ahead
	pid, err := c.Pid(name)
	if errors.Is(err, ErrNotRunning) {
		return nil
	}
	if err != nil {
		return err
	}
	at, err := clockOf(pid)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	code := make([]byte, len(clockCode))
	if _, err := f.ReadAt(code, at); err != nil {
		return err
	}
	if !bytes.Equal(code, clockCode) {
		return fmt.Errorf("%s: process %d has started another program by itself: start it again", name, pid)
	}
	_, err = f.WriteAt(clockSeconds(ahead), at+clockShift)
	return err
}

func clockSeconds(ahead time.Duration) []byte {
	return binary.LittleEndian.AppendUint64(nil, uint64(int64(ahead/time.Second)))
}

// StartAt starts a command in the network namespace at that path, whose wall
// clock can be moved and is so from its first instruction. Its SysProcAttr must not be nil.
func StartAt(cmd *exec.Cmd, ns string, ahead time.Duration) error {
	if runtime.GOARCH != "amd64" {
		return fmt.Errorf("on %s: %w", runtime.GOARCH, ErrClock)
	}
	cmd.SysProcAttr.Ptrace = true
	return netns.Do(ns, func() error { // on one thread, which alone may speak to what it traces
		if err := cmd.Start(); err != nil {
			return err
		}
		pid := cmd.Process.Pid
		err := moveClock(pid, ahead)
		if err != nil {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		return errors.Join(err, syscall.PtraceDetach(pid))
	})
}

// moveClock waits until a process that is traced has begun its program, and puts the code
// into it.
func moveClock(pid int, ahead time.Duration) error {
	var ws syscall.WaitStatus
	if _, err := syscall.Wait4(pid, &ws, 0, nil); err != nil {
		return err
	}
	if !ws.Stopped() {
		return fmt.Errorf("process %d ended before it began", pid)
	}
	at, err := clockOf(pid)
	if err != nil {
		return err
	}
	code := make([]byte, clockShift, clockShift+8)
	copy(code, clockCode)
	_, err = syscall.PtracePokeData(pid, uintptr(at), append(code, clockSeconds(ahead)...))
	return err
}

// clockOf is the address of the vDSO's clock_gettime in a process.
func clockOf(pid int) (int64, error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(maps)) {
		var from, to int64
		if !strings.HasSuffix(strings.TrimSpace(line), "[vdso]") {
			continue
		}
		if _, err := fmt.Sscanf(line, "%x-%x", &from, &to); err != nil {
			return 0, err
		}
		f, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
		if err != nil {
			return 0, err
		}
		defer f.Close()
		image := make([]byte, to-from)
		if _, err := f.ReadAt(image, from); err != nil {
			return 0, err
		}
		file, err := elf.NewFile(bytes.NewReader(image))
		if err != nil {
			return 0, err
		}
		symbols, err := file.DynamicSymbols()
		if err != nil {
			return 0, err
		}
		for _, s := range symbols {
			if s.Name == "__vdso_clock_gettime" && s.Size >= clockShift+8 && s.Value%8 == 0 {
				return from + int64(s.Value), nil
			}
		}
	}
	return 0, fmt.Errorf("process %d has no vDSO with clock_gettime: %w", pid, ErrClock)
}
