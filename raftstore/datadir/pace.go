package datadir

import (
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft"
	"golang.org/x/sys/unix"
)

// paceStep is how much of a snapshot is sent to disk at a time.
const paceStep = 1 << 20

// paced sends what is written to disk step by step, and leaves as much time
// between the steps as they took. Otherwise the whole snapshot would be sent
// when it is synced at the end, and every sync of the log, which writers wait
// for, would queue behind it.
type paced struct {
	raft.SnapshotSink
	f             *os.File // the file behind the sink; nil: it goes as fast as it can
	written, sent int64
}

// newPaced paces a sink of raft's FileSnapshotStore in dir.
func newPaced(sink raft.SnapshotSink, dir string) *paced {
	p := &paced{SnapshotSink: sink}
	// raft's name of a snapshot that is not finished.
	p.f, _ = os.OpenFile(filepath.Join(dir, sink.ID()+".tmp", snapState), os.O_WRONLY, 0)
	return p
}

// Write implements io.Writer.
func (p *paced) Write(b []byte) (int, error) {
	n, err := p.SnapshotSink.Write(b)
	p.written += int64(n)
	if p.f == nil || p.written-p.sent < paceStep {
		return n, err
	}
	began := time.Now()
	const wait = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
	if unix.SyncFileRange(int(p.f.Fd()), p.sent, p.written-p.sent, wait) != nil {
		p.end() // it only spreads the load; the sync at the end counts
		return n, err
	}
	p.sent = p.written
	time.Sleep(min(time.Since(began), 100*time.Millisecond))
	return n, err
}

func (p *paced) end() {
	if p.f != nil {
		_ = p.f.Close()
		p.f = nil
	}
}

// Close implements io.Closer.
func (p *paced) Close() error {
	p.end()
	return p.SnapshotSink.Close()
}

// Cancel implements raft.SnapshotSink.
func (p *paced) Cancel() error {
	p.end()
	return p.SnapshotSink.Cancel()
}
