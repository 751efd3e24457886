// Package raftlog is raft's log as a member keeps it: which engine writes it, how
// it changes from one to another, and what it does when the disk is full or an
// entry is damaged. The engines themselves are packages seglog and boltlog.
package raftlog

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/raftstore/boltlog"
	"github.com/clusterd/clusterd/raftstore/datadir"
	"github.com/clusterd/clusterd/raftstore/seglog"
)

// Engine names what keeps raft's log on disk.
type Engine string

// The engines. Members of one store may have different ones.
const (
	Segments Engine = "segments" // package seglog
	Bolt     Engine = "bolt"     // package boltlog: hashicorp/raft-boltdb/v2
)

// Engines are all of them, the default one first.
var Engines = []Engine{Segments, Bolt}

// Log is raft's log on disk. What is in it when it is opened is on disk;
// damage to what was synced is a *seglog.CorruptError.
type Log interface {
	raft.LogStore
	// Mark tells the last append from one that a crash cut short.
	Mark() error
	Size() int64
	Close() error
}

// logFile says which engine keeps the log, and in which directory. It is replaced
// as a whole: that is the moment at which a log changes its engine.
const (
	logFile        = "log.json"
	logFileVersion = 1
	logDir         = "log" // where a log begins its life; later "log.2", and so on in turn
)

// Files are the names in a data directory that a log may have.
var Files = []string{logFile, logDir, logDir + ".2"}

// Record says which engine keeps a data directory's log, and where.
type Record struct {
	Version int    `json:"version"`
	Engine  Engine `json:"engine"`
	Folder  string `json:"folder"`
}

// ReadRecord reads it from a data directory. Directories from before there was one have segments.
func ReadRecord(dir string) (r Record, recorded bool, err error) {
	path := filepath.Join(dir, logFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return Record{logFileVersion, Segments, logDir}, false, nil
	}
	if err != nil {
		return r, false, err
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return r, true, &datadir.DamageError{File: path, Offset: 0, Err: err}
	}
	if r.Version > logFileVersion {
		return r, true, fmt.Errorf("%s: version %d is not known here: it was written by a newer clusterd", path, r.Version)
	}
	if _, err := opener(r.Engine); err != nil || !isLogFolder(r.Folder) {
		return r, true, &datadir.DamageError{File: path, Offset: 0, Err: fmt.Errorf("it names the engine %q and the folder %q", r.Engine, r.Folder)}
	}
	return r, true, nil
}

func writeRecord(dir string, r Record) error {
	r.Version = logFileVersion
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return durable.ReplaceFile(filepath.Join(dir, logFile), append(b, '\n'), 0o600)
}

func isLogFolder(name string) bool {
	return name == logDir || strings.HasPrefix(name, logDir+".") && filepath.Ext(name) != ".json" && filepath.Base(name) == name
}

// Check returns an error for what is no engine.
func (e Engine) Check() error {
	_, err := opener(e)
	return err
}

// opener returns what opens an engine's log. Entries up to index after may
// be damaged where the engine can tell them apart.
func opener(e Engine) (func(path string, after uint64, logger *slog.Logger) (Log, error), error) {
	switch e {
	case Segments:
		return func(path string, _ uint64, logger *slog.Logger) (Log, error) {
			return opened(seglog.Open(path, seglog.Options{Logger: logger}))
		}, nil
	case Bolt:
		return func(path string, after uint64, _ *slog.Logger) (Log, error) {
			return opened(boltlog.Open(path, after))
		}, nil
	}
	return nil, fmt.Errorf("there is no log engine %q, only %q", e, Engines)
}

// opened keeps a nil pointer from becoming an interface that is not nil.
func opened[L Log](l L, err error) (Log, error) {
	if err != nil {
		return nil, err
	}
	return l, nil
}

// Open opens the log of the data directory that the record is of. Entries up to index
// after may be damaged where the engine can tell them apart.
func (r Record) Open(dir string, after uint64, logger *slog.Logger) (Log, error) {
	open, err := opener(r.Engine)
	if err != nil {
		return nil, err
	}
	return open(filepath.Join(dir, r.Folder), after, logger)
}

// removeOtherLogs removes what a crash has left of a conversion: a log that is
// not whole yet, or one that is not needed any more.
func removeOtherLogs(dir string, r Record) error {
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
