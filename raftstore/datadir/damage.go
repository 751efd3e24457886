package datadir

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/raftstore/seglog"
)

// A DamageError names a file of the data directory that does not hold what was
// written to it.
type DamageError struct {
	File   string
	Offset int64 // bytes into the file; -1: not known
	Err    error // what is wrong there
}

// Error names file, offset and fault.
func (e *DamageError) Error() string {
	if e.Offset < 0 {
		return fmt.Sprintf("%s is damaged: %v", e.File, e.Err)
	}
	return fmt.Sprintf("%s is damaged at offset %d: %v", e.File, e.Offset, e.Err)
}

// Unwrap returns the fault.
func (e *DamageError) Unwrap() error { return e.Err }

// AsDamage makes what a log's engine found damaged a *DamageError.
func AsDamage(err error) error {
	if c := new(seglog.CorruptError); errors.As(err, &c) {
		return LogDamage(c)
	}
	return err
}

// LogDamage is the *DamageError of what a log's engine found damaged.
func LogDamage(c *seglog.CorruptError) *DamageError {
	err := errors.New(c.Reason)
	if c.Index > 0 {
		err = fmt.Errorf("entry %d: %s", c.Index, c.Reason)
	}
	return &DamageError{c.File, c.Offset, err}
}

// DamagedDir is the directory in the data directory that holds what was found
// damaged, the latest find only.
const DamagedDir = "damaged"

// MoveAside moves a file or directory of the data directory, which may not exist,
// into DamagedDir, in place of an earlier find.
func MoveAside(dir, name string) error {
	damaged := filepath.Join(dir, DamagedDir)
	from, to := filepath.Join(dir, name), filepath.Join(damaged, filepath.Base(name))
	if _, err := os.Stat(from); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err := os.MkdirAll(damaged, 0o700); err != nil {
		return err
	}
	if err := os.RemoveAll(to); err != nil {
		return err
	}
	return durable.Rename(from, to)
}
