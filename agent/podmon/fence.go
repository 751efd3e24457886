package podmon

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// fence ends pods when no client has said in time that they may run on. None has
// to be there for it: clusterd may be dead or stopped.
//
//	on the list ──deadline──▶ fenced ──no process, no mount──▶ ended ──drop──▶ gone
//	     └────────────────────────drop──────────────────────────────────────────┘
//
// The clock is CLOCK_BOOTTIME, and the timer the kernel's for it: Go's timers
// stand still while the machine sleeps.
type fence struct {
	s     *Supervisor
	path  string
	timer *os.File // timerfd, readable when the deadline has passed

	mu       sync.Mutex // guards below, and the file
	deadline int64      // 0: none was ever given
	pods     map[string]*fencedPod
}

type fencedPod struct {
	api.FencedPod
	fenced, ended bool
}

// fenceRetry is how often what does not die is killed again.
const fenceRetry = 50 * time.Millisecond

// newFence goes on with the fences that a former podmon of this boot had.
func newFence(s *Supervisor) (*fence, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_BOOTTIME, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("timer of CLOCK_BOOTTIME: %w", err)
	}
	f := &fence{s: s, path: filepath.Join(s.cfg.Dir, fenceName), timer: os.NewFile(uintptr(fd), "timer"), pods: map[string]*fencedPod{}}
	var saved fenceFile
	err = readState(f.path, &saved)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return f, nil
	case err == nil && saved.Version > stateVersion:
		err = tooNew(f.path, saved.Version)
		fallthrough
	case err != nil: // dropping it would let pods run for ever
		f.timer.Close()
		return nil, err
	case saved.BootID != bootID():
		return f, nil
	}
	f.deadline = saved.Deadline
	for _, p := range saved.Pods {
		f.pods[p.UID] = &fencedPod{FencedPod: p.FencedPod, fenced: p.Fenced, ended: p.Ended}
	}
	return f, nil
}

// run waits for the deadline until podmon ends.
func (f *fence) run() {
	f.mu.Lock()
	for _, p := range f.pods {
		if p.fenced && !p.ended { // a former podmon did not finish
			f.end(p)
		}
	}
	f.arm()
	f.mu.Unlock()
	stop := make(chan struct{})
	defer close(stop)
	f.s.wg.Go(func() {
		select {
		case <-f.s.life.Done():
			_ = f.timer.SetReadDeadline(past)
		case <-stop:
		}
	})
	expired := make([]byte, 8)
	for f.s.life.Err() == nil {
		_, err := f.timer.Read(expired)
		switch {
		case f.s.life.Err() != nil:
		case err == nil:
			f.look()
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, os.ErrDeadlineExceeded):
			f.s.stop(fmt.Errorf("wait for the pods' deadline: %w", err)) // the next podmon does it
		}
	}
}

// bootTime is now, by CLOCK_BOOTTIME.
func bootTime() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic(err) // the kernel has had it since 2.6.39
	}
	return ts.Nano()
}

// arm sets the timer to the deadline. The caller holds mu.
func (f *fence) arm() {
	spec := unix.ItimerSpec{}
	if f.deadline > 0 {
		spec.Value = unix.NsecToTimespec(f.deadline) // absolute: one that has passed is due at once
	}
	rc, err := f.timer.SyscallConn()
	if err == nil {
		var set error
		if err = rc.Control(func(fd uintptr) { set = unix.TimerfdSettime(int(fd), unix.TFD_TIMER_ABSTIME, &spec, nil) }); err == nil {
			err = set
		}
	}
	if err != nil && f.s.life.Err() == nil {
		f.s.stop(fmt.Errorf("set the pods' deadline: %w", err))
	}
}

// passed reports whether pods must not run now. The caller holds mu.
func (f *fence) passed() bool { return f.deadline == 0 || bootTime() >= f.deadline }

// change does what a client asks for.
func (f *fence) change(req api.Fence) (api.FenceStatus, error) {
	if err := validFence(req); err != nil {
		return api.FenceStatus{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if req.Deadline != 0 && f.deadline != 0 && bootTime() >= f.deadline {
		f.fenceAll() // what is late is late, though the timer was not heard yet
	}
	changed := req.Deadline != 0 || len(req.Add) > 0 || len(req.Drop) > 0
	before := f.deadline
	if req.Deadline != 0 {
		f.deadline = req.Deadline
	}
	if len(req.Add) > 0 && f.passed() {
		f.deadline = before
		return api.FenceStatus{}, errorf(api.CodeFenced, "the node's lease is not renewed: no pod can begin that is to end with it")
	}
	for _, uid := range req.Drop {
		delete(f.pods, uid)
	}
	for _, p := range req.Add {
		if had := f.pods[p.UID]; had != nil {
			had.Dirs = p.Dirs
			continue
		}
		f.pods[p.UID] = &fencedPod{FencedPod: p}
	}
	if changed {
		if err := f.save(); err != nil {
			// A successor would not know: what was asked for is not promised.
			f.deadline = before
			for _, p := range req.Add {
				if had := f.pods[p.UID]; had != nil && !had.fenced {
					delete(f.pods, p.UID)
				}
			}
			return api.FenceStatus{}, fmt.Errorf("fence: %w", err)
		}
		f.arm()
	}
	if f.deadline != 0 && f.passed() {
		f.fenceAll()
	}
	return f.status(), nil
}

func validFence(req api.Fence) error {
	for _, p := range req.Add {
		if p.UID == "" || slices.ContainsFunc(p.Dirs, func(d string) bool { return d == "/" || !isHostPath(d) || filepath.Clean(d) != d }) {
			return invalidf("fence: pod %q with folders %q: want a UID and clean absolute paths below /", p.UID, p.Dirs)
		}
	}
	if req.Deadline < 0 {
		return invalidf("fence: deadline %d is negative", req.Deadline)
	}
	return nil
}

// status is the list for clients. The caller holds mu.
func (f *fence) status() api.FenceStatus {
	st := api.FenceStatus{Deadline: f.deadline}
	for uid, p := range f.pods {
		st.Pods = append(st.Pods, api.FencedPodStatus{UID: uid, Fenced: p.fenced, Ended: p.ended})
	}
	slices.SortFunc(st.Pods, func(a, b api.FencedPodStatus) int { return strings.Compare(a.UID, b.UID) })
	return st
}

// refuses says why nothing may be started in the pod; nil: it may.
func (f *fence) refuses(uid string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.pods[uid]
	if p == nil || !p.fenced && !f.passed() {
		return nil
	}
	return errorf(api.CodeFenced, "the pod was ended because the node's lease was not renewed in time")
}

// look fences if the deadline has passed; it may have been moved meanwhile.
func (f *fence) look() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.deadline != 0 && f.passed() {
		f.fenceAll()
	}
}

// fenceAll begins to end every pod of the list. The caller holds mu.
func (f *fence) fenceAll() {
	begun := 0
	for _, p := range f.pods {
		if !p.fenced {
			p.fenced = true
			begun++
			f.end(p)
			f.s.events.send(api.Event{Kind: api.EventFenced, ID: p.UID})
		}
	}
	if begun == 0 {
		return
	}
	f.s.log.Warn("the node's lease was not renewed in time: pods are ended", "pods", begun)
	if err := f.save(); err != nil { // the deadline is on record, and says the same
		f.s.log.Warn("that pods were ended is not on record", "err", err)
	}
}

// end kills a fenced pod until nothing is left of it, and drops its mounts.
func (f *fence) end(p *fencedPod) {
	uid, dirs := p.UID, p.Dirs
	f.s.wg.Go(func() {
		for warned := time.Now(); ; {
			left, err := f.s.killPod(uid)
			if left == 0 && err == nil {
				break
			}
			if time.Since(warned) > 10*time.Second {
				warned = time.Now()
				f.s.log.Warn("a fenced pod has not ended yet, it is killed again", "pod", uid, "containers", left, "err", err)
			}
			select {
			case <-time.After(fenceRetry):
			case <-f.s.life.Done():
				return // the next podmon goes on
			}
		}
		for {
			err := unmountBelow(dirs)
			if err == nil {
				break
			}
			f.s.log.Warn("volumes of a fenced pod are still mounted", "pod", uid, "err", err)
			select {
			case <-time.After(time.Second):
			case <-f.s.life.Done():
				return
			}
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.pods[uid] != p {
			return
		}
		p.ended = true
		if err := f.save(); err != nil {
			f.s.log.Warn("that a pod has ended is not on record", "pod", uid, "err", err)
		}
		f.s.log.Info("fenced pod has ended", "pod", uid)
	})
}

// save writes the file. The caller holds mu.
func (f *fence) save() error {
	file := fenceFile{Version: stateVersion, BootID: bootID(), Deadline: f.deadline}
	for _, p := range f.pods {
		file.Pods = append(file.Pods, fenceFilePod{FencedPod: p.FencedPod, Fenced: p.fenced, Ended: p.ended})
	}
	return writeState(f.path, file)
}

// forget drops everything, as nothing is left that could be fenced.
func (f *fence) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.pods)
	f.deadline = 0
	f.arm()
	if err := os.Remove(f.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.s.log.Warn("the list of pods with a deadline stays", "err", err)
	}
}

// killPod kills all processes of a pod but its pause, and tells how many of its
// containers have not ended yet: those being started are caught by a later call.
func (s *Supervisor) killPod(uid string) (left int, err error) {
	s.mu.Lock()
	var parents []string
	var of []string
	for id, sb := range s.sandboxes {
		if sb.status.Sandbox.PodUID == uid {
			of = append(of, id)
			parents = append(parents, sb.status.Sandbox.CgroupParent)
		}
	}
	var running []*process
	for _, c := range s.containers {
		if c.state != stateExited && slices.Contains(of, c.status.Container.SandboxID) {
			left++
			if c.state == stateRunning {
				running = append(running, c.proc)
			}
		}
	}
	s.mu.Unlock()
	for _, p := range running { // first of all, the first processes
		_ = p.signal(unix.SIGKILL)
	}
	slices.Sort(parents)
	for _, parent := range slices.Compact(parents) {
		m, merr := cgroupManager(parent, api.Resources{})
		if merr == nil {
			merr = killCgroup(m)
		}
		err = errors.Join(err, merr)
	}
	return left, err
}

// unmountBelow unmounts what is mounted in the directories, the last first. A file
// system of a server has to give up what it has under way: it must not be
// written when the server is reached again.
func unmountBelow(dirs []string) error {
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return !slices.ContainsFunc(dirs, func(d string) bool {
			return strings.HasPrefix(m.Mountpoint, d+"/")
		}), false
	})
	if err != nil {
		return fmt.Errorf("list mounts: %w", err)
	}
	var errs []error
	for _, m := range slices.Backward(mounts) {
		if m.FSType == "nfs" || m.FSType == "nfs4" {
			_ = unix.Unmount(m.Mountpoint, unix.MNT_FORCE|unix.UMOUNT_NOFOLLOW) // busy or not, it gives up
		}
		err := unix.Unmount(m.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err != nil && err != unix.EINVAL && err != unix.ENOENT {
			errs = append(errs, &os.PathError{Op: "unmount", Path: m.Mountpoint, Err: err})
		}
	}
	return errors.Join(errs...)
}
