package datadir

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft"
	"golang.org/x/sys/unix"
)

// paceStep is how much of a snapshot is sent to disk at a time.
const paceStep = 1 << 20

// unfinished ends the name of a snapshot's directory until it is whole; it is raft's.
const unfinished = ".tmp"

// paced sends what is written to disk step by step, and leaves as much time
// between the steps as they took. Otherwise the whole snapshot would be sent
// when it is synced at the end, and every sync of the log, which writers wait
// for, would queue behind it. A snapshot that is not finished leaves nothing behind.
type paced struct {
	raft.SnapshotSink
	f             *os.File     // the file behind the sink; nil: it was closed or cancelled
	folder        string       // when it is whole
	allow         func() error // asked at each step
	unpaced       bool         // the kernel cannot send a part of the file
	written, sent int64
	asked         int64 // what was written when allow was asked last
}

// newPaced paces a sink of raft's FileSnapshotStore in dir.
func newPaced(sink raft.SnapshotSink, dir string, allow func() error) (*paced, error) {
	p := &paced{SnapshotSink: sink, folder: filepath.Join(dir, sink.ID()), allow: allow}
	f, err := os.OpenFile(filepath.Join(p.folder+unfinished, snapState), os.O_WRONLY, 0)
	if err != nil {
		return nil, errors.Join(err, sink.Cancel(), os.RemoveAll(p.folder+unfinished))
	}
	p.f = f
	return p, nil
}

// Write implements io.Writer.
func (p *paced) Write(b []byte) (int, error) {
	if p.written-p.asked >= paceStep {
		p.asked = p.written
		if err := p.allow(); err != nil {
			return 0, err
		}
	}
	n, err := p.SnapshotSink.Write(b)
	p.written += int64(n)
	if p.f == nil || p.unpaced || p.written-p.sent < paceStep {
		return n, err
	}
	began := time.Now()
	const wait = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
	if unix.SyncFileRange(int(p.f.Fd()), p.sent, p.written-p.sent, wait) != nil {
		p.unpaced = true // it only spreads the load; the sync at the end counts
		return n, err
	}
	p.sent = p.written
	time.Sleep(min(time.Since(began), 100*time.Millisecond))
	return n, err
}

// Close implements io.Closer.
func (p *paced) Close() error {
	if p.f == nil {
		return nil
	}
	err := p.SnapshotSink.Close()
	if err != nil {
		if _, statErr := os.Stat(p.folder); errors.Is(statErr, os.ErrNotExist) {
			return errors.Join(err, p.abandon())
		}
	}
	return errors.Join(err, p.end())
}

// Cancel implements raft.SnapshotSink.
func (p *paced) Cancel() error {
	if p.f == nil {
		return nil
	}
	// raft's error is about what it could not write, which is not wanted any more.
	_ = p.SnapshotSink.Cancel()
	return p.abandon()
}

// abandon gives the room back. raft does so only where it can write what it has
// buffered, which it cannot on a full disk; and then it does not close the file,
// whose room would stay taken without a name.
func (p *paced) abandon() error {
	err := errors.Join(p.f.Truncate(0), p.end(), os.RemoveAll(p.folder+unfinished))
	if err != nil {
		return fmt.Errorf("remove an unfinished snapshot: %w", err)
	}
	return nil
}

func (p *paced) end() error {
	f := p.f
	p.f = nil
	return f.Close()
}
