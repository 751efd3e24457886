package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/agent/image/isolate"
)

// Isolation says how the processes are started that read what registries send.
type Isolation struct {
	// Program opens the program whose main function is Program. Required.
	Program func() (*os.File, error)
	// Cgroup is where their cgroups are made, such as /clusterd/images. Required.
	Cgroup string
	// Memory is how much one of them may take, in bytes. Required.
	Memory int64
}

const (
	// unprivileged is who the processes are that need no files: nobody, on most systems.
	unprivileged = 65534
	// jailOut is the directory in which a process may make files.
	jailOut = "out"
	// pipeSize is what a pipe between processes takes, in bytes: fewer switches than with
	// the kernel's default.
	pipeSize = 1 << 20
)

// unpacking are the capabilities that unpacking needs: owners, modes, set-user-ID bits,
// capabilities of files, devices and whiteouts, and overlayfs's marks (trusted.*).
var unpacking = []int{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_FSETID, unix.CAP_SETFCAP, unix.CAP_MKNOD, unix.CAP_SYS_ADMIN}

// childWorker has each piece of work done by a process of its own.
type childWorker struct {
	run  *isolate.Runner
	root string // an empty directory
}

// newChildWorker keeps an empty directory in dir.
func newChildWorker(i Isolation, dir string, log *slog.Logger) (*childWorker, error) {
	root := filepath.Join(dir, "root")
	if err := os.MkdirAll(root, 0o700); err != nil {
		return nil, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return nil, fmt.Errorf("statfs %s: %w", dir, err)
	}
	return &childWorker{
		run: isolate.New(isolate.Config{
			Program: i.Program, Name: "imageworker", Cgroup: i.Cgroup, Memory: i.Memory, Logger: log,
			NoPageCache: st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC,
		}),
		root: root,
	}, nil
}

func (w *childWorker) close() { w.run.Close() }

// child is one process and what it is about.
type child struct {
	*isolate.Child
	ctx  context.Context       // the caller's
	stop func() bool           // the end of ctx kills no more
	what string                // for errors: "unpacking it"
	room atomic.Pointer[error] // why it was killed for the disk's sake; nil: it was not
}

// Bounds of one report, in bytes: where it holds documents of images, and where not.
const (
	maxDocuments = 32 << 20
	maxReport    = 256 << 10
)

// start starts a process that ends with ctx at the latest. wait is to be called.
func (w *childWorker) start(ctx context.Context, job, what string, o order, stdin, stdout *os.File) (*child, error) {
	p, err := w.run.Start(job, stdin, stdout)
	if err != nil {
		return nil, err
	}
	c := &child{Child: p, ctx: ctx, what: what}
	c.stop = context.AfterFunc(ctx, p.Kill)
	if job == jobFetch || job == jobList {
		p.Conn.Bound(maxDocuments)
	} else {
		p.Conn.Bound(maxReport)
	}
	o.Spec.Root, o.Spec.Memory = w.root, p.MemoryLimit()
	if err := p.Conn.Write(o); err != nil {
		return nil, c.broken(err)
	}
	switch {
	case o.Unpack != nil:
		go c.watch(w.root, o.Unpack.Limits)
	case o.List != nil:
		go c.watch(w.root, o.List.Limits)
	case o.Fetch != nil:
		go c.watch(w.root, o.Fetch.Limits)
	}
	return c, nil
}

// watchEvery is how often the disk is looked at while a process writes to it.
const watchEvery = time.Second

// watch kills a process that leaves half of what is to be left on the disk, until it has
// ended. An honest one stops before.
func (c *child) watch(dir string, l Limits) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-c.Done():
			return
		case <-tick.C:
		}
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			continue // its own look fails, too
		}
		half := l
		half.Free = min(l.Free, int64(st.Blocks)*st.Bsize/20) / 2
		if err := half.left(&st, dir); err != nil {
			c.room.Store(&err)
			c.Kill()
			return
		}
	}
}

// end kills the process, if it still runs, and waits for it.
func (c *child) end() error {
	c.stop()
	c.Kill()
	err := c.Wait()
	_ = c.Conn.Close()
	return err
}

// broken is the error of a process from which nothing good came; err is why.
func (c *child) broken(err error) error {
	exit := c.end() // one that was about to end does so as it was going to
	if c.ctx.Err() != nil {
		return context.Cause(c.ctx)
	}
	var how *isolate.ExitError
	if full := c.room.Load(); full != nil {
		return *full
	}
	switch {
	case errors.As(exit, &how) && how.Memory:
		return tooLarge(c.what+" takes more memory than allowed", size(how.Limit)+", set by --image-pull-memory")
	case exit != nil:
		return fmt.Errorf("%w: %s: %w", ErrWorker, c.what, exit)
	}
	return fmt.Errorf("%w: %s: %s", ErrWorker, c.what, cut(err.Error())) // it may repeat what was sent
}

// read waits for the next report.
func (c *child) read() (report, error) {
	var r report
	files, err := c.Conn.Read(&r)
	for _, f := range files {
		_ = f.Close()
	}
	if err != nil {
		return report{}, c.broken(err)
	}
	return r, nil
}

// last waits for the only report of a process, and for its end.
func (c *child) last() (report, error) {
	r, err := c.read()
	if err != nil {
		return report{}, err
	}
	if err := c.end(); c.ctx.Err() != nil {
		return report{}, errors.Join(context.Cause(c.ctx), err)
	}
	return r, r.Err.received()
}

// inflate implements worker.
func (w *childWorker) inflate(ctx context.Context, from io.Reader) (io.ReadCloser, error) {
	stdin, isFile := from.(*os.File)
	var feed *os.File
	if !isFile {
		var err error
		if stdin, feed, err = os.Pipe(); err != nil {
			return nil, err
		}
		defer stdin.Close()
	}
	out, err := w.stream(ctx, jobInflate, "decompressing it", order{}, stdin)
	if err != nil {
		if feed != nil {
			_ = feed.Close()
		}
		return nil, err
	}
	if feed != nil {
		out.fed = make(chan error, 1)
		// It ends when the process does or the reader gives no more, which may be after
		// Close: an archive comes from whoever sends it, at their pace.
		go func() {
			_, err := io.Copy(feed, from)
			if errors.Is(err, unix.EPIPE) {
				err = nil
			}
			out.fed <- err
			_ = feed.Close()
		}()
	}
	return out, nil
}

// dockerLayer implements worker.
func (w *childWorker) dockerLayer(ctx context.Context, archive *os.File, which dockerLayer) (io.ReadCloser, error) {
	return w.stream(ctx, jobLayer, "reading a layer of it", order{Layer: &which}, archive)
}

// stream starts a process whose standard output is read.
func (w *childWorker) stream(ctx context.Context, job, what string, o order, stdin *os.File) (*stream, error) {
	r, stdout, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer stdout.Close()
	enlarge(stdout)
	o.Spec.User = unprivileged
	c, err := w.start(ctx, job, what, o, stdin, stdout)
	if err != nil {
		_ = r.Close()
		return nil, err
	}
	return &stream{c: c, r: r}, nil
}

func enlarge(pipe *os.File) { _, _ = unix.FcntlInt(pipe.Fd(), unix.F_SETPIPE_SZ, pipeSize) }

// stream is the output of a process, and its error at the end.
type stream struct {
	c    *child
	r    *os.File
	fed  chan error // how reading its input ended; nil: it is a file
	done bool
	err  error
}

// Read implements io.Reader.
func (s *stream) Read(p []byte) (int, error) {
	if s.done {
		return 0, s.err
	}
	n, err := s.r.Read(p)
	if err == nil || n > 0 {
		return n, nil
	}
	s.done = true
	if _, s.err = s.c.last(); s.err == nil {
		s.err = err // io.EOF
	}
	select {
	case ferr := <-s.fed: // what is wrong with the input comes first
		if ferr != nil {
			s.err = ferr
		}
	default:
	}
	return 0, s.err
}

// Close implements io.Closer.
func (s *stream) Close() error {
	s.done = true
	if s.err == nil {
		s.err = os.ErrClosed
	}
	err := s.r.Close()
	_ = s.c.end() // it was killed here, or Read has said why not
	return err
}

// list implements worker.
func (w *childWorker) list(ctx context.Context, archive *os.File, dir string, req listRequest) ([]listed, error) {
	st, err := archive.Stat()
	if err != nil {
		return nil, err
	}
	o := order{List: &req, Spec: isolate.Spec{FileSize: max(st.Size(), req.Limits.Download), Binds: []isolate.Bind{{From: dir, To: "/" + jailOut, Write: true}}}}
	c, err := w.start(ctx, jobList, "reading it", o, archive, nil)
	if err != nil {
		return nil, err
	}
	r, err := c.last()
	return r.Listed, err
}

// unpack implements worker.
func (w *childWorker) unpack(ctx context.Context, archive io.Reader, req unpackRequest) (unpacked, error) {
	binds := []isolate.Bind{{From: req.dir, To: "/" + jailOut, Write: true}}
	for i, l := range req.lowers {
		binds = append(binds, isolate.Bind{From: l, To: "/" + strconv.Itoa(i+1)})
	}
	o := order{
		Spec:   isolate.Spec{Binds: binds, Proc: true, Capabilities: unpacking, FileSize: max(1, req.limits.Unpacked-req.below)},
		Unpack: &unpackOrder{Limits: req.limits, Below: req.below, From: req.from, Lowers: len(req.lowers), Shown: req.dir},
	}
	stdin, feed, err := os.Pipe()
	if err != nil {
		return unpacked{}, err
	}
	enlarge(feed)
	c, err := w.start(ctx, jobUnpack, "unpacking it", o, stdin, nil)
	_ = stdin.Close()
	if err != nil {
		_ = feed.Close()
		return unpacked{}, err
	}
	fed := make(chan error, 1)
	go func() { // waited for below
		from := &errReader{r: archive}
		_, _ = io.CopyBuffer(struct{ io.Writer }{feed}, from, make([]byte, 64<<10))
		_ = feed.Close()
		fed <- from.err
	}()
	r, err := c.last()
	// The process has ended, and with it the pipe: what is read next is the last.
	if ferr := <-fed; ferr != nil && ctx.Err() == nil {
		if errors.Is(ferr, ErrWorker) || errors.Is(ferr, ErrTooLarge) {
			return unpacked{}, ferr
		}
		return unpacked{}, &badLayerError{fmt.Errorf("read the archive: %w", ferr)}
	}
	if err != nil {
		return unpacked{}, err
	}
	if r.Unpacked == nil {
		return unpacked{}, fmt.Errorf("%w: it reports no layer", ErrWorker)
	}
	return *r.Unpacked, r.Unpacked.check(req)
}

// sumPattern is what sum gives.
var sumPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

// check looks whether a report can be true: both go into the index.
func (u unpacked) check(req unpackRequest) error {
	if u.Size < 0 || u.Size > req.limits.Unpacked-req.below {
		return fmt.Errorf("%w: it reports a layer of %d bytes, allowed were %d", ErrWorker, u.Size, req.limits.Unpacked-req.below)
	}
	if !sumPattern.MatchString(u.Sum) {
		return fmt.Errorf("%w: it reports a fingerprint of %d bytes that is none", ErrWorker, len(u.Sum))
	}
	return nil
}

// errReader remembers why reading ended, if not at the end.
type errReader struct {
	r   io.Reader
	err error
}

func (e *errReader) Read(p []byte) (int, error) {
	n, err := e.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		e.err = err
	}
	return n, err
}
