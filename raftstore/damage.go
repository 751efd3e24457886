package raftstore

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/clusterd/clusterd/raftstore/datadir"
)

// foundDamage tells of it.
func (s *Store) foundDamage(err error, what string, args ...any) {
	s.cfg.Logger.Error(what, append([]any{"err", err}, args...)...)
	if fn := s.cfg.Events.Damaged; fn != nil {
		fn(err)
	}
}

// Names in the data folder that have to do with damage.
const (
	// lostStateFile is there while this member must not be believed, see lostState.
	lostStateFile = "amnesia.json"
	// membersFile holds the membership last seen. Nothing but the question
	// whether damage can be healed from others rests on it.
	membersFile = "members.json"
)

// lostState says that this member has lost what it had promised: entries it had
// acknowledged, or votes it had given. As long as the file is there it takes
// part in nothing, until the leader has taken it out of the membership.
type lostState struct {
	Since  time.Time `json:"since"`
	Reason string    `json:"reason"`
	// Aside is true once the old state has been moved away.
	Aside bool `json:"aside"`
}

func (s *Store) readLostState() (*lostState, error) {
	b, err := os.ReadFile(s.path(lostStateFile))
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, err
	}
	a := &lostState{}
	if err := json.Unmarshal(b, a); err != nil {
		// Only its being there counts.
		a.Reason = fmt.Sprintf("%s could not be read: %v", lostStateFile, err)
	}
	return a, nil
}

// forget makes this member one that has lost its state: it is noted first, so
// that a crash in between cannot make a voter of an empty folder.
func (s *Store) forget(reason error) error {
	a := lostState{Since: s.cfg.Now().UTC(), Reason: reason.Error()}
	if err := s.writeJSON(lostStateFile, a); err != nil {
		return err
	}
	return s.setAside(&a)
}

// setAside moves the state away, all of it: what is left of a log is no log.
func (s *Store) setAside(a *lostState) error {
	for _, name := range stateFiles {
		if err := s.moveAside(name); err != nil {
			return err
		}
	}
	a.Aside = true
	if err := s.writeJSON(lostStateFile, a); err != nil {
		return err
	}
	s.cfg.Logger.Error("the store's state was set aside, it will be fetched from the other members",
		"reason", a.Reason, "kept", s.path(datadir.DamagedDir))
	return nil
}

func (s *Store) moveAside(name string) error { return datadir.MoveAside(s.cfg.Dir, name) }

// healable returns nil if other voters are known that can restore this
// member.
func (s *Store) healable() error {
	var ms []Member
	b, err := os.ReadFile(s.path(membersFile))
	if err == nil {
		err = json.Unmarshal(b, &ms)
	}
	if err != nil {
		return fmt.Errorf("the other members are not known (%w)", err)
	}
	if !slices.ContainsFunc(ms, func(m Member) bool { return m.Voter && m.ID != s.cfg.ID }) {
		return errors.New("there is no other voter that has a copy")
	}
	return nil
}

// noteMembers writes the membership down when it has changed.
func (s *Store) noteMembers() {
	ms, err := s.Members()
	if err != nil || len(ms) == 0 || slices.Equal(ms, s.noted) {
		return
	}
	if err := s.writeJSON(membersFile, ms); err != nil {
		s.cfg.Logger.Warn("the members could not be written down", "err", err)
		return
	}
	s.noted = ms
}

func (s *Store) path(name string) string { return filepath.Join(s.cfg.Dir, name) }

// writeJSON replaces a file of the data folder: after a crash it is the old
// one or the new one.
func (s *Store) writeJSON(name string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return datadir.ReplaceFile(s.path(name), append(b, '\n'))
}
