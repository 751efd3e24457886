package releases

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

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
	// Begun: the node's process was about to become it. Starts is how often it has read
	// this, which a program that ends at once has not.
	Begun  bool `json:"begun,omitempty"`
	Starts int  `json:"starts"`
	// Orderly: it was stopped on request.
	Orderly bool `json:"orderly,omitempty"`
	// Boot is the run of the kernel in which the trial began, and Uptime how long that
	// had lasted: they say what has passed since, whatever the clock was set to.
	Boot   string        `json:"boot,omitempty"`
	Uptime time.Duration `json:"uptime,omitempty"`
	// Back is why it was taken back, as long as that is not safe on the disk: the program
	// before is in place again, and the directory could not be synced.
	Back string `json:"back,omitempty"`
}

// late says why its time is over; "": it is not. It was watched for that long, which
// counts where nothing better than the machine's clock says what has passed.
func (t Trial) late(now time.Time, watched time.Duration) string {
	passed := max(t.passed(now), watched)
	switch {
	case !t.Up && passed > t.UpWithin:
		return fmt.Sprintf("it was not up within %s", t.UpWithin)
	case passed > t.Limit:
		return fmt.Sprintf("it was not confirmed within %s", t.Limit)
	}
	return ""
}

// passed is the time since it began. The machine's clock is asked only across a new
// start of the machine, or for a trial that an older version has begun.
func (t Trial) passed(now time.Time) time.Duration {
	if boot, uptime := machineTime(); t.Boot != "" && t.Boot == boot {
		return uptime - t.Uptime
	}
	return now.Sub(t.Began)
}

// machineTime names the run of the kernel and says how long it has lasted, sleep
// included; "": that is not known.
func machineTime() (boot string, uptime time.Duration) {
	var ts unix.Timespec
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err == nil {
		err = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	}
	if err != nil {
		return "", 0
	}
	return strings.TrimSpace(string(id)), time.Duration(ts.Nano())
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
			// It was taken back, or another program was installed, or was killed
			// while he took it back.
			if why = t.Back; why == "" {
				why = fmt.Sprintf("version %s was started instead", version)
			}
			return p.over(*t, why, now)
		case t.Back != "": // and a power cut has undone it
			back = true
			return p.takeBack(*t, t.Back, now)
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
// nothing of the program on trial, and the guard of a way back does not start it.
func (p Place) Stopping() error {
	if _, err := os.Stat(p.state("trial.json")); errors.Is(err, fs.ErrNotExist) {
		if !p.hasGuard() {
			return nil
		}
		return p.write(stoppedFile, struct{}{})
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

// Back takes back the version that is on trial. The caller starts the program again.
func (p Place) Back(version, why string, now time.Time) error {
	return p.locked(func() error {
		t, err := p.Trial()
		if err != nil {
			return err
		}
		if t == nil || t.Version != version {
			return refusedf("version %s is not on trial on this node", version)
		}
		if t.Back != "" { // what is left of it is to make it safe on the disk
			return p.over(*t, t.Back, now)
		}
		return p.takeBack(*t, why, now)
	})
}

// takeBack puts the program before in place again. The lock is held. Killed in the
// middle, it is done again, or ended by the start of the program before. Where the
// folder cannot be synced the node goes back all the same, and the trial is kept until
// that is safe: a power cut may put the program on trial in place again.
func (p Place) takeBack(t Trial, why string, now time.Time) error {
	err := rename(p.Previous(), p.Exe)
	if notRenamed(err) {
		return fmt.Errorf("put the program of %s in place again: %w", t.From, err)
	}
	if err == nil {
		return p.over(t, why, now)
	}
	t.Back = fmt.Sprintf("%s (%s is the program of %s again, but its folder could not be synced: %v; look at the disk, then start clusterd again)", why, p.Exe, t.From, err)
	_ = p.write("failure.json", Failure{Version: t.Version, Why: t.Back, At: now.UTC()})
	// Without this note the program before ends the trial when it starts, for another reason.
	_ = p.write("trial.json", t)
	return nil
}

// over ends a trial that has failed. The reason is noted if it can be: on a full disk,
// which the program on trial may have filled, the node goes back all the same.
func (p Place) over(t Trial, why string, now time.Time) error {
	if t.Back != "" {
		if err := syncDir(filepath.Dir(p.Exe)); err != nil {
			return fmt.Errorf("release %s was taken back, but the folder of %s cannot be synced: look at the disk, then start clusterd again: %w", t.Version, p.Exe, err)
		}
	}
	_ = p.write("failure.json", Failure{Version: t.Version, Why: why, At: now.UTC()})
	return errors.Join(os.Remove(p.state("trial.json")), durable.SyncDir(p.State))
}
