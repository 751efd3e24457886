package podmon

import (
	"errors"
	"io"
	"os"
	"sync"

	"github.com/clusterd/clusterd/agent/podmon/api/frame"
	"golang.org/x/sys/unix"
)

// link is podmon's end of the connection to its keeper; nil without one.
type link struct {
	conn *frame.Conn
	args []string // podmon's own arguments, for a keeper made of it

	mu   sync.Mutex
	kept map[string]*kept // handed over at the start, until adopted; then nil
}

// newLink takes over what the keeper holds.
func newLink(f *os.File, args []string) (*link, error) {
	uc, err := linkEnd(f)
	if err != nil {
		return nil, err
	}
	l := &link{conn: frame.NewConn(uc), args: args, kept: map[string]*kept{}}
	for {
		var m linkMessage
		files, err := l.conn.Read(&m)
		switch {
		case err != nil:
			closeFiles(files...)
			return nil, errors.Join(errors.New("keeper did not say what it holds"), err)
		case m.Op == linkAll:
			return l, nil
		case m.Op == linkKeep && m.Kept != nil:
			m.Kept.files = files
			l.kept[m.Kept.ID] = m.Kept
		default:
			closeFiles(files...)
		}
	}
}

// take gives what was kept under id by a former podmon; nil: nothing.
func (l *link) take(id string) *kept {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.kept[id]
	delete(l.kept, id)
	return k
}

func (l *link) send(m linkMessage, files ...*os.File) {
	if l == nil {
		return
	}
	// An error is the keeper's end, which Supervisor.watchKeeper sees too.
	_ = l.conn.Write(m, files...)
}

// keep makes the keeper hold a process and its descriptors.
func (l *link) keep(k kept) { l.send(linkMessage{Op: linkKeep, Kept: &k}, k.files...) }

// drop makes the keeper let go, once nothing of it is needed any more.
func (l *link) drop(id string) { l.send(linkMessage{Op: linkDrop, ID: id}) }

// rest ends what a former podmon had kept and was not adopted: executions, whose
// clients have lost them, and containers without a record.
func (l *link) rest() {
	if l == nil {
		return
	}
	l.mu.Lock()
	rest := l.kept
	l.kept = nil
	l.mu.Unlock()
	for id, k := range rest {
		if k.Exec {
			if p, err := openProcess(k.Pid, k.Start); err == nil {
				p.killGroup()
				p.close()
			}
			// The keeper reaps it as an orphan.
		}
		k.close()
		l.drop(id)
	}
}

// watchKeeper makes this podmon the keeper when its keeper has ended.
func (s *Supervisor) watchKeeper() {
	var m linkMessage
	files, err := s.link.conn.Read(&m) // a keeper says nothing after the start
	closeFiles(files...)
	if s.life.Err() != nil || err == nil {
		return
	}
	if !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
		s.log.Warn("link to the keeper broke", "err", err)
	}
	s.log.Warn("keeper ended, becoming the keeper")
	err = handover{kept: s.allKept()}.execute(nil, s.link.args)
	s.log.Error("podmon goes on without a keeper", "err", err)
}

// allKept lists what a keeper would hold now.
func (s *Supervisor) allKept() []*kept {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*kept
	for _, c := range s.containers {
		if c.state == stateRunning {
			k := c.kept()
			out = append(out, &k)
		}
	}
	for _, e := range s.execs {
		k := e.kept()
		out = append(out, &k)
	}
	return out
}

// kept is what the keeper holds of a running container. The descriptors stay
// the container's.
func (c *container) kept() kept {
	k := kept{ID: c.id, Pid: c.proc.pid, Start: c.proc.start}
	if c.io == nil {
		return k
	}
	c.io.mu.Lock()
	defer c.io.mu.Unlock()
	add := func(name string, f *os.File) {
		if f != nil {
			k.Files, k.files = append(k.Files, name), append(k.files, f)
		}
	}
	add(keptTTY, c.io.tty)
	add(keptStdin, c.io.stdin)
	if c.io.tty == nil {
		for _, o := range c.io.outputs {
			add(o.name, o.r)
		}
	}
	return k
}

// closeStdin ends a container's input; the keeper must not hold it open.
func (s *Supervisor) closeStdin(c *container) {
	c.io.closeStdin()
	s.mu.Lock()
	running := c.state == stateRunning
	s.mu.Unlock()
	if running {
		s.link.keep(c.kept())
	}
}

func (e *execution) kept() kept {
	return kept{ID: e.id, Pid: e.proc.pid, Start: e.proc.start, Exec: true}
}
