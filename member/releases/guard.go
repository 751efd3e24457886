package releases

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The guard is a process of the program before, which watches the node's process
// from the switch to the end of the trial, and on the way back: it needs nothing of the
// program on trial to work. It is a child of init, in the session, cgroup and network of the node.
const (
	// GuardCommand is the hidden command that runs it.
	GuardCommand = "upgrade-guard"

	// ReadyFlag is the flag of one that tells when it watches, see Ready.
	ReadyFlag = "ready"

	// look is how often the guard looks whether the trial is over.
	look = 200 * time.Millisecond
	// readyWithin is how long it may take to begin on a busy machine.
	readyWithin = time.Minute
	// neverUp is how long a node that was never up, whose pods others are about to
	// replace, may take to stop in order before it is killed.
	neverUp = 3 * time.Second
)

// endFor is the same for one that was up, and also how long a node may take on its way back. Tests shorten it.
var endFor = 40 * time.Second

// SpawnGuard starts the guard of the node with that pid, and returns when it watches.
// One that has a guard already keeps that one: the second ends by itself.
func (p Place) SpawnGuard(pid int, data string) error {
	// The command starts itself again and ends, so that it needs no parent that waits for it.
	cmd := exec.Command(p.Previous(), GuardCommand, "--data", data, "--exe", p.Exe, "--pid", strconv.Itoa(pid), "--detach")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("start the guard of the upgrade: %w", err)
	}
	return nil
}

// Guarded is called right before a program on trial runs for the first time, and starts
// the guard should it be gone. Where that cannot be done, the trial is taken back: nothing
// that is not guarded is begun.
func (p Place) Guarded(t Trial, pid int, data string, now time.Time) error {
	err := p.SpawnGuard(pid, data)
	if err == nil {
		return p.begins(t.Version)
	}
	if back := p.Back(t.Version, err.Error(), now); back != nil {
		return errors.Join(err, back)
	}
	return nil
}

// begins notes that the process becomes the program on trial now.
func (p Place) begins(version string) error {
	return p.locked(func() error {
		t, err := p.Trial()
		if err != nil || t == nil || t.Version != version {
			return err
		}
		t.Begun = true
		_ = p.write("trial.json", *t) // for the words of a failure alone
		return nil
	})
}

// Detach starts this process's command again, with ReadyFlag in the place of the last
// argument, and returns when that watches. It does not wait for its end.
func Detach() error {
	ready, tell, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ready.Close()
	cmd := exec.Command("/proc/self/exe", append(slices.Clone(os.Args[1:len(os.Args)-1]), "--"+ReadyFlag)...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{tell}
	err = cmd.Start()
	tell.Close()
	if err != nil {
		return err
	}
	if err := ready.SetReadDeadline(time.Now().Add(readyWithin)); err != nil {
		return err
	}
	if n, err := ready.Read(make([]byte, 1)); n == 0 {
		return fmt.Errorf("the guard does not watch: %w", err)
	}
	return nil
}

// Ready tells Detach in another process that this one watches.
func Ready() {
	tell := os.NewFile(3, "ready")
	_, _ = tell.Write([]byte{1}) // who asked may be gone
	_ = tell.Close()
}

// stoppedFile is written by a node that was asked to end while it went back.
const stoppedFile = "stopped"

// guardLock takes the lock of the guard; nil: another process has it.
func (p Place) guardLock() (*os.File, error) {
	lock, err := os.OpenFile(p.state("guard.lock"), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, nil
		}
		return nil, err
	}
	return lock, nil
}

// hasGuard says whether a guard lives.
func (p Place) hasGuard() bool {
	if _, err := os.Stat(p.state("guard.lock")); err != nil {
		return false
	}
	lock, err := p.guardLock()
	if lock != nil {
		lock.Close()
	}
	return lock == nil && err == nil
}

// Guard watches the process until the trial is over and, where it was taken back, until
// the process has gone on with the program before. watching is called once it does.
// When it returns true the node has ended and no service manager starts it: the caller
// does, with the arguments.
func (p Place) Guard(pid int, watching func(), log io.Writer) (start bool, args []string, err error) {
	lock, err := p.guardLock()
	if lock == nil && err == nil {
		watching() // the one that is there does, or is about to end
		for range 3 {
			time.Sleep(look)
			if lock, err = p.guardLock(); lock != nil || err != nil {
				break
			}
		}
		watching = func() {}
	}
	if lock == nil || err != nil {
		return false, nil, err
	}
	defer lock.Close()
	if err := ignoreMissing(os.Remove(p.state(stoppedFile))); err != nil {
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
	g := guard{p: p, pid: pid, fd: fd, log: log}
	for {
		done, start, err := g.look()
		if watching != nil && err == nil {
			watching()
			watching = nil
		}
		switch {
		case start:
			return true, g.args, err
		case done || err != nil:
			return false, nil, err
		}
	}
}

// guard is what one knows of its node.
type guard struct {
	p   Place
	pid int
	fd  int // pidfd of the process; -1: it was gone already
	log io.Writer

	began  time.Time   // when it first saw the trial …
	trial  time.Time   // … that began then
	tried  os.FileInfo // the program on trial, once the process has become it
	args   []string    // that start the node
	back   time.Time   // when it first saw that the trial was over
	unread bool        // it has said that the trial cannot be read
}

func (g *guard) say(format string, args ...any) {
	fmt.Fprintf(g.log, "clusterd "+GuardCommand+": "+format+"\n", args...)
}

// look waits for a moment and does what is to be done. done: the guard ends.
func (g *guard) look() (done, start bool, err error) {
	gone, err := ended(g.fd, look)
	if err != nil {
		return true, false, err
	}
	t, err := g.p.Trial()
	if err != nil && !gone {
		// Too many open files on the machine, say: the node is still to be guarded.
		if !g.unread {
			g.unread = true
			g.say("the trial cannot be read, trying on: %v", err)
		}
		return false, false, nil
	}
	if err != nil {
		return true, false, err
	}
	if t == nil || t.Back != "" {
		return g.wayBack(t, gone)
	}
	g.args = t.Args
	if g.began.IsZero() || !g.trial.Equal(t.Began) {
		g.began, g.trial, g.tried = time.Now(), t.Began, nil
	}
	if t.Starts > 0 && g.tried == nil && !gone {
		g.tried, _ = os.Stat(g.exe()) // gone since, which the next look finds
	}
	g.back = time.Time{}
	why := ""
	switch {
	case gone && t.Orderly:
		return true, false, nil // its next start goes on with the trial
	case gone && t.Starts == 0 && !t.Begun:
		why = "the node ended before it was begun"
	case gone:
		why = "it ended by itself"
	default:
		if why = t.late(time.Now(), time.Since(g.began)); why == "" {
			return false, false, nil
		}
	}
	g.say("release %s is taken back: %s", t.Version, why)
	// The program first: whoever starts the node next starts the right one.
	if err := g.p.Back(t.Version, why, time.Now()); err != nil {
		if IsRefused(err) {
			return false, false, nil // another process was quicker
		}
		return true, false, err
	}
	limit := endFor
	if !t.Up {
		limit = neverUp
	}
	return g.again(gone, limit)
}

// wayBack is for a trial that is over. One that was confirmed needs no guard; one that
// was taken back does until the process has become the program before.
func (g *guard) wayBack(t *Trial, gone bool) (done, start bool, err error) {
	installed, err := os.Stat(g.p.Exe)
	if g.tried == nil || err == nil && os.SameFile(installed, g.tried) {
		return true, false, nil // it never became the program on trial, or that stays
	}
	if gone {
		if _, err := os.Stat(g.p.state(stoppedFile)); err == nil || t != nil && t.Orderly {
			return true, false, nil
		}
		g.say("the node ended on its way back to the program before, which is started")
		return g.again(true, 0)
	}
	if runs, err := os.Stat(g.exe()); err == nil && !os.SameFile(runs, g.tried) {
		return true, false, nil
	}
	if g.back.IsZero() {
		g.back = time.Now()
	}
	if time.Since(g.back) < endFor {
		return false, false, nil
	}
	g.say("the node does not go on with the program before within %s: it is stopped", endFor)
	return g.again(false, neverUp)
}

// exe is the program that the process runs now.
func (g *guard) exe() string { return fmt.Sprintf("/proc/%d/exe", g.pid) }

// again stops the process, in order if it does so within limit, and has the node
// started again.
func (g *guard) again(gone bool, limit time.Duration) (done, start bool, err error) {
	if !gone {
		if err := end(g.fd, limit); err != nil {
			return true, false, err
		}
	}
	if !managed(g.pid) {
		return true, true, nil
	}
	return true, false, startService(g.pid, g.say)
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
