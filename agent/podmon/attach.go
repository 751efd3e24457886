package podmon

import (
	"errors"
	"os"
	"sync"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"golang.org/x/sys/unix"
)

// tapBuffer is how many bytes an attached reader may lag behind.
const tapBuffer = 1 << 20

// taps are the attached readers of one output stream. The zero value has none.
type taps struct {
	mu     sync.Mutex
	all    map[*tap]struct{}
	closed bool
}

// tap passes a stream on to one reader, in a goroutine of its own, and gives up
// on a reader that lags too far behind.
type tap struct {
	w     *os.File
	mu    sync.Mutex
	cond  *sync.Cond
	queue []byte
	ended bool
	done  chan struct{} // closed when everything has been passed on or the reader is gone
}

// add begins to copy to w, which it takes over; wg counts the goroutine.
func (t *taps) add(w *os.File, wg *sync.WaitGroup) *tap {
	tp := &tap{w: w, done: make(chan struct{})}
	tp.cond = sync.NewCond(&tp.mu)
	t.mu.Lock()
	if t.all == nil {
		t.all = map[*tap]struct{}{}
	}
	t.all[tp] = struct{}{}
	if t.closed {
		tp.end()
	}
	t.mu.Unlock()
	wg.Go(func() { // ends with the stream, the reader or the connection (cut)
		defer close(tp.done)
		tp.copy()
		t.mu.Lock()
		delete(t.all, tp)
		t.mu.Unlock()
	})
	return tp
}

// write passes p on to every tap; it never waits.
func (t *taps) write(p []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for tp := range t.all {
		tp.push(p)
	}
}

// closeAll lets every tap end after what is queued.
func (t *taps) closeAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	for tp := range t.all {
		tp.end()
	}
}

func (t *tap) push(p []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended {
		return
	}
	if len(t.queue)+len(p) > tapBuffer {
		t.ended, t.queue = true, nil
		t.w.Close()
	} else {
		t.queue = append(t.queue, p...)
	}
	t.cond.Signal()
}

func (t *tap) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ended = true
	t.cond.Signal()
}

// cut ends it at once: the reader is gone.
func (t *tap) cut() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ended, t.queue = true, nil
	t.w.Close()
	t.cond.Signal()
}

func (t *tap) copy() {
	defer t.w.Close()
	for {
		t.mu.Lock()
		for len(t.queue) == 0 && !t.ended {
			t.cond.Wait()
		}
		p := t.queue
		t.queue = nil
		t.mu.Unlock()
		if len(p) == 0 {
			return
		}
		if _, err := t.w.Write(p); err != nil {
			t.cut()
			return
		}
	}
}

// attachment is one client's connection to a running container.
type attachment struct {
	c     *container
	taps  []*tap
	input *os.File // the client's end of the container's input
	stdin bool
}

// attach connects out and err (nil: not wanted), which it takes over, to a
// container. A terminal has no stderr.
func (s *Supervisor) attach(req api.Attach, stdout, stderr *os.File) (_ *attachment, err error) {
	defer func() {
		if err != nil {
			closeFiles(stdout, stderr)
		}
	}()
	c, err := s.runningContainer(req.ContainerID)
	if err != nil {
		return nil, err
	}
	a := &attachment{c: c, stdin: req.HasStdin}
	if req.HasStdin {
		if a.input, err = c.io.input(); err != nil {
			return nil, errorf(api.CodeInvalid, "container %s: %v", c.id, err)
		}
	}
	for _, o := range c.io.outputs {
		var w *os.File
		if o.name == "stdout" {
			w, stdout = stdout, nil
		} else {
			w, stderr = stderr, nil
		}
		if w == nil {
			continue
		}
		w, err := pollable(w)
		if err != nil {
			a.detach(s)
			return nil, err
		}
		a.taps = append(a.taps, o.taps.add(w, &s.wg))
	}
	closeFiles(stdout, stderr)
	return a, nil
}

// finished waits until the container has ended and all it wrote has been passed
// on; it gives false when gone or replaced is closed before.
func (a *attachment) finished(gone, replaced <-chan struct{}) bool {
	select {
	case <-a.c.done:
	case <-gone:
		return false
	case <-replaced:
		return false
	}
	for _, t := range a.taps {
		select {
		case <-t.done:
		case <-gone:
			return false
		case <-replaced:
			return false
		}
	}
	return true
}

// detach takes the client away; a container that wanted its input once has had
// it then, unless it was podmon that went.
func (a *attachment) detach(s *Supervisor) {
	for _, t := range a.taps {
		t.cut()
	}
	closeFiles(a.input)
	if a.stdin && !s.givesWay() && a.c.io.spec.StdinOnce && !a.c.io.spec.TTY {
		s.closeStdin(a.c)
	}
}

// pollable makes f's reads and writes end when it is closed. It takes f over.
func pollable(f *os.File) (*os.File, error) {
	defer f.Close()
	rc, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	var setErr error
	if err := rc.Control(func(fd uintptr) { setErr = unix.SetNonblock(int(fd), true) }); err != nil || setErr != nil {
		return nil, errors.Join(err, setErr)
	}
	return dup(f)
}

func closeFiles(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			f.Close()
		}
	}
}
