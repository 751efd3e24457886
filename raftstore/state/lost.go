package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/raftstore/datadir"
)

// Member is one member of the store's raft configuration.
type Member struct {
	ID    string `json:"id"`
	Voter bool   `json:"voter"`
}

// foundDamage tells of it.
func (s *State) foundDamage(err error, what string, args ...any) {
	s.opts.Logger.Error(what, append([]any{"err", err}, args...)...)
	s.opts.Damaged(err)
}

// Names in the data directory that have to do with damage.
const (
	// lostStateFile exists while this member must not take part, see lostState.
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

func (s *State) readLostState() (*lostState, error) {
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
// that a crash in between cannot make a voter of an empty directory.
func (s *State) forget(reason error) error {
	a := lostState{Since: s.opts.Now().UTC(), Reason: reason.Error()}
	if err := s.writeJSON(lostStateFile, a); err != nil {
		return err
	}
	return s.setAside(&a)
}

// setAside moves the state away, all of it: what is left of a log is no log.
func (s *State) setAside(a *lostState) error {
	for _, name := range files {
		if err := s.moveAside(name); err != nil {
			return err
		}
	}
	a.Aside = true
	if err := s.writeJSON(lostStateFile, a); err != nil {
		return err
	}
	s.opts.Logger.Error("the store's state was set aside, it will be fetched from the other members",
		"reason", a.Reason, "kept", s.path(datadir.DamagedDir))
	return nil
}

func (s *State) moveAside(name string) error { return datadir.MoveAside(s.opts.Dir, name) }

// healable returns nil if other voters are known that can restore this
// member.
func (s *State) healable() error {
	var ms []Member
	b, err := os.ReadFile(s.path(membersFile))
	if err == nil {
		err = json.Unmarshal(b, &ms)
	}
	if err != nil {
		return fmt.Errorf("the other members are not known (%w)", err)
	}
	if !slices.ContainsFunc(ms, func(m Member) bool { return m.Voter && m.ID != s.opts.ID }) {
		return errors.New("there is no other voter that has a copy")
	}
	return nil
}

// NoteMembers writes the membership down when it has changed. It is called from
// one goroutine.
func (s *State) NoteMembers(ms []Member) error {
	if len(ms) == 0 || slices.Equal(ms, s.noted) {
		return nil
	}
	if err := s.writeJSON(membersFile, ms); err != nil {
		return err
	}
	s.noted = ms
	return nil
}

// MarkCorrupt notes that the state is wrong: at the next start it is set aside, to
// be fetched from the other members. why is nil if it was noted, or says why it
// cannot be fetched.
func (s *State) MarkCorrupt(reason error) (why, err error) {
	if why := s.healable(); why != nil {
		return why, nil
	}
	return nil, s.writeJSON(lostStateFile, lostState{Since: s.opts.Now().UTC(), Reason: reason.Error()})
}

// Rejoined notes that the leader has taken this member out of the membership:
// from here on it is a machine like one that never was a member.
func (s *State) Rejoined() error {
	return errors.Join(os.Remove(s.path(lostStateFile)), durable.SyncDir(s.opts.Dir))
}

func (s *State) path(name string) string { return filepath.Join(s.opts.Dir, name) }

// writeJSON replaces a file of the data directory: after a crash it is the old
// one or the new one.
func (s *State) writeJSON(name string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return durable.ReplaceFile(s.path(name), append(b, '\n'), 0o600)
}
