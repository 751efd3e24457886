package releases

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The guard is a process of the program before, which watches the node's process
// while the program that this runs is on trial: it needs nothing of that program to
// work. It is a child of init, in the session, cgroup and network of the node.
const (
	// GuardCommand is the hidden command that runs it.
	GuardCommand = "upgrade-guard"

	// look is how often the guard looks whether the trial is over.
	look = 200 * time.Millisecond
	// endFor is how long a node may take to stop in order before it is killed; neverUp
	// is the same for one that was never up, whose pods others are about to replace.
	endFor  = 40 * time.Second
	neverUp = 3 * time.Second
)

// SpawnGuard starts the guard of the node with that pid. One that has a guard already
// keeps that one: the second ends by itself.
func (p Place) SpawnGuard(pid int, data string) error {
	// The command starts itself again and ends, so that it needs no parent that waits for it.
	cmd := exec.Command(p.Previous(), GuardCommand, "--data", data, "--exe", p.Exe, "--pid", strconv.Itoa(pid), "--detach")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("start the guard of the upgrade: %w", err)
	}
	return nil
}

// Guarded starts the guard before a program on trial runs for the first time. Where that
// cannot be done, the trial is taken back: nothing that is not guarded is begun.
func (p Place) Guarded(t Trial, pid int, data string, now time.Time) error {
	err := p.SpawnGuard(pid, data)
	if err == nil {
		return nil
	}
	if back := p.Back(t.Version, err.Error(), now); back != nil {
		return errors.Join(err, back)
	}
	return nil
}

// Detach starts this process's command again, without the last argument, and does
// not wait for it.
func Detach() error {
	cmd := exec.Command("/proc/self/exe", os.Args[1:len(os.Args)-1]...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd.Start()
}

// Guard watches the process until the trial is over. When it returns true the guard
// has taken the program back and no service manager starts the node: the caller does, with
// the arguments.
func (p Place) Guard(pid int, log io.Writer) (start bool, args []string, err error) {
	lock, err := os.OpenFile(p.state("guard.lock"), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return false, nil, err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return false, nil, nil // there is one
		}
		return false, nil, err
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return false, nil, fmt.Errorf("watch process %d: %w", pid, err)
	}
	if err == nil {
		defer unix.Close(fd)
	} else {
		fd = -1
	}
	began, unread := time.Now(), false
	for {
		gone, err := ended(fd, look)
		if err != nil {
			return false, nil, err
		}
		t, err := p.Trial()
		if err != nil && !gone {
			// Too many open files on the machine, say: the node is still to be guarded.
			if !unread {
				unread = true
				fmt.Fprintf(log, "clusterd %s: the trial cannot be read, trying on: %v\n", GuardCommand, err)
			}
			continue
		}
		if err != nil || t == nil {
			return false, nil, err
		}
		why := ""
		switch {
		case gone && t.Orderly:
			return false, nil, nil // its next start goes on with the trial
		case gone:
			why = "it ended by itself"
		default:
			if why = t.late(time.Now(), time.Since(began)); why == "" {
				continue
			}
		}
		fmt.Fprintf(log, "clusterd %s: release %s is taken back: %s\n", GuardCommand, t.Version, why)
		// The program first: whoever starts the node next starts the right one.
		if err := p.Back(t.Version, why, time.Now()); err != nil {
			if IsRefused(err) {
				return false, nil, nil // somebody was quicker
			}
			return false, nil, err
		}
		if !gone {
			limit := endFor
			if !t.Up {
				limit = neverUp
			}
			if err := end(fd, limit); err != nil {
				return false, nil, err
			}
		}
		return !managed(pid), t.Args, nil
	}
}

// managed says whether a service manager starts the node again when it ends: systemd,
// which says so to its services.
func managed(pid int) bool {
	return os.Getenv("NOTIFY_SOCKET") != "" || os.Getenv("SYSTEMD_EXEC_PID") == strconv.Itoa(pid)
}

// ended waits for the end of a process for a while.
func ended(pidfd int, wait time.Duration) (bool, error) {
	if pidfd < 0 {
		return true, nil
	}
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, int(wait.Milliseconds()))
	if errors.Is(err, unix.EINTR) {
		return false, nil
	}
	return n > 0, err
}

// end stops a process, in order if it does so within limit.
func end(pidfd int, limit time.Duration) error {
	for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGKILL} {
		if err := unix.PidfdSendSignal(pidfd, sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
		if sig == unix.SIGKILL {
			limit = endFor
		}
		for deadline := time.Now().Add(limit); time.Now().Before(deadline); {
			if gone, err := ended(pidfd, look); gone || err != nil {
				return err
			}
		}
	}
	return errors.New("the node's process does not end")
}
