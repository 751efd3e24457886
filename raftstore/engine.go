package raftstore

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/boltlog"
	"github.com/clusterd/clusterd/raftstore/datadir"
	"github.com/clusterd/clusterd/raftstore/seglog"
)

// LogEngine names what keeps raft's log on disk.
type LogEngine string

// The engines. Members of one store may have different ones.
const (
	LogSegments LogEngine = "segments" // package seglog
	LogBolt     LogEngine = "bolt"     // package boltlog: hashicorp/raft-boltdb/v2
)

// LogEngines are all of them, the default one first.
var LogEngines = []LogEngine{LogSegments, LogBolt}

// raftLog is raft's log on disk. What is in it when it is opened is on disk;
// damage to what was synced is a *seglog.CorruptError.
type raftLog interface {
	raft.LogStore
	// Mark tells the last append from one that a crash cut short.
	Mark() error
	Size() int64
	Close() error
}

// logFile says which engine keeps the log, and in which folder. It is replaced
// as a whole: that is the moment at which a log changes its engine.
const (
	logFile        = "log.json"
	logFileVersion = 1
	logDir         = "log" // where a log begins its life; later "log.2", and so on in turn
)

type logRecord struct {
	Version int       `json:"version"`
	Engine  LogEngine `json:"engine"`
	Folder  string    `json:"folder"`
}

// readLogRecord reads logFile. Folders from before there was one have segments.
func readLogRecord(dir string) (r logRecord, recorded bool, err error) {
	path := filepath.Join(dir, logFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return logRecord{logFileVersion, LogSegments, logDir}, false, nil
	}
	if err != nil {
		return r, false, err
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return r, true, &DamageError{File: path, Offset: 0, Err: err}
	}
	if r.Version > logFileVersion {
		return r, true, fmt.Errorf("%s: version %d is not known here: it was written by a newer clusterd", path, r.Version)
	}
	if _, err := openLogOf(r.Engine); err != nil || !isLogFolder(r.Folder) {
		return r, true, &DamageError{File: path, Offset: 0, Err: fmt.Errorf("it names the engine %q and the folder %q", r.Engine, r.Folder)}
	}
	return r, true, nil
}

func writeLogRecord(dir string, r logRecord) error {
	r.Version = logFileVersion
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return datadir.ReplaceFile(filepath.Join(dir, logFile), append(b, '\n'))
}

func isLogFolder(name string) bool {
	return name == logDir || strings.HasPrefix(name, logDir+".") && filepath.Ext(name) != ".json" && filepath.Base(name) == name
}

// openLogOf returns what opens an engine's log. Entries up to index after may
// be damaged where the engine can tell them apart.
func openLogOf(e LogEngine) (func(path string, after uint64, logger *slog.Logger) (raftLog, error), error) {
	switch e {
	case LogSegments:
		return func(path string, _ uint64, logger *slog.Logger) (raftLog, error) {
			return opened(seglog.Open(path, seglog.Options{Logger: logger}))
		}, nil
	case LogBolt:
		return func(path string, after uint64, _ *slog.Logger) (raftLog, error) {
			return opened(boltlog.Open(path, after))
		}, nil
	}
	return nil, fmt.Errorf("%w: there is no log engine %q, only %q", ErrInvalid, e, LogEngines)
}

// opened keeps a nil pointer from becoming an interface that is not nil.
func opened[L raftLog](l L, err error) (raftLog, error) {
	if err != nil {
		return nil, err
	}
	return l, nil
}

func (r logRecord) open(dir string, after uint64, logger *slog.Logger) (raftLog, error) {
	open, err := openLogOf(r.Engine)
	if err != nil {
		return nil, err
	}
	return open(filepath.Join(dir, r.Folder), after, logger)
}

// removeOtherLogs removes what a crash has left of a conversion: a log that is
// not whole yet, or one that is needed no more.
func removeOtherLogs(dir string, r logRecord) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() && isLogFolder(e.Name()) && e.Name() != r.Folder {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// convertLog copies the entries after an index into a new log of another
// engine, and makes that one the member's. old is what opened is of. A crash at
// any moment leaves the one or the other, whole; at is told of the moments, and
// stops it with an error (for tests; may be nil).
func convertLog(dir string, old logRecord, from raftLog, to LogEngine, after uint64, logger *slog.Logger, at func(moment string) error) (r logRecord, err error) {
	if at == nil {
		at = func(string) error { return nil }
	}
	r = logRecord{logFileVersion, to, logDir}
	if old.Folder == logDir {
		r.Folder = logDir + ".2"
	}
	if err := os.RemoveAll(filepath.Join(dir, r.Folder)); err != nil {
		return old, err
	}
	l, err := r.open(dir, 0, logger)
	if err != nil {
		return old, err
	}
	if err := errors.Join(copyLog(l, from, after, at), l.Close()); err != nil {
		return old, fmt.Errorf("copy the log from %s to %s: %w", old.Engine, to, err)
	}
	if err := errors.Join(datadir.SyncDir(dir), at("copied")); err != nil {
		return old, err
	}
	if err := writeLogRecord(dir, r); err != nil {
		return old, err
	}
	return r, at("recorded")
}

// copyBytes is how much of a log is copied at a time.
const copyBytes = 1 << 20

func copyLog(to, from raftLog, after uint64, at func(string) error) error {
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

// openLog opens the log, and converts it if it is to be kept otherwise. Damage
// before the newest snapshot is not needed any more: what holds it is set
// aside.
func (s *Store) openLog(snapshot uint64) error {
	r, recorded, err := readLogRecord(s.cfg.Dir)
	if err != nil {
		return err
	}
	if _, err := os.Stat(s.path(r.Folder)); !recorded && errors.Is(err, os.ErrNotExist) {
		r.Engine = s.cfg.LogEngine // there is no log yet
	}
	if !recorded {
		if err := writeLogRecord(s.cfg.Dir, r); err != nil {
			return err
		}
	}
	if err := removeOtherLogs(s.cfg.Dir, r); err != nil {
		return err
	}
	s.log, err = r.open(s.cfg.Dir, 0, s.cfg.Logger)
	corrupt := new(seglog.CorruptError)
	for errors.As(err, &corrupt) {
		if err = s.withoutOld(&r, corrupt, snapshot); err != nil {
			return err
		}
		s.log, err = r.open(s.cfg.Dir, 0, s.cfg.Logger)
	}
	if err != nil || r.Engine == s.cfg.LogEngine {
		return err
	}
	s.cfg.Logger.Info("converting the log", "from", r.Engine, "to", s.cfg.LogEngine)
	next, err := convertLog(s.cfg.Dir, r, s.log, s.cfg.LogEngine, 0, s.cfg.Logger, nil)
	if isNoSpace(err) {
		s.cfg.Logger.Error("there is no room to convert the log: it stays as it is until the next start", "err", err)
		return removeOtherLogs(s.cfg.Dir, r)
	}
	if err != nil {
		return err
	}
	err = s.log.Close()
	s.log = nil
	if err = errors.Join(err, removeOtherLogs(s.cfg.Dir, next)); err != nil {
		return err
	}
	s.log, err = next.open(s.cfg.Dir, 0, s.cfg.Logger)
	return err
}

// withoutOld sets aside damaged entries that the snapshot covers. It returns
// the damage if there is other damage, too.
func (s *Store) withoutOld(r *logRecord, corrupt *seglog.CorruptError, snapshot uint64) error {
	damage := datadir.LogDamage(corrupt)
	if r.Engine == LogSegments {
		old, ok := s.segmentsThrough(r.Folder, corrupt.File, snapshot)
		if !ok {
			return damage
		}
		s.foundDamage(damage, "log entries that a snapshot has made needless are damaged, and were set aside", "kept", s.path(datadir.DamagedDir))
		for _, name := range old {
			if err := s.moveAside(filepath.Join(r.Folder, name)); err != nil {
				return err
			}
		}
		return nil
	}
	if corrupt.Index == 0 || corrupt.Index > snapshot {
		return damage
	}
	l, err := r.open(s.cfg.Dir, snapshot, s.cfg.Logger)
	if err != nil {
		return damage
	}
	s.foundDamage(damage, "log entries that a snapshot has made needless are damaged: the log was written anew without them", "kept", s.path(datadir.DamagedDir))
	next, err := convertLog(s.cfg.Dir, *r, l, r.Engine, snapshot, s.cfg.Logger, nil)
	if err = errors.Join(err, l.Close()); err != nil {
		return err
	}
	err = s.moveAside(r.Folder)
	*r = next
	return err
}
