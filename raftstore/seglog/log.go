// Package seglog keeps a raft log in a directory of append-only segment files: one
// write and one fdatasync per append, a checksum on every entry that is
// checked on every read, and room that is written over again instead of
// growing. It knows nothing of what the entries hold.
package seglog

import (
	"errors"
	"fmt"
	"log/slog"
	"sort"
	"sync"

	"github.com/hashicorp/raft"
)

// Options of Open. Zero values mean the defaults.
type Options struct {
	// SegmentBytes is how large a segment file grows before the next one is
	// begun. An append is never split, so one that is larger has a segment of
	// its own. Default: 16 MiB.
	SegmentBytes int64
	// MaxSpares is how many dropped segments are kept to be written over
	// again. Default: 2.
	MaxSpares int
	// Logger gets a line when an unfinished append was cut off. Default:
	// slog.Default().
	Logger *slog.Logger
}

func (o *Options) step() int64 { return min(o.SegmentBytes, maxStep) }

// Log is a raft.LogStore. Its entries are contiguous; an empty one may begin
// anywhere. All methods may be called concurrently.
type Log struct {
	dir   string
	files folder
	opts  Options

	// write is held by the goroutine that changes the files. mu guards what follows and
	// is held for changing it only, so that entries can be read while others
	// are being synced.
	write  sync.Mutex
	buf    []byte // of the append under way
	spares []string
	made   int // numbers the spares

	mu       sync.RWMutex
	segments []*segment // oldest first; only the last one grows
	first    uint64     // 0: the log is empty
	last     uint64
	closed   bool
}

var (
	_ raft.LogStore          = (*Log)(nil)
	_ raft.MonotonicLogStore = (*Log)(nil)
)

// ErrClosed is returned after Close.
var ErrClosed = errors.New("log is closed")

// CorruptError is returned by Open and GetLog when a file does not hold what
// was written and synced to it.
type CorruptError struct {
	File   string
	Offset int64
	Index  uint64 // of the entry that was expected there; 0: the file's header
	Reason string
}

func (e *CorruptError) Error() string {
	if e.Index == 0 {
		return fmt.Sprintf("log file %s is corrupt at offset %d: %s", e.File, e.Offset, e.Reason)
	}
	return fmt.Sprintf("log file %s is corrupt at offset %d, entry %d: %s", e.File, e.Offset, e.Index, e.Reason)
}

// Open opens the log in dir, made if need be, and checks every entry. One Log
// at a time may use a directory; its caller sees to that.
//
// What is in the log when it returns is on disk, no matter which process wrote it. The end of
// an append that a crash left unfinished is cut off; damage to what had been
// synced gives a *CorruptError.
//
// The two cannot always be distinguished: when the damage is in the very last
// append, and neither Mark nor Close came after it, it looks unfinished.
func Open(dir string, opts Options) (*Log, error) {
	files, err := makeFolder(dir)
	if err != nil {
		return nil, err
	}
	return openIn(files, dir, opts)
}

func openIn(files folder, dir string, opts Options) (*Log, error) {
	if opts.SegmentBytes == 0 {
		opts.SegmentBytes = 16 << 20
	}
	if opts.MaxSpares == 0 {
		opts.MaxSpares = 2
	}
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	l := &Log{dir: dir, files: files, opts: opts}
	if err := l.load(); err != nil {
		return nil, errors.Join(err, l.closeFiles())
	}
	return l, nil
}

func (l *Log) load() error {
	names, err := l.inventory()
	if err != nil {
		return err
	}
	// The process before may have ended between a change of names and its sync.
	if err := l.files.sync(); err != nil {
		return err
	}
	var buf []byte
	for i, name := range names {
		seg, err := l.openSegment(name, i == len(names)-1, &buf)
		if err != nil {
			return err
		}
		if len(l.segments) > 0 {
			if prev := l.segments[len(l.segments)-1]; prev.next() != seg.first {
				_ = seg.close()
				return &CorruptError{File: prev.path(), Offset: prev.end, Index: prev.next(),
					Reason: fmt.Sprintf("the log goes on at entry %d in %s", seg.first, name)}
			}
		}
		l.segments = append(l.segments, seg)
	}
	l.setBounds()
	return nil
}

// setBounds takes first and last from the segments. A last segment without
// entries, left by a crash right after it was begun or by a truncation, counts
// for nothing but a place to go on. mu is held, or no other goroutine has the log yet.
func (l *Log) setBounds() {
	l.first, l.last = 0, 0
	if len(l.segments) == 0 {
		return
	}
	lo, hi := l.segments[0], l.segments[len(l.segments)-1]
	if hi.next() > lo.first {
		l.first, l.last = lo.first, hi.next()-1
	}
}

// FirstIndex implements raft.LogStore: 0 when the log is empty. After a
// restart it may be lower again, down to the beginning of its segment.
func (l *Log) FirstIndex() (uint64, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.first, l.usable()
}

// LastIndex implements raft.LogStore: 0 when the log is empty.
func (l *Log) LastIndex() (uint64, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.last, l.usable()
}

// IsMonotonic implements raft.MonotonicLogStore: there are no gaps.
func (l *Log) IsMonotonic() bool { return true }

// GetLog implements raft.LogStore. It returns raft.ErrLogNotFound for an index
// that is not there, and a *CorruptError for one that is damaged.
func (l *Log) GetLog(index uint64, out *raft.Log) error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if err := l.usable(); err != nil {
		return err
	}
	if l.first == 0 || index < l.first || index > l.last {
		return raft.ErrLogNotFound
	}
	i := sort.Search(len(l.segments), func(i int) bool { return l.segments[i].first > index }) - 1
	return l.segments[i].read(index, out)
}

// StoreLog implements raft.LogStore.
func (l *Log) StoreLog(log *raft.Log) error { return l.StoreLogs([]*raft.Log{log}) }

// StoreLogs implements raft.LogStore: all of logs are on disk when it returns
// nil, and none of them is in the log when it returns an error. raft leaves a
// gap only where a snapshot covers everything before it: the log then begins
// again.
func (l *Log) StoreLogs(logs []*raft.Log) error {
	if len(logs) == 0 {
		return nil
	}
	l.write.Lock()
	defer l.write.Unlock()
	next := logs[0].Index
	if err := l.writable(); err != nil {
		return err
	}
	if l.last != 0 && next <= l.last {
		return fmt.Errorf("append entry %d to a log that ends at %d", next, l.last)
	}
	for i, e := range logs {
		if e.Index != next+uint64(i) {
			return fmt.Errorf("append entry %d after %d", e.Index, next+uint64(i)-1)
		}
	}
	size := int64(0)
	for _, e := range logs {
		size += recordSize(e)
	}
	seg, err := l.segmentFor(next, size)
	if err != nil {
		return fmt.Errorf("begin a log segment: %w", err)
	}
	l.buf = l.buf[:0]
	starts, sums := make([]int64, len(logs)), make([]uint32, len(logs))
	link := seg.link()
	for i, e := range logs {
		starts[i] = seg.end + int64(len(l.buf))
		l.buf, link = appendRecord(l.buf, seg.life.salt, link, seg.end, e)
		sums[i] = link
	}
	if err := seg.append(l.buf); err != nil {
		return fmt.Errorf("append to log segment %s: %w", seg.path(), err)
	}
	if cap(l.buf) > maxKeptBuffer {
		l.buf = nil
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	seg.end += size
	seg.starts, seg.sums = append(seg.starts, starts...), append(seg.sums, sums...)
	if l.first == 0 {
		l.first = next
	}
	l.last = logs[len(logs)-1].Index
	return nil
}

// maxKeptBuffer is how large an append's buffer may be to be kept for the next
// one.
const maxKeptBuffer = 4 << 20

// segmentFor returns the segment that takes entry next and what follows it,
// size bytes in all. write is held.
func (l *Log) segmentFor(next uint64, size int64) (*segment, error) {
	if n := len(l.segments); n > 0 {
		seg := l.segments[n-1]
		switch {
		case seg.next() != next:
			// A gap, or an empty log that begins elsewhere.
			if err := l.dropAll(); err != nil {
				return nil, err
			}
		case !seg.current() && len(seg.starts) == 0:
			if err := l.dropLast(); err != nil {
				return nil, err
			}
		case seg.current() && (len(seg.starts) == 0 || seg.end+size <= l.opts.SegmentBytes):
			return seg, nil
		case seg.torn:
			// What follows a segment has to find it clean.
			if err := seg.truncate(); err != nil {
				return nil, err
			}
		}
	}
	seg, err := l.begin(next)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.segments = append(l.segments, seg)
	return seg, nil
}

// DeleteRange implements raft.LogStore for ranges that reach from the first
// entry or to the last one. What is cut off at the end is permanently gone when it
// returns; room at the beginning is freed in whole segments.
func (l *Log) DeleteRange(lo, hi uint64) error {
	l.write.Lock()
	defer l.write.Unlock()
	if err := l.writable(); err != nil {
		return err
	}
	switch {
	case l.first == 0 || hi < l.first || lo > l.last || lo > hi:
		return nil
	case lo <= l.first && hi >= l.last:
		return l.dropAll()
	case hi >= l.last:
		return l.dropFrom(lo)
	case lo <= l.first:
		return l.dropThrough(hi)
	}
	return fmt.Errorf("delete entries %d to %d from the middle of a log of %d to %d", lo, hi, l.first, l.last)
}

// dropAll empties the log. write is held.
func (l *Log) dropAll() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	// Newest first: what a crash leaves is a log that ends earlier.
	for n := len(l.segments); n > 0; n-- {
		if err := l.discard(l.segments[n-1]); err != nil {
			l.setBounds()
			return err
		}
		l.segments = l.segments[:n-1]
	}
	l.setBounds()
	return l.files.sync()
}

// dropLast drops the last segment, which is empty. write is held.
func (l *Log) dropLast() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.segments) - 1
	if err := l.discard(l.segments[n]); err != nil {
		return err
	}
	l.segments = l.segments[:n]
	return nil
}

// dropFrom cuts the log off before entry index. write is held.
func (l *Log) dropFrom(index uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.setLast()
	for n := len(l.segments); n > 1 && l.segments[n-1].first >= index; n-- {
		if err := l.discard(l.segments[n-1]); err != nil {
			return err
		}
		l.segments = l.segments[:n-1]
	}
	if err := l.files.sync(); err != nil {
		return err
	}
	return l.segments[len(l.segments)-1].cut(index)
}

// setLast follows a change at the end of the log. mu is held.
func (l *Log) setLast() { l.last = l.segments[len(l.segments)-1].next() - 1 }

// dropThrough forgets the entries up to index, which is not the last one.
// write is held.
func (l *Log) dropThrough(index uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.first = index + 1
	for len(l.segments) > 1 && l.segments[1].first <= l.first {
		if err := l.discard(l.segments[0]); err != nil {
			return err
		}
		l.segments = l.segments[1:]
	}
	return l.files.sync()
}

// Mark notes after the last entry that all before it has been synced, so that
// damage to the last append is distinguished from an append that a crash cut short. It
// is not synced itself: the next append does that, or the kernel in time.
func (l *Log) Mark() error {
	l.write.Lock()
	defer l.write.Unlock()
	if err := l.writable(); err != nil {
		return err
	}
	return l.mark()
}

func (l *Log) mark() error {
	if n := len(l.segments); n > 0 {
		return l.segments[n-1].mark()
	}
	return nil
}

// Size is how many bytes the log's files take, the spare ones included.
func (l *Log) Size() int64 {
	l.write.Lock()
	defer l.write.Unlock()
	var n int64
	for _, s := range l.segments {
		n += s.room
	}
	for _, name := range l.spares {
		if f, err := l.files.open(name); err == nil {
			if size, err := f.size(); err == nil {
				n += size
			}
			_ = f.Close()
		}
	}
	return n
}

// Close marks and closes the log.
func (l *Log) Close() error {
	l.write.Lock()
	defer l.write.Unlock()
	if l.writable() != nil {
		return nil
	}
	err := l.mark()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	return errors.Join(err, l.closeFiles())
}

func (l *Log) closeFiles() error {
	var errs []error
	for _, s := range l.segments {
		errs = append(errs, s.close())
	}
	return errors.Join(errs...)
}

// usable: mu is held.
func (l *Log) usable() error {
	if l.closed {
		return ErrClosed
	}
	return nil
}

// writable: write is held, so closed does not change.
func (l *Log) writable() error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.usable()
}
