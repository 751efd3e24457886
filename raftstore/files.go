package raftstore

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/datadir"
	"github.com/clusterd/clusterd/raftstore/raftlog"
	"github.com/clusterd/clusterd/raftstore/raftside"
)

// stateFiles are what raft's promises and the keyspace are made of.
var stateFiles = slices.Concat([]string{datadir.VoteFileV1, datadir.SnapshotsDir}, raftlog.Files, datadir.VoteFiles)

// openState opens raft's files and looks at all of what they hold. What is
// damaged is repaired from what this member has, else set aside to be fetched
// from others, else nothing is opened: it is never served.
func (s *Store) openState() error {
	a, err := s.readLostState()
	if err != nil {
		return err
	}
	if a != nil && !a.Aside {
		if err := s.setAside(a); err != nil {
			return err
		}
	}
	if a == nil {
		err = s.checkComplete()
	}
	if err == nil {
		err = s.openFiles()
	}
	if damage := new(DamageError); errors.As(err, &damage) {
		if err := s.closeFiles(); err != nil {
			return err
		}
		s.foundDamage(damage, "the store's state is damaged")
		if why := s.healable(); why != nil {
			return fmt.Errorf("%w; nothing was changed, and it cannot be fetched from others: %w", damage, why)
		}
		if err := s.forget(damage); err != nil {
			return fmt.Errorf("set the damaged state aside: %w", err)
		}
		a = &lostState{}
		err = s.openFiles()
	}
	if err != nil {
		return err
	}
	s.lost = a != nil
	if s.hadState, err = raft.HasExistingState(s.log, s.stable, s.snapshots); err != nil {
		return err
	}
	s.hadState = s.hadState || a != nil
	return nil
}

func (s *Store) openFiles() (err error) {
	var repaired error
	s.stable, repaired, err = datadir.OpenStable(s.cfg.Dir)
	if repaired != nil {
		s.foundDamage(repaired, "one of two copies of term and vote was damaged, and was made good from the other")
	}
	if err != nil {
		return err
	}
	index, damage := datadir.CheckSnapshots(s.cfg.Dir, func(err error) {
		s.foundDamage(err, "a snapshot is damaged and will not be used", "kept", s.path(datadir.DamagedDir))
	})
	if damage != nil && !errors.As(damage, new(*DamageError)) {
		return damage
	}
	s.log, err = raftlog.Open(raftlog.Options{Dir: s.cfg.Dir, Engine: s.cfg.LogEngine, Snapshot: index, Logger: s.cfg.Logger, Found: s.foundDamage})
	if err != nil {
		return err
	}
	if s.snapshots, err = datadir.OpenSnapshots(s.cfg.Dir, raftside.NewLogger(s.cfg.Logger)); err != nil {
		return err
	}
	s.stable.Failed = func(err error) { s.fail(err, false) }
	first, err := s.log.FirstIndex()
	if err != nil || first <= index+1 && (damage == nil || index > 0 || first == 1) {
		return err
	}
	if damage == nil {
		damage = &DamageError{File: s.path(datadir.SnapshotsDir), Offset: -1, Err: fmt.Errorf("the newest snapshot is of index %d, and the log begins at %d", index, first)}
	}
	return damage
}

// checkComplete finds that something is gone from the folder of a member that
// had all of it.
func (s *Store) checkComplete() error {
	if _, err := os.Stat(s.path(membersFile)); errors.Is(err, os.ErrNotExist) {
		return nil // it was none yet
	}
	r, _, err := raftlog.ReadRecord(s.cfg.Dir)
	if err != nil {
		return err
	}
	for _, names := range [][]string{append([]string{datadir.VoteFileV1}, datadir.VoteFiles...), {r.Folder}} {
		there, err := s.anyOf(names)
		if err != nil {
			return err
		}
		if !there {
			return &DamageError{File: s.path(names[len(names)-1]), Offset: -1, Err: errors.New("it is gone")}
		}
	}
	return nil
}

func (s *Store) anyOf(names []string) (bool, error) {
	for _, name := range names {
		if _, err := os.Stat(s.path(name)); !errors.Is(err, os.ErrNotExist) {
			return err == nil, err
		}
	}
	return false, nil
}

func (s *Store) closeFiles() error {
	var errs []error
	if s.log != nil {
		errs = append(errs, s.log.Close())
	}
	if s.stable != nil {
		errs = append(errs, s.stable.Close())
	}
	s.log, s.stable = nil, nil
	return errors.Join(errs...)
}
