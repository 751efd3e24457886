// Package boltlog keeps a raft log in hashicorp/raft-boltdb/v2, with what that
// leaves to its user: a checksum in every entry (bolt has none on its data
// pages), no gaps, a damaged file that ends in an error and not in a panic, and
// nothing counted that is not on disk. It makes the promises of package seglog
// and passes the same tests; a log by other hands guards against the faults of
// ours.
package boltlog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/raftstore/seglog"
)

// FileName is the database's name in the log's directory.
const FileName = "raft.db"

// Log is a raft.LogStore. Its entries are contiguous; an empty one may begin
// anywhere. All methods may be called concurrently.
type Log struct {
	path string
	db   *raftboltdb.BoltStore

	// write is held by the goroutine that changes the log. mu guards what follows.
	write sync.Mutex
	// around runs each transaction. Tests put themselves around it.
	around   func(transaction func() error) error
	dirty    bool   // appended since the last Mark; write is held
	markedAt uint64 // where the log ended at the last Mark; write is held

	mu          sync.RWMutex
	first, last uint64 // 0: the log is empty
	closed      bool
	// broken is why nothing is written any more: bolt does not say what of a
	// transaction that failed at its end is on disk.
	broken error
}

var (
	_ raft.LogStore          = (*Log)(nil)
	_ raft.MonotonicLogStore = (*Log)(nil)
)

// ErrBroken is returned by writes after one has failed in a way that leaves
// open what of it is on disk. Another Open finds out.
var ErrBroken = errors.New("the log is not written to any more after an error")

// Open opens the log in dir, made if need be, and checks every entry. What is
// in the log when it returns is on disk, no matter which process wrote it. Damage gives a
// *seglog.CorruptError. One Log at a time may use a directory; its caller sees to
// that.
//
// Damage to the page that made the last append valid looks like a crash before
// that, unless Mark or Close came after it.
//
// Entries up to index after are not looked at.
func Open(dir string, after uint64) (*Log, error) { return open(dir, after, 64<<20, settle) }

func open(dir string, after uint64, mmapBytes int, settle func(path string) error) (*Log, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, FileName)
	if err := settle(path); err != nil {
		return nil, err
	}
	if _, err := CheckFile(path); err != nil {
		return nil, err
	}
	l := &Log{path: path, around: func(f func() error) error { return f() }}
	if err := l.load(after, mmapBytes); err != nil {
		if l.db != nil {
			err = errors.Join(err, guard(path, l.db.Close))
		}
		return nil, err
	}
	// The file may have been made just now.
	return l, errors.Join(syncPath(dir), syncPath(filepath.Dir(dir)))
}

// settle makes what the file holds durable: the process that wrote it may have
// ended before its sync. Then it drops what the kernel remembers of the file,
// so that what is read comes from the disk.
func settle(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	err = f.Sync()
	_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	return errors.Join(err, f.Close())
}

// OpenStore opens the database at path, which CheckFile has found sound. Its
// list of free pages is not kept in the file: that is less to write, and a
// damaged one would give pages that are in use to others.
func OpenStore(path string, mmapBytes int) (db *raftboltdb.BoltStore, err error) {
	var f *os.File
	opts := &bbolt.Options{
		Timeout: time.Second, PageSize: PageSize, InitialMmapSize: mmapBytes,
		NoFreelistSync: true, FreelistType: bbolt.FreelistMapType,
		OpenFile: func(name string, flag int, mode os.FileMode) (_ *os.File, err error) {
			f, err = os.OpenFile(name, flag, mode)
			return f, err
		},
	}
	err = guard(path, func() (err error) {
		db, err = raftboltdb.New(raftboltdb.Options{Path: path, BoltOptions: opts})
		return err
	})
	if err != nil && f != nil {
		// bolt does not when it panics. What it has mapped into memory would keep
		// the lock.
		_ = unix.Flock(int(f.Fd()), unix.LOCK_UN)
		_ = f.Close()
	}
	return db, err
}

// PageSize of our databases, whatever the machine's is.
const PageSize = 4096

func (l *Log) load(after uint64, mmapBytes int) error {
	var err error
	if l.db, err = OpenStore(l.path, mmapBytes); err != nil {
		return err
	}
	err = guard(l.path, func() (err error) {
		if l.first, err = l.db.FirstIndex(); err == nil {
			l.last, err = l.db.LastIndex()
		}
		return err
	})
	if err != nil {
		return err
	}
	marked, err := l.marked()
	if err != nil {
		return err
	}
	if marked > l.last {
		return l.corrupt(l.last+1, fmt.Sprintf("the log ends before it, and had entry %d", marked))
	}
	if l.first == 0 {
		return nil
	}
	if l.last < l.first || l.last-l.first > maxEntries {
		return l.corrupt(0, fmt.Sprintf("its first entry is said to be %d and its last one %d", l.first, l.last))
	}
	var e raft.Log
	var term uint64
	for i := max(l.first, after+1); i <= l.last; i++ {
		if err := l.GetLog(i, &e); err != nil {
			return err
		}
		if e.Term < term {
			return l.corrupt(i, fmt.Sprintf("it is of term %d, behind one of term %d", e.Term, term))
		}
		term = e.Term
	}
	return nil
}

// maxEntries is more than a log can hold between two snapshots.
const maxEntries = 1 << 32

// damaged says of an error of opening a database whether it is damage.
func damaged(path string, err error) error {
	for _, e := range []error{bbolt.ErrInvalid, bbolt.ErrChecksum, bbolt.ErrVersionMismatch} { //nolint:staticcheck // raft-boltdb's own names for them
		if errors.Is(err, e) {
			return &seglog.CorruptError{File: path, Reason: err.Error()}
		}
	}
	if errors.Is(err, bbolt.ErrTimeout) { //nolint:staticcheck // as above
		return fmt.Errorf("%s is locked: another process has this store open", path)
	}
	return err
}

// Guard runs f, which reads a database: pages that make no sense let bolt
// panic, or read beyond the file's end. That becomes a *seglog.CorruptError.
func Guard(path string, f func() error) error { return guard(path, f) }

func guard(path string, f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = &seglog.CorruptError{File: path, Reason: fmt.Sprint(p)}
		}
	}()
	return damaged(path, f())
}

func (l *Log) corrupt(index uint64, reason string) error {
	return &seglog.CorruptError{File: l.path, Index: index, Reason: reason}
}

// FirstIndex implements raft.LogStore: 0 when the log is empty.
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

func (l *Log) usable() error {
	if l.closed {
		return seglog.ErrClosed
	}
	return nil
}

// GetLog implements raft.LogStore. It returns raft.ErrLogNotFound for an index
// that is not there, and a *seglog.CorruptError for one that is damaged.
func (l *Log) GetLog(index uint64, out *raft.Log) error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if err := l.usable(); err != nil {
		return err
	}
	if l.first == 0 || index < l.first || index > l.last {
		return raft.ErrLogNotFound
	}
	var e raft.Log
	err := guard(l.path, func() error { return l.db.GetLog(index, &e) })
	switch {
	case errors.Is(err, raft.ErrLogNotFound):
		return l.corrupt(index, "it is not there")
	case errors.As(err, new(*seglog.CorruptError)), errors.As(err, new(syscall.Errno)):
		return err
	case err != nil:
		return l.corrupt(index, err.Error()) // it does not decode
	}
	if reason := unseal(&e, index); reason != "" {
		return l.corrupt(index, reason)
	}
	*out = e
	return nil
}

// StoreLog implements raft.LogStore.
func (l *Log) StoreLog(e *raft.Log) error { return l.StoreLogs([]*raft.Log{e}) }

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
	if err := l.writable(); err != nil {
		return err
	}
	next := logs[0].Index
	if l.last != 0 && next <= l.last {
		return fmt.Errorf("append entry %d to a log that ends at %d", next, l.last)
	}
	sealed := make([]*raft.Log, len(logs))
	for i, e := range logs {
		if e.Index != next+uint64(i) {
			return fmt.Errorf("append entry %d after %d", e.Index, next+uint64(i)-1)
		}
		sealed[i] = seal(e)
	}
	if l.last != 0 && next != l.last+1 {
		if err := l.drop(l.first, l.last); err != nil {
			return err
		}
	}
	if err := l.change(func() error { return l.db.StoreLogs(sealed) }); err != nil {
		return fmt.Errorf("append to %s: %w", l.path, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.first == 0 {
		l.first = next
	}
	l.last = logs[len(logs)-1].Index
	l.dirty = true
	return nil
}

// change runs a transaction. write is held. Of one that failed for want of room
// nothing is in the file: bolt writes the pages that hold it before the one that
// makes them valid, and that one has its room. After any other error it is
// not known what the file holds, and nothing is written any more.
func (l *Log) change(f func() error) error {
	err := l.around(func() error { return guard(l.path, f) })
	if err != nil && !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
		l.mu.Lock()
		l.broken = err
		l.mu.Unlock()
	}
	return err
}

func (l *Log) writable() error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.broken != nil {
		return fmt.Errorf("%w: %w", ErrBroken, l.broken)
	}
	return l.usable()
}

// DeleteRange implements raft.LogStore for ranges that reach from the first
// entry or to the last one. What is cut off at the end is permanently gone when it
// returns.
func (l *Log) DeleteRange(lo, hi uint64) error {
	l.write.Lock()
	defer l.write.Unlock()
	if err := l.writable(); err != nil {
		return err
	}
	if l.first == 0 || hi < l.first || lo > l.last || lo > hi {
		return nil
	}
	lo, hi = max(lo, l.first), min(hi, l.last)
	if lo > l.first && hi < l.last {
		return fmt.Errorf("delete entries %d to %d from the middle of a log of %d to %d", lo, hi, l.first, l.last)
	}
	return l.drop(lo, hi)
}

// dropAtOnce is how many entries one transaction drops: appends wait for it.
const dropAtOnce = 1024

// drop deletes a range that reaches from the first entry or to the last one,
// from that end on, so that what a crash leaves has no gap. write is held.
func (l *Log) drop(lo, hi uint64) error {
	fromEnd := hi == l.last
	left := lo - 1 // where the log will end
	if lo == l.first {
		left = 0
	}
	if fromEnd && l.markedAt > left {
		if err := l.mark(left); err != nil {
			return err
		}
	}
	for lo <= hi {
		from, to := lo, hi
		if hi-lo >= dropAtOnce {
			if fromEnd {
				from = hi - dropAtOnce + 1
			} else {
				to = lo + dropAtOnce - 1
			}
		}
		if err := l.change(func() error { return l.db.DeleteRange(from, to) }); err != nil {
			return fmt.Errorf("delete entries %d to %d of %s: %w", from, to, l.path, err)
		}
		l.mu.Lock()
		switch {
		case from == l.first && to == l.last:
			l.first, l.last = 0, 0
		case fromEnd:
			l.last = from - 1
		default:
			l.first = to + 1
		}
		l.mu.Unlock()
		if from == lo && to == hi {
			return nil
		}
		if fromEnd {
			hi = from - 1
		} else {
			lo = to + 1
		}
	}
	return nil
}

// Mark commits once more after appends, and writes down where the log ends.
// Both of bolt's descriptions of the file then tell of the appends: damage to
// one of them is no loss; and a page that has lost its last keys is found.
func (l *Log) Mark() error {
	l.write.Lock()
	defer l.write.Unlock()
	if err := l.writable(); err != nil || !l.dirty {
		return err
	}
	return l.mark(l.last)
}

var markKey = []byte("mark")

// mark writes down that the log reaches to index last at least. write is held.
func (l *Log) mark(last uint64) error {
	b := binary.LittleEndian.AppendUint64(nil, last)
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	err := l.change(func() error { return l.db.Set(markKey, b) })
	l.dirty = err != nil
	if err == nil {
		l.markedAt = last
	}
	return err
}

// marked reads what mark wrote.
func (l *Log) marked() (last uint64, err error) {
	var b []byte
	err = guard(l.path, func() (err error) {
		b, err = l.db.Get(markKey)
		return err
	})
	switch {
	case errors.Is(err, raftboltdb.ErrKeyNotFound):
		return 0, nil
	case err != nil:
		return 0, err
	case len(b) != 12 || crc32.Checksum(b[:8], castagnoli) != binary.LittleEndian.Uint32(b[8:]):
		return 0, l.corrupt(0, "the mark of its end is damaged")
	}
	l.markedAt = binary.LittleEndian.Uint64(b)
	return l.markedAt, nil
}

// Size is how many bytes the log's file takes.
func (l *Log) Size() int64 {
	var st unix.Stat_t
	if unix.Stat(l.path, &st) != nil {
		return 0
	}
	return st.Blocks * 512
}

// Close marks and closes the log.
func (l *Log) Close() error {
	l.write.Lock()
	defer l.write.Unlock()
	var err error
	if l.dirty && l.writable() == nil {
		err = l.mark(l.last)
	}
	return errors.Join(err, l.abandon())
}

// abandon closes the file. write is held.
func (l *Log) abandon() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	return guard(l.path, l.db.Close)
}

func syncPath(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// seal returns the entry as it is stored: with a checksum behind its
// extensions.
func seal(e *raft.Log) *raft.Log {
	s := *e
	s.Extensions = make([]byte, len(e.Extensions), len(e.Extensions)+4)
	copy(s.Extensions, e.Extensions)
	s.Extensions = binary.LittleEndian.AppendUint32(s.Extensions, sum(e))
	return &s
}

// unseal undoes seal. reason is why it cannot.
func unseal(e *raft.Log, index uint64) (reason string) {
	n := len(e.Extensions) - 4
	if n < 0 {
		return "it has no checksum"
	}
	want := binary.LittleEndian.Uint32(e.Extensions[n:])
	e.Extensions = e.Extensions[:n:n]
	if n == 0 {
		e.Extensions = nil
	}
	if e.Index != index {
		return fmt.Sprintf("holds entry %d", e.Index)
	}
	if got := sum(e); got != want {
		return fmt.Sprintf("its checksum is %08x, stored was %08x", got, want)
	}
	return ""
}

// sum covers all of an entry.
func sum(e *raft.Log) uint32 {
	var at int64
	if !e.AppendedAt.IsZero() {
		at = e.AppendedAt.UnixNano()
	}
	var head [33]byte
	le := binary.LittleEndian
	le.PutUint64(head[0:], e.Index)
	le.PutUint64(head[8:], e.Term)
	le.PutUint64(head[16:], uint64(at))
	le.PutUint64(head[24:], uint64(len(e.Extensions)))
	head[32] = byte(e.Type)
	crc := crc32.Checksum(head[:], castagnoli)
	crc = crc32.Update(crc, castagnoli, e.Extensions)
	return crc32.Update(crc, castagnoli, e.Data)
}
