package podmon

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"
)

const (
	defaultLogBytes = 10 << 20
	defaultLogFiles = 5
	// rotateAgain is how long after a rotation that failed the next is tried.
	rotateAgain = 10 * time.Second
	// maxLine is where a longer line is cut into parts.
	maxLine = 16 << 10
)

// logFile is a container's log: both streams' lines in the order they came,
//
//	2026-11-20T13:33:18.123456789Z stdout F the line
//
// with P instead of F for a part that the next line of the same stream
// continues. It rotates itself.
type logFile struct {
	path     string // "" for no log
	maxBytes int64  // negative: never rotate
	maxFiles int
	warn     *slog.Logger
	now      func() time.Time

	mu     sync.Mutex
	f      *os.File
	size   int64
	lost   int64 // bytes that could not be written since the last success
	closed bool
	// notBefore is when a rotation may be tried: the last one failed.
	notBefore time.Time
}

// freshSuffix is of the file that takes a log's name when it is rotated.
const freshSuffix = ".new"

func openLog(path string, maxBytes int64, maxFiles int, warn *slog.Logger) (*logFile, error) {
	l := &logFile{path: path, maxBytes: maxBytes, maxFiles: maxFiles, warn: warn, now: time.Now}
	if l.maxBytes == 0 {
		l.maxBytes = defaultLogBytes
	}
	if l.maxFiles <= 0 {
		l.maxFiles = defaultLogFiles
	}
	if path == "" {
		return l, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("log folder: %w", err)
	}
	_ = os.Remove(path + freshSuffix) // of a podmon that was killed in rotate
	if err := l.open(); err != nil {
		return nil, fmt.Errorf("log file: %w", err)
	}
	return l, nil
}

func (l *logFile) open() error {
	f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o640)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return err
	}
	l.f, l.size = f, st.Size()
	return nil
}

// stream makes the writer of one stream's bytes.
func (l *logFile) stream(name string) *logStream { return &logStream{log: l, name: name} }

// logStream cuts one stream into lines. One goroutine uses it.
type logStream struct {
	log     *logFile
	name    string
	pending []byte // an unfinished line, shorter than maxLine; nil between lines

	// aside is a file that holds pending while nothing comes, should podmon be
	// killed meanwhile; "": none. held: it is there.
	aside string
	held  bool
}

// resume begins with the unfinished line that a former podmon set aside.
func (s *logStream) resume() {
	if b, err := os.ReadFile(s.aside); err == nil && len(b) < maxLine {
		s.pending, s.held = b, true
	}
}

// rest sets an unfinished line aside: nothing more comes for now.
func (s *logStream) rest() {
	if s.aside != "" && !s.held && len(s.pending) > 0 {
		s.held = os.WriteFile(s.aside, s.pending, 0o600) == nil
	}
}

// goOn takes back what was set aside: it is about to change.
func (s *logStream) goOn() {
	if s.held {
		s.held = os.Remove(s.aside) != nil
	}
}

// outBuffers hold finished log lines on their way to the file.
var outBuffers = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// write logs what is complete of the stream so far, in one write to the file.
func (s *logStream) write(p []byte) {
	if s.log.path == "" {
		return
	}
	s.goOn()
	out := outBuffers.Get().(*bytes.Buffer)
	defer func() {
		if out.Cap() <= 256<<10 {
			out.Reset()
			outBuffers.Put(out)
		}
	}()
	stamp := s.log.now().UTC().AppendFormat(make([]byte, 0, 40), time.RFC3339Nano)
	line := func(tag byte, parts ...[]byte) {
		out.Write(stamp)
		out.WriteByte(' ')
		out.WriteString(s.name)
		out.WriteByte(' ')
		out.WriteByte(tag)
		out.WriteByte(' ')
		for _, b := range parts {
			out.Write(b)
		}
		out.WriteByte('\n')
	}
	for len(p) > 0 {
		end := bytes.IndexByte(p, '\n')
		room := maxLine - len(s.pending)
		switch {
		case end >= 0 && end <= room:
			line('F', s.pending, p[:end])
			p, s.pending = p[end+1:], nil
		case len(p) >= room:
			line('P', s.pending, p[:room])
			p, s.pending = p[room:], nil
		default:
			s.pending = append(s.pending, p...)
			p = nil
		}
	}
	s.log.append(out.Bytes())
}

// end logs a line that was never finished, as a part, so that a reader prints
// the bytes and nothing more.
func (s *logStream) end() {
	s.goOn()
	if len(s.pending) == 0 || s.log.path == "" {
		return
	}
	stamp := s.log.now().UTC().Format(time.RFC3339Nano)
	s.log.append([]byte(stamp + " " + s.name + " P " + string(s.pending) + "\n"))
	s.pending = nil
}

// append writes whole lines. A log that cannot be written (disk full) loses
// them, and says so as soon as it can: it never holds up the container.
func (l *logFile) append(b []byte) {
	if len(b) == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	if l.f == nil && l.open() != nil {
		l.lose(b)
		return
	}
	if l.maxBytes > 0 && l.size > 0 && l.size+int64(len(b)) > l.maxBytes && !l.now().Before(l.notBefore) {
		if err := l.rotate(); err != nil {
			// It grows on: better than lines that are lost.
			l.warn.Warn("log not rotated", "path", l.path, "err", err)
			l.notBefore = l.now().Add(rotateAgain)
		}
	}
	if l.lost > 0 {
		note := l.now().UTC().Format(time.RFC3339Nano) + " stderr F podmon: " + strconv.FormatInt(l.lost, 10) + " bytes of log are lost: it could not be written\n"
		if n, err := l.f.WriteString(note); err != nil {
			_ = l.f.Truncate(l.size)
			l.lose(b)
			return
		} else {
			l.size += int64(n)
			l.lost = 0
		}
	}
	n, err := l.f.Write(b)
	if err != nil {
		// No half a line: a reader would glue the next one to it.
		if n > 0 && l.f.Truncate(l.size) != nil {
			l.size += int64(n)
		}
		l.lose(b)
		return
	}
	l.size += int64(n)
}

func (l *logFile) lose(b []byte) {
	if l.lost == 0 {
		l.warn.Warn("log cannot be written", "path", l.path)
	}
	l.lost += int64(len(b))
}

// rotate moves every old file one number up, the current one to 1, and begins
// an empty one. That is made first: if it cannot be, no file is moved, and nothing
// that was kept goes for it. A rename that fails in the middle leaves the older files
// moved, and the next try moves them again.
func (l *logFile) rotate() error {
	name := func(i int) string { return l.path + "." + strconv.Itoa(i) }
	if l.maxFiles == 1 {
		if err := l.f.Truncate(0); err != nil {
			return err
		}
		l.size = 0
		return nil
	}
	fresh := l.path + freshSuffix
	f, err := os.OpenFile(fresh, os.O_WRONLY|os.O_APPEND|os.O_CREATE|os.O_TRUNC, 0o640)
	if err != nil {
		return err
	}
	for i := l.maxFiles - 2; i >= 1 && err == nil; i-- {
		if err = os.Rename(name(i), name(i+1)); os.IsNotExist(err) {
			err = nil
		}
	}
	if err == nil {
		if err = os.Rename(l.path, name(1)); os.IsNotExist(err) {
			err = nil
		}
	}
	if err == nil {
		if err = os.Rename(fresh, l.path); err != nil {
			_ = os.Rename(name(1), l.path) // it is written to further on
		}
	}
	if err != nil {
		f.Close()
		_ = os.Remove(fresh)
		return err
	}
	l.f.Close()
	l.f, l.size = f, 0
	return nil
}

func (l *logFile) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.f != nil {
		l.f.Close()
		l.f = nil
	}
}
