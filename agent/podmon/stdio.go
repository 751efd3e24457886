package podmon

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podmon/api/unread"
	"github.com/opencontainers/runc/libcontainer"
	"golang.org/x/sys/unix"
)

// drainTime is how long the output of an ended container is waited for when
// something that outlived it still holds it open.
const drainTime = 2 * time.Second

// past interrupts a blocked read when set as a deadline.
var past = time.Unix(1, 0)

// stdio is a container's input and output on podmon's side.
//
// Output runs through FIFOs in the state directory, and the container holds them
// open for reading too: when podmon is killed, the container's writes neither
// fail nor end it; they fill the FIFO and wait for the next podmon, which opens
// it again by name. The end of a FIFO is still seen: when no process of the
// container has it open any more.
type stdio struct {
	dir  string // the container's state directory
	spec *api.Container
	log  *logFile

	child []*os.File // descriptors given to the container: stdin, stdout, stderr

	outputs  []*output // stdout and stderr, or the terminal
	copying  sync.WaitGroup
	released atomic.Bool // podmon ends, the container does not

	mu    sync.Mutex // guards stdin and tty
	stdin *os.File   // write end of the container's input; nil when closed or none
	tty   *os.File   // the terminal's master; nil without
}

// output is one stream on its way from the container into its log and taps.
type output struct {
	name string // "stdout" or "stderr"
	r    *os.File
	taps taps
}

// newStdio makes a container's input and output. The container may open both
// again by /dev/stdin and /dev/stdout: they belong to its user.
func (s *Supervisor) newStdio(c *container, pod *api.Sandbox) (_ *stdio, err error) {
	spec := &c.status.Container
	sio := &stdio{dir: s.containerPath(c.id), spec: spec}
	defer func() {
		if err != nil {
			sio.closeChild()
			sio.close()
		}
	}()
	if sio.log, err = openLog(spec.LogPath, spec.LogMaxBytes, spec.LogMaxFiles, s.log); err != nil {
		return nil, err
	}
	if spec.TTY {
		return sio, nil // the terminal is made inside the container
	}
	if spec.Stdin {
		if err := sio.makeInput(); err != nil {
			return nil, err
		}
	} else {
		null, err := os.Open(os.DevNull)
		if err != nil {
			return nil, err
		}
		sio.child = append(sio.child, null)
	}
	for _, name := range []string{"stdout", "stderr"} {
		if err := sio.makeOutput(name); err != nil {
			return nil, err
		}
	}
	if err := giveTo(hostID(pod.Users, spec.UID), sio.child...); err != nil {
		return nil, err
	}
	return sio, nil
}

// makeInput makes the container's stdin. Both ends count as open for reading on
// our side, so that writing into it never kills a writer.
func (sio *stdio) makeInput() error {
	path := sio.dir + "/stdin"
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return fmt.Errorf("make stdin: %w", err)
	}
	w, err := openFifo(path, unix.O_RDWR|unix.O_NONBLOCK)
	if err != nil {
		return err
	}
	sio.stdin = w
	r, err := openFifo(path, unix.O_RDONLY)
	if err != nil {
		return err
	}
	sio.child = append(sio.child, r)
	return nil
}

func (sio *stdio) makeOutput(name string) error {
	path := sio.dir + "/" + name
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return fmt.Errorf("make %s: %w", name, err)
	}
	if err := sio.openOutput(name); err != nil {
		return err
	}
	w, err := openFifo(path, unix.O_RDWR)
	if err != nil {
		return err
	}
	sio.child = append(sio.child, w)
	return nil
}

func (sio *stdio) openOutput(name string) error {
	r, err := openFifo(sio.dir+"/"+name, unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return err
	}
	sio.outputs = append(sio.outputs, &output{name: name, r: r})
	return nil
}

// openFifo opens without os.OpenFile, which would make every end non-blocking:
// the mode belongs to the open file and would be the container's too.
func openFifo(path string, flags int) (*os.File, error) {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// attachTo gives p its descriptors, or for a terminal the socket it sends the
// master through.
func (sio *stdio) attachTo(p *libcontainer.Process) (*console, error) {
	if sio.spec.TTY {
		con, err := newConsole()
		if err != nil {
			return nil, err
		}
		p.ConsoleSocket = con.child
		return con, nil
	}
	p.Stdin, p.Stdout, p.Stderr = sio.child[0], sio.child[1], sio.child[2]
	return nil, nil
}

// setTerminal receives the master of a terminal the container has made.
func (sio *stdio) setTerminal(con *console) error {
	master, err := con.receive()
	if err != nil {
		return err
	}
	sio.mu.Lock()
	sio.tty = master
	sio.mu.Unlock()
	sio.outputs = []*output{{name: "stdout", r: master}}
	return nil
}

// start copies output until it ends.
func (sio *stdio) start(wg *sync.WaitGroup) {
	for _, o := range sio.outputs {
		sio.copying.Add(1)
		wg.Go(func() {
			defer sio.copying.Done()
			sio.copyOutput(o)
		})
	}
}

// copyBuffers are used only while there is something to copy: an idle container
// holds none.
var copyBuffers = sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}

func (sio *stdio) copyOutput(o *output) {
	lines := sio.log.stream(o.name)
	if sio.log.path != "" {
		lines.aside = sio.dir + "/" + o.name + ".line"
		lines.resume()
	}
	released := false
	defer func() {
		if released {
			lines.rest()
		} else {
			lines.end()
		}
	}()
	defer o.taps.closeAll()
	rc, err := o.r.SyscallConn()
	if err != nil {
		return
	}
	for {
		var n int
		var buf *[]byte
		var readErr error
		// The runtime's poller calls back when there is something to read.
		err := rc.Read(func(fd uintptr) bool {
			buf = copyBuffers.Get().(*[]byte)
			for {
				n, readErr = unix.Read(int(fd), *buf)
				if readErr != unix.EINTR {
					break
				}
			}
			if readErr == unix.EAGAIN {
				copyBuffers.Put(buf)
				lines.rest()
				return false
			}
			return true
		})
		if err != nil { // closed, or a deadline: of drain or of release
			released = sio.released.Load()
			if !released && errors.Is(err, os.ErrDeadlineExceeded) {
				// A slow disk let the time run out: what the container wrote is still there.
				unread.Each(o.r, func(b []byte) bool { lines.write(b); o.taps.write(b); return true })
			}
			return
		}
		if n > 0 {
			lines.write((*buf)[:n])
			o.taps.write((*buf)[:n])
		}
		copyBuffers.Put(buf)
		if n <= 0 || readErr != nil { // a terminal ends with EIO, a FIFO with nothing
			return
		}
	}
}

// drain waits until everything the container wrote has been copied, at most d
// if someone else still holds the other end; then it closes all.
func (sio *stdio) drain(d time.Duration) {
	for _, o := range sio.outputs {
		_ = o.r.SetReadDeadline(time.Now().Add(d))
	}
	sio.copying.Wait()
	sio.close()
}

// closeChild closes the container's ends on our side.
func (sio *stdio) closeChild() {
	for _, f := range sio.child {
		f.Close()
	}
	sio.child = nil
}

func (sio *stdio) close() {
	sio.closeStdin()
	for _, o := range sio.outputs {
		o.taps.closeAll()
		o.r.Close()
	}
	sio.mu.Lock()
	if sio.tty != nil {
		sio.tty.Close()
		sio.tty = nil
	}
	sio.mu.Unlock()
	if sio.log != nil {
		sio.log.close()
	}
}

func (sio *stdio) closeStdin() {
	sio.mu.Lock()
	defer sio.mu.Unlock()
	if sio.stdin != nil {
		sio.stdin.Close()
		sio.stdin = nil
	}
}

// input gives a descriptor of its own to write the container's input to.
func (sio *stdio) input() (*os.File, error) {
	sio.mu.Lock()
	defer sio.mu.Unlock()
	src := sio.stdin
	if sio.tty != nil {
		src = sio.tty
	}
	if src == nil {
		return nil, errNoInput
	}
	return dup(src)
}

var errNoInput = errors.New("container's input is closed or was never open")

func dup(f *os.File) (*os.File, error) {
	rc, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	var fd int
	var dupErr error
	if err := rc.Control(func(old uintptr) { fd, dupErr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return nil, err
	}
	if dupErr != nil {
		return nil, fmt.Errorf("dup: %w", dupErr)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// resize sets the terminal's size.
func (sio *stdio) resize(width, height uint16) error {
	sio.mu.Lock()
	defer sio.mu.Unlock()
	return setSize(sio.tty, width, height)
}

// release stops copying without closing anything a successor goes on with:
// podmon ends, the container does not.
func (sio *stdio) release() {
	sio.released.Store(true)
	for _, o := range sio.outputs {
		_ = o.r.SetReadDeadline(past)
	}
}
