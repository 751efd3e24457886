package releases

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/clusterd/clusterd/durable"
)

// Trial is a program that was put in place and is not confirmed yet. It ends in
// one of three ways: Confirm; Back, by whoever has seen that the node is not well; or
// it is taken back by the guard, a process of the program before, or by the program's
// own second start, should the guard be gone.
type Trial struct {
	Version  string        `json:"version"` // on trial
	From     string        `json:"from"`    // the version before
	Args     []string      `json:"args"`    // the command line that starts the node
	Limit    time.Duration `json:"limit"`
	Began    time.Time     `json:"began"`
	Deadline time.Time     `json:"deadline"`
	// UpWithin and UpBy are the same for being up, which is less: the node's parts work.
	UpWithin time.Duration `json:"upWithin"`
	UpBy     time.Time     `json:"upBy"`
	Up       bool          `json:"up,omitempty"`
	// Starts is how often the program on trial has begun.
	Starts int `json:"starts"`
	// Orderly: it was stopped by somebody who wanted it to stop.
	Orderly bool `json:"orderly,omitempty"`
}

// late says why its time is over; "": it is not. It was watched for that long, which
// counts where the machine's clock was set back since.
func (t Trial) late(now time.Time, watched time.Duration) string {
	switch {
	case !t.Up && (now.After(t.UpBy) || watched > t.UpWithin):
		return fmt.Sprintf("it was not up within %s", t.UpWithin)
	case now.After(t.Deadline) || watched > t.Limit:
		return fmt.Sprintf("it was not confirmed within %s", t.Limit)
	}
	return ""
}

// Start is called by every start of a node, with the version of the program that
// starts. It returns true when the program was on trial and was taken back, so that
// the installed program is to be started instead of this one; and the trial that this
// program is on, which needs a guard.
func (p Place) Start(version string, now time.Time) (back bool, on *Trial, err error) {
	if _, err := os.Stat(p.state("trial.json")); errors.Is(err, fs.ErrNotExist) {
		return false, nil, nil
	}
	err = p.locked(func() error {
		t, err := p.Trial()
		if err != nil || t == nil {
			return err
		}
		switch why := ""; {
		case t.Version != version:
			// Somebody has installed another program, or was killed while he took it back.
			return p.over(*t, fmt.Sprintf("version %s was started instead", version), now)
		case t.Starts > 0 && !t.Orderly:
			why = "it ended by itself and nothing had taken it back"
			fallthrough
		case t.late(now, 0) != "":
			if why == "" {
				why = t.late(now, 0)
			}
			back = true
			return p.takeBack(*t, why, now)
		}
		t.Starts++
		t.Orderly = false
		on = t
		return p.write("trial.json", *t)
	})
	return back, on, err
}

// Stopping notes that the node ends because it was asked to: that it ends says
// nothing of the program on trial.
func (p Place) Stopping() error {
	if _, err := os.Stat(p.state("trial.json")); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return p.locked(func() error {
		t, err := p.Trial()
		if err != nil || t == nil {
			return err
		}
		t.Orderly = true
		return p.write("trial.json", *t)
	})
}

// Up notes that the node's parts work with the version that is on trial, and reports
// whether one is.
func (p Place) Up(version string) (bool, error) {
	on := false
	err := p.locked(func() error {
		t, err := p.Trial()
		if err != nil || t == nil || t.Version != version {
			return err
		}
		t.Up, on = true, true
		return p.write("trial.json", *t)
	})
	return on, err
}

// Confirm ends the trial of that version: it stays. Its clusterctl takes the place of
// the one beside the program, if there is one.
func (p Place) Confirm(version string) error {
	return p.locked(func() error {
		t, err := p.Trial()
		if err != nil {
			return err
		}
		if t == nil {
			return nil // it was confirmed already
		}
		if t.Version != version {
			return refusedf("version %s is on trial on this node, not %s", t.Version, version)
		}
		if err := errors.Join(ignoreMissing(os.Remove(p.state("failure.json"))), os.Remove(p.state("trial.json")), durable.SyncDir(p.State)); err != nil {
			return err
		}
		ctl, next := filepath.Join(filepath.Dir(p.Exe), "clusterctl"), p.file("next-clusterctl")
		if _, err := os.Stat(ctl); err != nil {
			return ignoreMissing(os.Remove(next))
		}
		return ignoreMissing(durable.Rename(next, ctl))
	})
}

// Back takes back the version that is on trial. The caller starts the program anew.
func (p Place) Back(version, why string, now time.Time) error {
	return p.locked(func() error {
		t, err := p.Trial()
		if err != nil {
			return err
		}
		if t == nil || t.Version != version {
			return refusedf("version %s is not on trial on this node", version)
		}
		return p.takeBack(*t, why, now)
	})
}

// takeBack puts the program before in place again. The lock is held. Killed in the
// middle, it is done again, or ended by the start of the program before.
func (p Place) takeBack(t Trial, why string, now time.Time) error {
	if err := durable.Rename(p.Previous(), p.Exe); err != nil {
		return fmt.Errorf("put the program of %s in place again: %w", t.From, err)
	}
	return p.over(t, why, now)
}

// over ends a trial that has failed. The reason is noted if it can be: on a full disk,
// which the program on trial may have filled, the node goes back all the same.
func (p Place) over(t Trial, why string, now time.Time) error {
	_ = p.write("failure.json", Failure{Version: t.Version, Why: why, At: now.UTC()})
	return errors.Join(os.Remove(p.state("trial.json")), durable.SyncDir(p.State))
}
