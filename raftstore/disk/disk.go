// Package disk knows how much room the file system below a data directory has, and
// how long writes to it take.
package disk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Disk is what a member knows about the file system below its data directory.
//
// A ballast file keeps some room. When free space falls below the limit the
// member is short: as leader it takes only what the cluster cannot do without,
// and all else is refused before it is in the log. When even the log meets a
// full disk, the ballast is given up, so that it can go on with the little that
// is let through until an administrator makes room.
type Disk struct {
	dir     string
	minFree int64
	slow    time.Duration
	free    func(dir string) (int64, error)

	short atomic.Bool
	mu    sync.Mutex
	since time.Time     // the write under way began then; zero: none is
	usual time.Duration // what writes have taken of late, a moving average
	has   int64         // free bytes at the last look; -1: not known
}

const ballastFile = "ballast"

// BallastBytes is how much room is kept for a log that finds the disk full.
const BallastBytes = 16 << 20

// New takes no look yet, see Begin. Below minFree the member is short of room; a
// Write that takes longer than slow is stuck. free tells the room below a directory;
// nil: the kernel does.
func New(dir string, minFree int64, slow time.Duration, free func(dir string) (int64, error)) *Disk {
	if free == nil {
		free = freeBytes
	}
	return &Disk{dir: dir, minFree: minFree, slow: slow, free: free, has: -1}
}

// Short reports whether there is less room than there has to be.
func (d *Disk) Short() bool { return d.short.Load() }

// Tight measures the room that is left now, and reports whether it is less than
// there has to be. Being short does not change by that: what takes the room may
// give it back before the next Look.
func (d *Disk) Tight() (free int64, tight bool) {
	free, err := d.free(d.dir)
	return free, err == nil && free < d.minFree
}

// freeBytes is what an unprivileged process may still write.
func freeBytes(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return int64(st.Bavail) * int64(st.Bsize), nil
}

// Write notes that a write has begun; the result says that it has ended.
func (d *Disk) Write() func() {
	d.mu.Lock()
	d.since = time.Now()
	d.mu.Unlock()
	return func() {
		d.mu.Lock()
		d.usual += (time.Since(d.since) - d.usual) / 4
		d.since = time.Time{}
		d.mu.Unlock()
	}
}

// Usually is how long writes have taken of late.
func (d *Disk) Usually() time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.usual
}

// slowerThanUsual times what writes take is a disk that hangs.
const slowerThanUsual = 4

// Stuck reports whether a write has been under way for longer than a leader
// may take. While it is, the leader is silent, and the others elect another
// one: raft itself would keep sending heartbeats.
//
// Where every write takes long, on all members perhaps, a change of leader
// does not help: then a write has to take much longer than usual.
func (d *Disk) Stuck() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !d.since.IsZero() && time.Since(d.since) > max(d.slow, slowerThanUsual*d.usual)
}

// ErrStuck is what a leader answers instead of sending while a write is stuck.
var ErrStuck = errors.New("the leader's disk does not answer")

// Begin takes the first look. Without room the member begins short of it.
func (d *Disk) Begin() error {
	d.short.Store(true)
	_, err := d.Look()
	if err != nil && d.Room() < 0 {
		d.short.Store(false) // a file system that does not tell
	}
	return err
}

// Look measures the free space and reports whether being short has changed.
func (d *Disk) Look() (changed bool, err error) {
	free, err := d.free(d.dir)
	if err != nil {
		return false, err
	}
	d.mu.Lock()
	d.has = free
	d.mu.Unlock()
	switch was := d.short.Load(); {
	case !was && free < d.minFree:
		d.short.Store(true)
		return true, nil
	case was && free >= d.minFree+BallastBytes:
		// Enough for the ballast, and to stay above the limit with it.
		if err := d.ballast(); err != nil {
			return false, err
		}
		d.short.Store(false)
		return true, nil
	}
	return false, nil
}

// ballast makes the file that keeps room.
func (d *Disk) ballast() error {
	f, err := os.OpenFile(filepath.Join(d.dir, ballastFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	err = unix.Fallocate(int(f.Fd()), 0, 0, BallastBytes)
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = nil // without it the limit alone has to do
	}
	if err != nil {
		err = fmt.Errorf("allocate %s: %w", f.Name(), err)
	}
	return errors.Join(err, f.Close())
}

// FoundFull gives the ballast up.
func (d *Disk) FoundFull() {
	d.short.Store(true)
	_ = os.Remove(filepath.Join(d.dir, ballastFile))
}

// Full reports whether an error says that there is no room.
func Full(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// Room is the free space at the last look; -1 if it is not known.
func (d *Disk) Room() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.has
}
