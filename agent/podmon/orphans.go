package podmon

import (
	"context"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// orphanReaper reaps what podmon inherits: processes of a pod in the host's pid
// namespace whose parent has ended. Waiting for any child would steal the exit
// status of those that someone waits for (containers, execs, libcontainer's
// short-lived helpers). So an orphan is a child without an owner and that is
// found dead in two looks, five seconds apart: nothing libcontainer starts
// stays a zombie that long.
type orphanReaper struct {
	mu    sync.Mutex
	owned map[int]bool
}

const orphanAge = 5 * time.Second

func newOrphanReaper() *orphanReaper { return &orphanReaper{owned: map[int]bool{}} }

// own keeps pid for the caller, which waits for it, until disown.
func (o *orphanReaper) own(pid int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.owned[pid] = true
}

func (o *orphanReaper) disown(pid int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.owned, pid)
}

// run looks after a child has ended, and again while there was something to see.
func (o *orphanReaper) run(ctx context.Context) {
	chld := make(chan os.Signal, 1)
	signal.Notify(chld, unix.SIGCHLD)
	defer signal.Stop(chld)
	seen := map[int]bool{}
	for {
		if len(seen) == 0 {
			select {
			case <-chld:
			case <-ctx.Done():
				return
			}
		}
		select {
		case <-time.After(orphanAge):
		case <-ctx.Done():
			return
		}
		select { // signals before this look are answered by it
		case <-chld:
		default:
		}
		seen = o.look(seen)
	}
}

// look reaps the dead children that were dead before, and returns the new ones.
func (o *orphanReaper) look(before map[int]bool) map[int]bool {
	now := map[int]bool{}
	// The kernel's list may miss a child while threads come and go (proc(5)).
	pids := slices.AppendSeq(children(), maps.Keys(before))
	slices.Sort(pids)
	for _, pid := range slices.Compact(pids) {
		o.mu.Lock()
		owned := o.owned[pid]
		o.mu.Unlock()
		if owned {
			continue
		}
		st, err := readProcStat(pid)
		if err != nil || st.state != 'Z' || st.ppid != os.Getpid() {
			continue
		}
		if before[pid] {
			if got, _ := unix.Wait4(pid, nil, unix.WNOHANG, nil); got == pid {
				continue
			}
			// Its first thread is dead, but not yet all of them.
		}
		now[pid] = true
	}
	return now
}

// children lists this process's children.
func children() []int {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return nil
	}
	var out []int
	for _, t := range tasks {
		b, err := os.ReadFile("/proc/self/task/" + t.Name() + "/children")
		if err != nil {
			continue // the thread has ended
		}
		for _, f := range strings.Fields(string(b)) {
			if pid, err := strconv.Atoi(f); err == nil {
				out = append(out, pid)
			}
		}
	}
	return out
}
