// Package autosnapshot takes the snapshots of a schedule: when one is due, how it gets
// to its Target whole or not at all, and which ones are kept. One process at a time
// does it, the leader, and what it has done is in the cluster's store, so that the
// next leader neither takes a snapshot twice nor leaves one out.
//
// Targets are a Folder, and a bucket of an object store (package bucket).
package autosnapshot

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/clusterd/clusterd/raftstore/backup"
	"github.com/clusterd/clusterd/sched/cronjob"
)

// Record is what the cluster knows of its snapshots.
type Record struct {
	// Since is when the schedule began.
	Since time.Time `json:"since"`
	// Slot is the time of the schedule for which the last snapshot was taken.
	Slot time.Time `json:"slot,omitzero"`
	// Last is that snapshot; nil: there is none.
	Last *Snapshot `json:"last,omitempty"`
	// Failure is why the one that is due was not taken yet; nil: none is due.
	Failure *Failure `json:"failure,omitempty"`
}

// Snapshot is one file.
type Snapshot struct {
	Node  string    `json:"node"` // that took it; a file of a directory is on it
	File  string    `json:"file"` // path or URL
	Taken time.Time `json:"taken"`
	Bytes int64     `json:"bytes"`
	// Revision of the store; 0: not known.
	Revision int64 `json:"revision,omitempty"`
}

// Failure is the last try that failed.
type Failure struct {
	Node  string    `json:"node"`
	Slot  time.Time `json:"slot"`
	At    time.Time `json:"at"`
	Tries int       `json:"tries"` // for this slot, in a row
	Error string    `json:"error"`
}

// State keeps the Record.
type State interface {
	// Load returns the Record and its revision; no Record: 0.
	Load(ctx context.Context) (Record, int64, error)
	// Save replaces the Record of that revision; false: another one was saved since.
	Save(ctx context.Context, r Record, revision int64) (bool, error)
}

// Config of a Taker. All is required but KeepAge, Failed and Look.
type Config struct {
	Schedule cron.Schedule
	// Target is where the files go.
	Target Target
	// Keep is how many files of the cluster stay there; 0: all.
	Keep int
	// KeepAge is how old they get; 0: any age. The newest stays.
	KeepAge time.Duration
	// Lock is what seals them.
	Lock backup.Lock
	// Node is this node's name.
	Node  string
	State State
	// Cluster is what names of the cluster's files begin with, and of no other cluster's there.
	Cluster func(ctx context.Context) (string, error)
	// Write writes the archive of the whole state, as of a moment after the call.
	Write func(ctx context.Context, w Writer) error
	// Failed is called when a snapshot failed for the first time, and each time after
	// that for a further slot, and when old snapshots could not be removed. Optional.
	Failed func(message string)
	// Look is how often the clock is looked at, which may be set; default 1 min.
	Look time.Duration
	Log  *slog.Logger
}

// Taker takes snapshots while this node leads.
type Taker struct{ cfg Config }

// New returns a Taker; it starts nothing.
func New(cfg Config) *Taker {
	cfg.Look = cmp.Or(cfg.Look, time.Minute)
	return &Taker{cfg}
}

// Run takes snapshots until ctx ends. What fails is tried again.
func (t *Taker) Run(ctx context.Context) error {
	if err := t.cleanUp(ctx, time.Now()); err != nil && ctx.Err() == nil {
		t.cfg.Log.Warn("what was left of unfinished snapshots stays", "err", err)
	}
	for {
		wait, err := t.pass(ctx, time.Now())
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			t.cfg.Log.Warn("whether a snapshot is due is not known, will look again", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(min(max(wait, time.Second), t.cfg.Look)):
		}
	}
}

// pass takes a snapshot if one is due, and says when to look again at the latest.
func (t *Taker) pass(ctx context.Context, now time.Time) (time.Duration, error) {
	rec, revision, err := t.cfg.State.Load(ctx)
	if err != nil {
		return t.cfg.Look, err
	}
	if rec.Since.IsZero() || rec.Since.After(now) { // the first, or the clock was wrong
		rec.Since = now.UTC()
		_, err := t.cfg.State.Save(ctx, rec, revision)
		return 0, err
	}
	slot, next := t.due(rec, now)
	if slot.IsZero() {
		return next.Sub(now), nil
	}
	if f := rec.Failure; f != nil && f.Node == t.cfg.Node {
		if again := f.At.Add(backOff(f.Tries)); again.After(now) && !f.At.After(now) {
			return again.Sub(now), nil
		}
	}
	if rec.Failure != nil { // a try that failed may have left something
		if err := t.cleanUp(ctx, now); err != nil && ctx.Err() == nil {
			t.cfg.Log.Warn("what was left of unfinished snapshots stays", "err", err)
		}
	}
	taken, err := t.take(ctx, slot)
	if ctx.Err() != nil {
		return 0, nil // this node leads no more
	}
	if err != nil {
		return 0, t.fail(ctx, rec, revision, slot, now, err)
	}
	rec.Slot, rec.Last, rec.Failure = slot.UTC(), taken, nil
	if ok, err := t.cfg.State.Save(ctx, rec, revision); err != nil || !ok {
		return 0, errors.Join(err, ctx.Err()) // the next pass finds the file, and records it
	}
	t.cfg.Log.Info("a snapshot of the cluster was taken", "file", taken.File, "bytes", taken.Bytes, "revision", taken.Revision)
	if err := t.prune(ctx, now); err != nil && ctx.Err() == nil {
		t.cfg.Log.Warn("old snapshots stay", "err", err)
		if t.cfg.Failed != nil {
			t.cfg.Failed(fmt.Sprintf("Old snapshots were not removed: %v", err))
		}
	}
	return 0, nil
}

// due is the time of the schedule for which a snapshot has to be taken, zero if there
// is none, and the next one. Of several that were missed the last counts.
func (t *Taker) due(rec Record, now time.Time) (slot, next time.Time) {
	anchor := rec.Slot
	if anchor.IsZero() || anchor.After(now) { // a clock was wrong
		anchor = rec.Since
	}
	return cronjob.Last(t.cfg.Schedule, anchor, now), cronjob.Next(t.cfg.Schedule, anchor, now)
}

// fail notes a try that failed.
func (t *Taker) fail(ctx context.Context, rec Record, revision int64, slot, now time.Time, why error) error {
	tries := 1
	again := rec.Failure != nil && rec.Failure.Slot.Equal(slot)
	if again {
		tries = rec.Failure.Tries + 1
	}
	rec.Failure = &Failure{Node: t.cfg.Node, Slot: slot.UTC(), At: now.UTC(), Tries: tries, Error: why.Error()}
	t.cfg.Log.Error("the snapshot that is due was not taken, will retry", "slot", slot, "tries", tries, "after", backOff(tries), "err", why)
	if !again && t.cfg.Failed != nil {
		t.cfg.Failed(fmt.Sprintf("The snapshot of %s was not taken: %v", slot.UTC().Format(time.RFC3339), why))
	}
	_, err := t.cfg.State.Save(ctx, rec, revision)
	return err
}

// backOff is how long to wait after so many tries that failed.
func backOff(tries int) time.Duration {
	return min(time.Minute*time.Duration(math.Pow(2, float64(min(tries, 10)-1))), 30*time.Minute)
}
