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
// again, children and descriptors stay, and starts another podmon. Only who
// kills both at once loses something.
//
// When podmon is replaced by another program (upgrade.go) it ends, which leaves
// everything with the keeper, and the keeper executes that program.

// Messages on the link. To the keeper:
const (
	linkKeep    = "keep"    // hold this, instead of what was held under the ID
	linkDrop    = "drop"    // let go of the ID; reap its process
	linkServing = "serving" // podmon has taken over and serves
	linkOver    = "over"    // podmon ends on purpose, and nothing is left
	linkReplace = "replace" // podmon ends on purpose: go on as the program beside this message
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
	keptTTY   = "tty"
	keptStdin = "stdin"
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
	args       []string  // of podmon
	ready      *os.File  // written to when the first podmon serves; nil: no one waits for it
	handover   *handover // of the keeper that executed this program in its place; nil: a first start
	log        *slog.Logger
}

// Pauses between two podmons when each ends at once.
const (
	restartPauseMin = 10 * time.Millisecond
	restartPauseMax = 5 * time.Second
	restartReset    = 10 * time.Second // one that lived as long ended for another reason
)

// errKept says that the directory has a keeper already.
var errKept = errors.New("another keeper holds the state folder")

type keeper struct {
	cfg     keeperConfig
	kept    map[string]*kept
	lock    *os.File
	orphans *orphanReaper
	served  bool     // a podmon has served once
	over    bool     // podmon said that nothing is left
	next    *os.File // the program to go on as when podmon has ended; nil: this one
}

// runKeeper keeps podmon alive until it says that nothing is left, or SIGTERM
// comes, which it passes on; containers go on then.
func runKeeper(cfg keeperConfig, term <-chan os.Signal) error {
	lock, err := lockKeeper(cfg)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become reaper of orphans: %w", err)
	}
	if err := enterCgroup(cfg.cgroupRoot); err != nil {
		// A cgroup that cannot be entered (no permission, read-only) costs
		// only independence from clusterd's own.
		cfg.log.Warn("podmon stays in its parent's cgroup", "err", err)
	}
	setOOMScore(os.Getpid(), ownOOMScore) // podmon inherits it
	k := &keeper{cfg: cfg, lock: lock, kept: map[string]*kept{}, orphans: newOrphanReaper()}
	if cfg.handover != nil {
		for _, e := range cfg.handover.kept {
			k.kept[e.ID] = e
			k.orphans.own(e.Pid)
		}
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
		if k.next != nil {
			err := k.replace()
			cfg.log.Error("the keeper goes on with the program it is", "err", err)
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

// lockKeeper makes this process the directory's keeper; errKept: another one is.
func lockKeeper(cfg keeperConfig) (*os.File, error) {
	if h := cfg.handover; h != nil && h.lock != nil {
		return h.lock, nil
	}
	lock, err := os.OpenFile(filepath.Join(cfg.dir, keeperLockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		if err == unix.EWOULDBLOCK {
			return nil, errKept
		}
		return nil, fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	return lock, nil
}

// replace executes k.next as the keeper: the process, its children, what it
// holds and its lock stay. It returns only on an error.
func (k *keeper) replace() error {
	defer func() {
		k.next.Close()
		k.next = nil
	}()
	h := handover{lock: k.lock}
	for _, e := range k.kept {
		h.kept = append(h.kept, e)
	}
	k.cfg.log.Info("the keeper becomes another program", "kept", len(h.kept))
	return h.execute(k.next, k.cfg.args)
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
			k.cfg.log.Warn("send the list of kept descriptors to podmon", "err", err)
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
		case m.Op == linkReplace && len(files) == 1 && k.next == nil:
			k.next = files[0]
			continue
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
