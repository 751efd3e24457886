package raftlog

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/raftstore/datadir"
	"github.com/clusterd/clusterd/raftstore/disk"
	"github.com/clusterd/clusterd/raftstore/seglog"
)

// Options say how to open a log.
type Options struct {
	Dir      string // the data directory
	Engine   Engine // what is to keep it
	Snapshot uint64 // index of the newest snapshot: no entry up to it is needed
	Logger   *slog.Logger
	// Found is called with damage that nothing is lost by, what it is, and keys
	// and values for the log.
	Found func(damage error, what string, args ...any)
}

// Open opens the log, and converts it if it is to be kept otherwise. Damage
// before the newest snapshot is not needed any more: what holds it is set
// aside. Close it.
func Open(o Options) (Log, error) {
	r, recorded, err := ReadRecord(o.Dir)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(filepath.Join(o.Dir, r.Folder)); !recorded && errors.Is(err, os.ErrNotExist) {
		r.Engine = o.Engine // there is no log yet
	}
	if !recorded {
		if err := writeRecord(o.Dir, r); err != nil {
			return nil, err
		}
	}
	if err := removeOtherLogs(o.Dir, r); err != nil {
		return nil, err
	}
	l, err := r.Open(o.Dir, 0, o.Logger)
	corrupt := new(seglog.CorruptError)
	for errors.As(err, &corrupt) {
		if err = o.withoutOld(&r, corrupt); err != nil {
			return nil, err
		}
		l, err = r.Open(o.Dir, 0, o.Logger)
	}
	if err != nil || r.Engine == o.Engine {
		return l, err
	}
	o.Logger.Info("converting the log", "from", r.Engine, "to", o.Engine)
	next, err := convert(o.Dir, r, l, o.Engine, 0, o.Logger, nil)
	if disk.Full(err) {
		o.Logger.Error("there is no room to convert the log: it stays as it is until the next start", "err", err)
		if err := removeOtherLogs(o.Dir, r); err != nil {
			return nil, errors.Join(err, l.Close())
		}
		return l, nil
	}
	if err = errors.Join(err, l.Close()); err != nil {
		return nil, err
	}
	if err := removeOtherLogs(o.Dir, next); err != nil {
		return nil, err
	}
	return next.Open(o.Dir, 0, o.Logger)
}

// withoutOld sets aside damaged entries that the snapshot covers. It returns
// the damage if there is other damage, too.
func (o *Options) withoutOld(r *Record, corrupt *seglog.CorruptError) error {
	damage := datadir.LogDamage(corrupt)
	if r.Engine == Segments {
		old, ok := segmentsThrough(filepath.Join(o.Dir, r.Folder), corrupt.File, o.Snapshot)
		if !ok {
			return damage
		}
		o.Found(damage, "log entries that a snapshot has made needless are damaged, and were set aside", "kept", filepath.Join(o.Dir, datadir.DamagedDir))
		for _, name := range old {
			if err := datadir.MoveAside(o.Dir, filepath.Join(r.Folder, name)); err != nil {
				return err
			}
		}
		return nil
	}
	if corrupt.Index == 0 || corrupt.Index > o.Snapshot {
		return damage
	}
	l, err := r.Open(o.Dir, o.Snapshot, o.Logger)
	if err != nil {
		return damage
	}
	o.Found(damage, "log entries that a snapshot has made needless are damaged: the log was rewritten without them", "kept", filepath.Join(o.Dir, datadir.DamagedDir))
	next, err := convert(o.Dir, *r, l, r.Engine, o.Snapshot, o.Logger, nil)
	if err = errors.Join(err, l.Close()); err != nil {
		return err
	}
	err = datadir.MoveAside(o.Dir, r.Folder)
	*r = next
	return err
}

// segmentsThrough names the segments of a directory up to the given one, if the file after
// it begins at or before the first entry that the snapshot does not cover.
func segmentsThrough(folder, file string, snapshot uint64) (old []string, ok bool) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, false
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".seg") {
			names = append(names, e.Name())
		}
	}
	sort.Strings(names)
	i := sort.SearchStrings(names, filepath.Base(file))
	if i+1 >= len(names) {
		return nil, false
	}
	next, err := strconv.ParseUint(strings.TrimSuffix(names[i+1], ".seg"), 16, 64)
	return names[:i+1], err == nil && next <= snapshot+1
}

// convert copies the entries after an index into a new log of another
// engine, and makes that one the member's. old is what opened is of. A crash at
// any moment leaves the one or the other, whole; at is called at each of the moments, and
// stops it with an error (for tests; may be nil).
func convert(dir string, old Record, from Log, to Engine, after uint64, logger *slog.Logger, at func(moment string) error) (r Record, err error) {
	if at == nil {
		at = func(string) error { return nil }
	}
	r = Record{logFileVersion, to, logDir}
	if old.Folder == logDir {
		r.Folder = logDir + ".2"
	}
	if err := os.RemoveAll(filepath.Join(dir, r.Folder)); err != nil {
		return old, err
	}
	l, err := r.Open(dir, 0, logger)
	if err != nil {
		return old, err
	}
	if err := errors.Join(copyLog(l, from, after, at), l.Close()); err != nil {
		return old, fmt.Errorf("copy the log from %s to %s: %w", old.Engine, to, err)
	}
	if err := errors.Join(durable.SyncDir(dir), at("copied")); err != nil {
		return old, err
	}
	if err := writeRecord(dir, r); err != nil {
		return old, err
	}
	return r, at("recorded")
}

// copyBytes is how much of a log is copied at a time.
const copyBytes = 1 << 20

func copyLog(to, from Log, after uint64, at func(string) error) error {
	first, err := from.FirstIndex()
	if err != nil {
		return err
	}
	last, err := from.LastIndex()
	if err != nil || last == 0 {
		return err
	}
	var batch []*raft.Log
	size := 0
	for i := max(first, after+1); i <= last; i++ {
		e := &raft.Log{}
		if err := from.GetLog(i, e); err != nil {
			return err
		}
		batch = append(batch, e)
		if size += len(e.Data); size < copyBytes && i < last {
			continue
		}
		if err := to.StoreLogs(batch); err != nil {
			return err
		}
		if err := at("copying"); err != nil {
			return err
		}
		batch, size = nil, 0
	}
	return nil
}
