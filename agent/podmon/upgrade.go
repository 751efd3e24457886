package podmon

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podmon/api/sealed"
)

// Upgrade, or downgrade: podmon and its keeper give way to another program.
//
//	clusterd ──the program──▶ podmon ──can it follow?──▶ the program, run once for the answer
//	                            │ starts under way end, executions end or are cut
//	                            │ replace, and the program
//	                            ▼
//	                          keeper: podmon has ended, its children are the keeper's now
//	                            │ execve: the same process, children, descriptors and lock
//	                            ▼
//	                          new keeper ──starts──▶ new podmon, which adopts
//
// It is the way of a killed podmon, only orderly. Whatever fails before the
// execve leaves the program that was there.

const (
	followTime = 30 * time.Second // for the new program's answer
	tellTime   = 10 * time.Second // for clients to hear that they were cut off
	endTime    = 10 * time.Second // for podmon's end, should a start hang in the kernel
	drainLook  = 10 * time.Millisecond
)

// ownBuild names the program that this process is.
var ownBuild = sync.OnceValues(func() (string, error) {
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return "", err
	}
	defer self.Close()
	return sealed.Digest(self)
})

// follows says whether this program can go on from a running one that hands
// over in the given version, with the records below dir; nil: it can.
func follows(dir string, version int) error {
	if version != handoverVersion {
		return fmt.Errorf("the running podmon hands over in version %d, this one knows version %d", version, handoverVersion)
	}
	return checkState(dir)
}

// upgrade prepares the end of this podmon and the next one, which is files[0]'s
// program. It refuses, and all stays as it is, what cannot go on from here.
func (s *Supervisor) upgrade(ctx context.Context, req *api.Upgrade, files []*os.File) (err error) {
	switch {
	case req == nil || len(files) != 1:
		return invalidf("upgrade: the request lacks its field or the program")
	case !sealed.Is(files[0]):
		return invalidf("upgrade: the program is not a sealed memory file")
	case s.link == nil:
		return errorf(api.CodeInternal, "upgrade: this podmon has no keeper")
	}
	if err := s.askToFollow(ctx, files[0]); err != nil {
		return err
	}
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return errorf(api.CodeBusy, "podmon is shutting down or being replaced already")
	}
	s.closing = true // from here on it begins nothing that could be cut off
	s.mu.Unlock()
	s.log.Info("podmon is to be replaced by another program")
	defer func() {
		if err != nil {
			s.mu.Lock()
			s.closing = false
			s.mu.Unlock()
		}
	}()
	if err := s.drained(ctx, func() bool { return s.starting() == 0 }); err != nil { // each start has its own limit
		return fmt.Errorf("upgrade: wait for starts under way: %w", err)
	}
	drainCtx, cancel := context.WithTimeout(ctx, time.Duration(req.PatienceMillis)*time.Millisecond)
	defer cancel()
	if s.drained(drainCtx, func() bool { return s.streams() == 0 }) != nil {
		s.log.Warn("executions and attachments end for the next podmon", "count", s.streams())
	}
	if err := s.link.conn.Write(linkMessage{Op: linkReplace}, files[0]); err != nil {
		return fmt.Errorf("upgrade: tell the keeper: %w", err)
	}
	close(s.replaced)
	drain, cancel := context.WithTimeout(ctx, tellTime)
	defer cancel()
	_ = s.drained(drain, func() bool { return s.streams() == 0 }) // a client that does not read finds the connection broken
	return nil
}

// askToFollow runs the program once, with podmon's own arguments, for its word
// that it can go on from here. A program that knows nothing of this refuses the
// arguments.
func (s *Supervisor) askToFollow(ctx context.Context, program *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, followTime)
	defer cancel()
	var said bytes.Buffer
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), program.Fd())
	cmd := exec.CommandContext(ctx, path, slices.Concat(s.link.args, []string{"--can-follow", strconv.Itoa(handoverVersion)})...)
	cmd.Args[0] = "podmon"
	cmd.Dir = "/"
	cmd.Stderr = &said
	if err := cmd.Run(); err != nil {
		why, _, _ := strings.Cut(strings.TrimSpace(said.String()), "\n")
		return errorf(api.CodeIncompatible, "the other podmon cannot go on from this one: %v: %s", err, why)
	}
	return nil
}

// drained waits until done holds, looking now and again: it happens once in a
// podmon's life.
func (s *Supervisor) drained(ctx context.Context, done func() bool) error {
	for look := time.NewTicker(drainLook); ; {
		if done() {
			look.Stop()
			return nil
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			look.Stop()
			return context.Cause(ctx)
		}
	}
}

// starting counts the sandboxes and containers that are being made.
func (s *Supervisor) starting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, sb := range s.sandboxes {
		if !sb.ready {
			n++
		}
	}
	for _, c := range s.containers {
		if c.state == stateStarting && c.gaveUp == "" {
			n++
		}
	}
	return n
}

// streams counts the executions and attachments under way.
func (s *Supervisor) streams() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.execs) + s.attached
}

// countAttached notes that an attachment has begun (1) or ended (-1).
func (s *Supervisor) countAttached(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.attached += n
}

// givesWay tells whether this podmon is about to end, its containers not.
func (s *Supervisor) givesWay() bool {
	select {
	case <-s.replaced:
		return true
	case <-s.life.Done():
		return true
	default:
		return false
	}
}
