// Package state opens what raft's promises and the keyspace are made of: log, term
// and vote, snapshots. All of it is looked at. What is damaged is repaired from
// what is there, else set aside to be fetched from other members, else nothing is
// opened: it is never served. It knows no Store.
package state

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/datadir"
	"github.com/clusterd/clusterd/raftstore/raftlog"
	"github.com/clusterd/clusterd/raftstore/raftside"
)

// files are what raft's promises and the keyspace are made of.
var files = slices.Concat([]string{datadir.VoteFileV1, datadir.SnapshotsDir}, raftlog.Files, datadir.VoteFiles)

// Options say how to open a member's state.
type Options struct {
	Dir    string // the data directory; it is there
	ID     string // this member's
	Engine raftlog.Engine
	Logger *slog.Logger
	// Damaged is called for every damage that is found.
	Damaged func(err error)
	Now     func() time.Time
}

// State is open. Close it.
type State struct {
	Log       raftlog.Log
	Stable    *datadir.Stable
	Snapshots *datadir.Snapshots
	// Had says whether there was any when it was opened, or is to come back.
	Had bool
	// Lost says that the member takes part in nothing until the leader has taken it
	// out of the membership, see Rejoined.
	Lost bool

	opts  Options
	noted []Member // in membersFile
}

// Open opens the state of a member. The error is a *datadir.DamageError where it
// is damaged and no other member has it.
func Open(o Options) (*State, error) {
	s := &State{opts: o}
	if err := s.open(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *State) open() error {
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
	if damage := new(datadir.DamageError); errors.As(err, &damage) {
		if err := s.Close(); err != nil {
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
	s.Lost = a != nil
	if s.Had, err = raft.HasExistingState(s.Log, s.Stable, s.Snapshots); err != nil {
		return err
	}
	s.Had = s.Had || s.Lost
	return nil
}

func (s *State) openFiles() (err error) {
	var repaired error
	s.Stable, repaired, err = datadir.OpenStable(s.opts.Dir)
	if repaired != nil {
		s.foundDamage(repaired, "one of two copies of term and vote was damaged, and was made good from the other")
	}
	if err != nil {
		return err
	}
	snapshots, err := datadir.CheckSnapshots(s.opts.Dir)
	if err != nil {
		return err
	}
	for _, damage := range snapshots.Damaged {
		s.foundDamage(damage, "a snapshot is damaged and will not be used")
	}
	s.Log, err = raftlog.Open(raftlog.Options{Dir: s.opts.Dir, Engine: s.opts.Engine, Snapshot: snapshots.Whole, Logger: s.opts.Logger, Found: s.foundDamage})
	if err != nil {
		return err
	}
	if err := s.reaches(snapshots); err != nil {
		return err // all of it stays where it is: to judge it once more comes to the same
	}
	if err := snapshots.MoveAside(s.opts.Dir); err != nil {
		return err
	}
	if s.Snapshots, err = datadir.OpenSnapshots(s.opts.Dir, raftside.NewLogger(s.opts.Logger)); err != nil {
		return err
	}
	return s.Snapshots.RemoveUnfinished()
}

// reaches returns what is damaged if the newest whole snapshot and the log do not
// make up for it: this member may have acknowledged all that was in it.
func (s *State) reaches(snapshots *datadir.Check) error {
	first, err := s.Log.FirstIndex()
	if err != nil {
		return err
	}
	last, err := s.Log.LastIndex()
	if err != nil {
		return err
	}
	whole := snapshots.Whole
	switch gap := first > whole+1; {
	case !gap && max(whole, last) >= snapshots.Reached:
		return nil
	case len(snapshots.Damaged) > 0:
		damage := *snapshots.Damaged[0]
		damage.Err = fmt.Errorf("%w; the newest snapshot that is whole is of index %d, and the log holds %d to %d (0: nothing), where the damaged one had all up to %d", damage.Err, whole, first, last, snapshots.Reached)
		return &damage
	default:
		return &datadir.DamageError{File: s.path(datadir.SnapshotsDir), Offset: -1, Err: fmt.Errorf("the newest snapshot is of index %d, and the log begins at %d", whole, first)}
	}
}

// checkComplete finds that something is gone from the directory of a member that
// had all of it.
func (s *State) checkComplete() error {
	if _, err := os.Stat(s.path(membersFile)); errors.Is(err, os.ErrNotExist) {
		return nil // it was none yet
	}
	r, _, err := raftlog.ReadRecord(s.opts.Dir)
	if err != nil {
		return err
	}
	for _, names := range [][]string{append([]string{datadir.VoteFileV1}, datadir.VoteFiles...), {r.Folder}} {
		there, err := s.anyOf(names)
		if err != nil {
			return err
		}
		if !there {
			return &datadir.DamageError{File: s.path(names[len(names)-1]), Offset: -1, Err: errors.New("it is gone")}
		}
	}
	return nil
}

func (s *State) anyOf(names []string) (bool, error) {
	for _, name := range names {
		if _, err := os.Stat(s.path(name)); !errors.Is(err, os.ErrNotExist) {
			return err == nil, err
		}
	}
	return false, nil
}

// Close closes the files.
func (s *State) Close() error {
	var errs []error
	if s.Log != nil {
		errs = append(errs, s.Log.Close())
	}
	if s.Stable != nil {
		errs = append(errs, s.Stable.Close())
	}
	s.Log, s.Stable = nil, nil
	return errors.Join(errs...)
}
