package podmon

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api/frame"
	"golang.org/x/sys/unix"
)

// The keeper is podmon's parent. It knows nothing of containers but this: if
// podmon is killed, the kernel gives it podmon's children, and it leaves those
// that are kept unreaped, so that their exit codes can still be read; it holds
// their descriptors open, so that what they wrote stays and their terminals do
// not hang up. It starts the next podmon at once and hands everything to it.
//
//	starter ──▶ keeper ──starts, again and again──▶ podmon ──▶ containers
//	              └────────── link: kept ◀──▶ ──────┘
//
// When the keeper is killed, podmon becomes the keeper: it executes itself
// anew, children and descriptors stay, and starts another podmon. Only who
// kills both at once loses something.

// Messages on the link. To the keeper:
const (
	linkKeep    = "keep"    // hold this, instead of what was held under the ID
	linkDrop    = "drop"    // let go of the ID; reap its process
	linkServing = "serving" // podmon has taken over and serves
	linkOver    = "over"    // podmon ends on purpose, and nothing is left
)

// From the keeper, at podmon's start: linkKeep for each, then
const linkAll = "all"

// linkMessage goes over the link, descriptors beside it in the order of
// Kept.Files.
type linkMessage struct {
	Op   string
	ID   string `json:",omitempty"` // drop
	Kept *kept  `json:",omitempty"` // keep
}

// kept is what is held of one container or execution.
type kept struct {
	ID    string
	Pid   int
	Start uint64 // see procStat
	Exec  bool   `json:",omitempty"`
	Files []string

	files []*os.File // as Files names them
}

// The descriptors that are kept.
const (
	keptTTY    = "tty"
	keptStdin  = "stdin"
	keptStdout = "stdout"
	keptStderr = "stderr"
)

// take removes the descriptor of that name, nil if there is none; it becomes
// the caller's.
func (k *kept) take(name string) *os.File {
	if k == nil {
		return nil
	}
	i := slices.Index(k.Files, name)
	if i < 0 || i >= len(k.files) {
		return nil
	}
	f := k.files[i]
	k.Files, k.files = slices.Delete(k.Files, i, i+1), slices.Delete(k.files, i, i+1)
	return f
}

func (k *kept) close() {
	if k == nil {
		return
	}
	closeFiles(k.files...)
	k.files = nil
}

// keeperConfig says how to keep.
type keeperConfig struct {
	dir        string
	cgroupRoot string
	args       []string // of podmon
	ready      *os.File // for the first podmon's word; nil: nobody waits for it
	inherited  []*kept  // of a podmon that became the keeper
	log        *slog.Logger
}

// Pauses between two podmons when each ends at once.
const (
	restartPauseMin = 10 * time.Millisecond
	restartPauseMax = 5 * time.Second
	restartReset    = 10 * time.Second // one that lived as long ended for another reason
)

// errKept says that the folder has a keeper already.
var errKept = errors.New("another keeper holds the state folder")

type keeper struct {
	cfg     keeperConfig
	kept    map[string]*kept
	orphans *orphanReaper
	served  bool // a podmon has served once
	over    bool // podmon said that nothing is left
}

// runKeeper keeps podmon alive until it says that nothing is left, or SIGTERM
// comes, which it passes on; containers go on then.
func runKeeper(cfg keeperConfig, term <-chan os.Signal) error {
	lock, err := os.OpenFile(filepath.Join(cfg.dir, keeperLockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if err == unix.EWOULDBLOCK {
			return errKept
		}
		return fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become reaper of orphans: %w", err)
	}
	if err := enterCgroup(cfg.cgroupRoot); err != nil {
		// A cgroup that cannot be entered (no permission, read-only) costs
		// only independence from clusterd's own.
		cfg.log.Warn("podmon stays in its parent's cgroup", "err", err)
	}
	setOOMScore(os.Getpid(), ownOOMScore) // podmon inherits it
	k := &keeper{cfg: cfg, kept: map[string]*kept{}, orphans: newOrphanReaper()}
	for _, e := range cfg.inherited {
		k.kept[e.ID] = e
		k.orphans.own(e.Pid)
		k.served = true
	}
	look := time.NewTicker(orphanAge)
	defer look.Stop()
	var dead map[int]bool // orphans seen dead at the last look
	for pause := restartPauseMin; ; pause = min(2*pause, restartPauseMax) {
		began := time.Now()
		ended, cmd, err := k.start()
		if err != nil {
			if !k.served {
				return err
			}
			cfg.log.Error("podmon cannot be started", "err", err)
		}
		for ended != nil {
			select {
			case <-ended:
				ended = nil
			case <-look.C:
				dead = k.orphans.look(dead)
			case sig := <-term:
				_ = cmd.Process.Signal(sig)
				<-ended
				return nil
			}
		}
		switch {
		case k.over:
			return nil
		case !k.served:
			return errors.New("podmon ended before it served")
		case time.Since(began) > restartReset:
			pause = restartPauseMin
		}
		cfg.log.Warn("podmon ended, another is started", "kept", len(k.kept))
		select {
		case <-time.After(pause):
		case <-term:
			return nil
		}
	}
}

// start starts a podmon and serves its link. ended is closed when it has ended
// and all that it said has been heard.
func (k *keeper) start() (ended <-chan struct{}, cmd *exec.Cmd, err error) {
	ours, theirs, err := linkPair()
	if err != nil {
		return nil, nil, err
	}
	defer theirs.Close()
	link := frame.NewConn(ours)
	cmd = exec.Command("/proc/self/exe", k.cfg.args...)
	cmd.Args[0] = "podmon"
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{theirs} // 3
	cmd.Args = append(cmd.Args, "--link-fd", "3")
	if k.cfg.ready != nil {
		cmd.ExtraFiles = append(cmd.ExtraFiles, k.cfg.ready)
		cmd.Args = append(cmd.Args, "--ready-fd", "4")
	}
	if err := cmd.Start(); err != nil {
		link.Close()
		return nil, nil, fmt.Errorf("start podmon: %w", err)
	}
	closeFiles(k.cfg.ready)
	k.cfg.ready = nil
	k.orphans.own(cmd.Process.Pid)
	done := make(chan struct{})
	go func() { // ends with podmon: its end of the link is the only one
		defer close(done)
		defer link.Close()
		if err := k.tell(link); err != nil {
			k.cfg.log.Warn("podmon was not told what is kept", "err", err)
		}
		k.hear(link)
		_ = cmd.Wait()
		k.orphans.disown(cmd.Process.Pid)
	}()
	return done, cmd, nil
}

// tell hands podmon what is kept.
func (k *keeper) tell(link *frame.Conn) error {
	for _, e := range k.kept {
		if err := link.Write(linkMessage{Op: linkKeep, Kept: e}, e.files...); err != nil {
			return err
		}
	}
	return link.Write(linkMessage{Op: linkAll})
}

// hear does what podmon says, until it ends.
func (k *keeper) hear(link *frame.Conn) {
	for {
		var m linkMessage
		files, err := link.Read(&m)
		if err != nil {
			closeFiles(files...)
			return
		}
		switch {
		case m.Op == linkKeep && m.Kept != nil:
			k.drop(m.Kept.ID)
			m.Kept.files = files
			k.kept[m.Kept.ID] = m.Kept
			k.orphans.own(m.Kept.Pid)
			continue
		case m.Op == linkDrop:
			if e := k.kept[m.ID]; e != nil {
				k.drop(m.ID)
				// podmon has saved how it ended. If it is podmon's own child,
				// this finds nothing.
				_, _ = unix.Wait4(e.Pid, nil, unix.WNOHANG, nil)
			}
		case m.Op == linkServing:
			k.served = true
		case m.Op == linkOver:
			k.over = true
		}
		closeFiles(files...)
	}
}

func (k *keeper) drop(id string) {
	if e := k.kept[id]; e != nil {
		e.close()
		k.orphans.disown(e.Pid)
		delete(k.kept, id)
	}
}

// linkPair makes the two ends of a link: the keeper's, and podmon's to inherit.
func linkPair() (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("link: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "link")
	ours, err := linkEnd(os.NewFile(uintptr(fds[0]), "link"))
	if err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

// linkEnd makes a connection of f, which it takes over.
func linkEnd(f *os.File) (*net.UnixConn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	uc, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, errors.New("link: not a unix socket")
	}
	return uc, nil
}

// inheritKept reads what a podmon that became the keeper left in f.
func inheritKept(f *os.File) ([]*kept, error) {
	defer f.Close()
	var in []inheritedKept
	if err := frame.Decode(f, &in); err != nil {
		return nil, fmt.Errorf("inherited: %w", err)
	}
	var out []*kept
	for _, e := range in {
		for _, fd := range e.FDs {
			unix.CloseOnExec(fd)
			e.kept.files = append(e.kept.files, os.NewFile(uintptr(fd), "kept"))
		}
		k := e.kept
		out = append(out, &k)
	}
	return out, nil
}

// inheritedKept names descriptors by the numbers they have across execve.
type inheritedKept struct {
	kept
	FDs []int
}

// becomeKeeper turns this podmon into a keeper that starts another one: what is
// kept, and the containers, which stay its children, go over. It returns only
// on an error.
func becomeKeeper(args []string, all []*kept) error {
	out := make([]inheritedKept, 0, len(all))
	for _, k := range all {
		e := inheritedKept{kept: *k}
		for _, f := range k.files {
			fd, err := dupAcrossExec(f)
			if err != nil {
				return err
			}
			e.FDs = append(e.FDs, fd)
		}
		out = append(out, e)
	}
	b, err := frame.Encode(out)
	if err != nil {
		return err
	}
	fd, err := unix.MemfdCreate("kept", 0)
	if err != nil {
		return fmt.Errorf("memfd_create: %w", err)
	}
	mem := os.NewFile(uintptr(fd), "kept")
	if _, err := mem.Write(b); err == nil {
		_, err = mem.Seek(0, 0)
	}
	if err != nil {
		return err
	}
	argv := append([]string{"podmon"}, args...)
	argv = append(argv, "--keep", "--kept-fd", strconv.Itoa(fd))
	return fmt.Errorf("become keeper: %w", syscall.Exec("/proc/self/exe", argv, os.Environ()))
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
	if dupErr != nil {
		return 0, fmt.Errorf("dup: %w", dupErr)
	}
	return fd, nil
}
