package stream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/fsnotify/fsnotify"
)

// LogOptions choose what is read of a container's log.
type LogOptions struct {
	Follow     bool
	Timestamps bool
	Tail       *int64    // last lines only
	Since      time.Time // lines not older; zero: all
	LimitBytes *int64    // bytes written at most
	Stream     string    // "stdout", "stderr", "": both
}

// ReadLog copies the log at path, with the files it was rotated to (path.1 is
// the newest of them), to w. With Follow it goes on until done is closed and
// everything written before was copied, or ctx ends. A line that is not in
// the log's format is left out.
func ReadLog(ctx context.Context, path string, o LogOptions, done <-chan struct{}, w io.Writer) error {
	return readLog(ctx, path, o, done, w, fsnotify.NewWatcher)
}

// pollLog is how often a log is looked at that the kernel does not watch for us.
const pollLog = time.Second

func readLog(ctx context.Context, path string, o LogOptions, done <-chan struct{}, w io.Writer, watcher func() (*fsnotify.Watcher, error)) error {
	var changes <-chan fsnotify.Event
	var faults <-chan error
	var poll <-chan time.Time
	if o.Follow {
		events, err := watcher()
		if err == nil {
			defer events.Close()
			// The directory, not the file: a rotation replaces the file.
			err = events.Add(filepath.Dir(path))
		}
		if err != nil { // pods may have taken all that this user may have: see inotify(7)
			tick := time.NewTicker(pollLog)
			defer tick.Stop()
			poll = tick.C
		} else {
			changes, faults = events.Events, events.Errors
		}
	}
	r := &logReader{o: o, w: w}
	if o.LimitBytes != nil {
		r.left, r.limited = *o.LimitBytes, true
	}
	files, err := openLogs(path)
	if err != nil {
		return err
	}
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	if o.Tail != nil {
		if files, err = seekTail(files, *o.Tail); err != nil {
			return err
		}
	}
	for len(files) > 0 {
		if err := r.drain(files[0]); err != nil || r.full() {
			return err
		}
		if len(files) == 1 && o.Follow {
			break
		}
		files[0].Close()
		files = files[1:]
	}
	if !o.Follow {
		return nil
	}
	var current *os.File
	if len(files) > 0 {
		current, files = files[0], nil
	}
	defer func() {
		if current != nil {
			current.Close()
		}
	}()
	for last := false; ; {
		if current, err = r.follow(current, path); err != nil || r.full() || last {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-done:
			last = true // once more: what was written before the end
		case <-poll:
		case _, ok := <-changes:
			if !ok {
				return nil
			}
		case err, ok := <-faults:
			if ok && !errors.Is(err, fsnotify.ErrEventOverflow) {
				return fmt.Errorf("follow %s: %w", path, err)
			}
		}
	}
}

// openLogs opens the log and its rotated parts, oldest first. The parts are
// opened newest first and distinguished by inode, so that a rotation in between
// neither loses nor repeats one. A rotation moves one part at a time, the oldest
// first: while it goes on one number is free, and the parts end where two are.
func openLogs(path string) ([]*os.File, error) {
	var out []*os.File
	var seen []os.FileInfo
	for i, free := 0, 0; ; i++ {
		p := path
		if i > 0 {
			p = path + "." + strconv.Itoa(i)
		}
		f, err := os.Open(p)
		if errors.Is(err, fs.ErrNotExist) {
			if free++; free == 2 {
				return out, nil
			}
			continue
		}
		free = 0
		if err != nil {
			return nil, err
		}
		st, err := f.Stat()
		if err != nil {
			f.Close()
			return nil, err
		}
		dup := false
		for _, s := range seen {
			dup = dup || os.SameFile(s, st)
		}
		if dup {
			f.Close()
			continue
		}
		seen = append(seen, st)
		out = append([]*os.File{f}, out...)
	}
}

// seekTail drops or positions files so that n lines are left.
func seekTail(files []*os.File, n int64) ([]*os.File, error) {
	for i := len(files) - 1; i >= 0; i-- {
		off, found, err := tailOffset(files[i], n)
		if err != nil {
			return files, err
		}
		if found >= n {
			if _, err := files[i].Seek(off, io.SeekStart); err != nil {
				return files, err
			}
			for _, f := range files[:i] {
				f.Close()
			}
			return files[i:], nil
		}
		n -= found
	}
	return files, nil
}

// tailOffset finds where the last n whole lines of a log begin, and how many
// there are if fewer. A line that was split by its length counts once: the
// parts but the last carry the tag P.
func tailOffset(f *os.File, n int64) (off, found int64, err error) {
	st, err := f.Stat()
	if err != nil {
		return 0, 0, err
	}
	end := st.Size()
	if n <= 0 {
		return end, 0, nil
	}
	const block = 32 << 10
	buf := make([]byte, block)
	behind := int64(-1) // begin of the line after the one looked at
	for pos := end; pos > 0; {
		size := min(int64(block), pos)
		pos -= size
		if _, err := f.ReadAt(buf[:size], pos); err != nil && err != io.EOF {
			return 0, 0, err
		}
		for i := size - 1; i >= -1; i-- {
			start := pos + i + 1
			if i < 0 && pos > 0 || i >= 0 && buf[i] != '\n' {
				continue
			}
			if behind < 0 { // what follows the last newline is no line yet
				behind = start
				continue
			}
			whole, err := isWhole(f, start)
			if err != nil {
				return 0, 0, err
			}
			if whole {
				if found == n {
					return behind, found, nil
				}
				found++
			}
			behind = start
		}
	}
	return 0, found, nil
}

// isWhole reports whether the line at off is the last part of what was
// written.
func isWhole(f *os.File, off int64) (bool, error) {
	var head [64]byte
	n, err := f.ReadAt(head[:], off)
	if err != nil && err != io.EOF {
		return false, err
	}
	_, _, tag, _, ok := splitLine(head[:n])
	return !ok || tag != 'P', nil
}

// splitLine takes a line of the log apart: time, stream, tag, text.
func splitLine(line []byte) (stamp, stream []byte, tag byte, text []byte, ok bool) {
	a := bytes.IndexByte(line, ' ')
	if a < 0 {
		return nil, nil, 0, nil, false
	}
	b := bytes.IndexByte(line[a+1:], ' ')
	if b < 0 {
		return nil, nil, 0, nil, false
	}
	stream = line[a+1 : a+1+b]
	rest := line[a+1+b+1:]
	if len(rest) < 1 || rest[0] != 'P' && rest[0] != 'F' || len(rest) > 1 && rest[1] != ' ' && rest[1] != ':' {
		return nil, nil, 0, nil, false
	}
	tag = rest[0]
	if c := bytes.IndexByte(rest, ' '); c >= 0 {
		text = rest[c+1:]
	}
	return line[:a], stream, tag, text, true
}

// logReader writes what the options choose of the lines it is given.
type logReader struct {
	o       LogOptions
	w       io.Writer
	buf     []byte // the beginning of a line not ended yet
	inLine  bool   // the last part written had no end
	left    int64
	limited bool
}

func (r *logReader) full() bool { return r.limited && r.left <= 0 }

// maxLine bounds what is kept of a line that does not end.
const maxLine = 1 << 20

// drain reads f to its present end.
func (r *logReader) drain(f io.Reader) error {
	chunk := make([]byte, 32<<10)
	for !r.full() {
		n, err := f.Read(chunk)
		if werr := r.take(chunk[:n]); werr != nil {
			return werr
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// take splits the bytes into lines.
func (r *logReader) take(b []byte) error {
	for len(b) > 0 {
		i := bytes.IndexByte(b, '\n')
		if i < 0 {
			if len(r.buf)+len(b) > maxLine {
				r.buf = r.buf[:0] // no line of ours is that long
				return nil
			}
			r.buf = append(r.buf, b...)
			return nil
		}
		line := b[:i]
		if len(r.buf) > 0 {
			r.buf = append(r.buf, line...)
			line = r.buf
		}
		err := r.line(line)
		r.buf = r.buf[:0]
		if err != nil || r.full() {
			return err
		}
		b = b[i+1:]
	}
	return nil
}

// line writes one line of the log.
func (r *logReader) line(line []byte) error {
	stamp, stream, tag, text, ok := splitLine(line)
	if !ok || r.o.Stream != "" && string(stream) != r.o.Stream {
		return nil
	}
	if !r.o.Since.IsZero() {
		t, err := time.Parse(time.RFC3339Nano, string(stamp))
		if err != nil || t.Before(r.o.Since) {
			return nil
		}
	}
	var out []byte
	if r.o.Timestamps && !r.inLine {
		out = append(append(out, stamp...), ' ')
	}
	out = append(out, text...)
	if r.inLine = tag == 'P'; !r.inLine {
		out = append(out, '\n')
	}
	if r.limited {
		out = out[:min(int64(len(out)), r.left)]
		r.left -= int64(len(out))
	}
	_, err := r.w.Write(out)
	return err
}

// follow reads on: the current file to its end, then, if the name means
// another file by now, that one.
func (r *logReader) follow(current *os.File, path string) (*os.File, error) {
	for {
		// Looked at before the last read: what is written to the old file is
		// complete once the name has moved on.
		next, err := os.Open(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return current, err
		}
		if current != nil {
			if err := r.drain(current); err != nil {
				if next != nil {
					next.Close()
				}
				return current, err
			}
		}
		if next == nil {
			return current, nil
		}
		if current != nil && sameFile(current, next) {
			next.Close()
			return current, nil
		}
		if current != nil {
			current.Close()
		}
		current = next
	}
}

func sameFile(a, b *os.File) bool {
	x, err1 := a.Stat()
	y, err2 := b.Stat()
	return err1 == nil && err2 == nil && os.SameFile(x, y)
}
