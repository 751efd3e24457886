package releases

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// ending waits for a guard's end.
func ending(t *testing.T, end <-chan string) string {
	t.Helper()
	select {
	case got := <-end:
		return got
	case <-time.After(time.Minute):
		t.Fatal("the guard does not end")
		return ""
	}
}

// reap waits for the node's process in the background.
func reap(t *testing.T, c *exec.Cmd) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = c.Wait()
	}()
	t.Cleanup(func() { _ = c.Process.Kill(); <-done })
}

// A key that was taken away after the file came is good for nothing.
func TestSwitchAsksForTheKey(t *testing.T) {
	p, s := staged(t, "v2")
	for _, keys := range [][]Key{nil, {newKey(t).Public()}} {
		_, err := p.Switch(t.Context(), s.Digest, keys, Trial{From: "v1", Limit: time.Minute, UpWithin: time.Minute}, unguarded, time.Now())
		if !IsRefused(err) || !strings.Contains(err.Error(), "key "+stagedKey.Name()+", which is trusted no more") {
			t.Errorf("%v", err)
		}
	}
	if !same(t, p.Exe, []byte("installed")) {
		t.Error("it was put in place")
	}
}

// The directory that programs are run from is the node's own.
func TestPlaceOfOthers(t *testing.T) {
	k := newKey(t)
	good := tarball(t, map[string][]byte{"clusterd": self(t)})
	for what, prepare := range map[string]func(dir string) error{
		"a folder that all may write to": func(dir string) error { return errors.Join(os.Mkdir(dir, 0o755), os.Chmod(dir, 0o777)) },
		"a link to another folder":       func(dir string) error { return os.Symlink(filepath.Dir(dir), dir) },
	} {
		p := place(t)
		if err := prepare(p.dir()); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Stage(bytes.NewReader(good), sign(t, k, good, here), []Key{k.Public()}); !IsRefused(err) || !strings.Contains(err.Error(), p.dir()+" has to be a folder of user") {
			t.Errorf("%s: %v", what, err)
		}
	}
	p, s := staged(t, "v2")
	if err := os.Chmod(p.dir(), 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Switch(t.Context(), s.Digest, []Key{stagedKey}, Trial{From: "v1", Limit: time.Minute, UpWithin: time.Minute}, unguarded, time.Now()); !IsRefused(err) {
		t.Errorf("a program was run from it: %v", err)
	}
}

// What a killed process has left is removed by the next file.
func TestStageSweeps(t *testing.T) {
	k, p := newKey(t), place(t)
	good := tarball(t, map[string][]byte{"clusterd": self(t)})
	left := []string{p.file(".unpack-1"), p.file(".previous-2")}
	if err := p.open(); err != nil {
		t.Fatal(err)
	}
	for _, name := range left {
		if err := os.WriteFile(name, []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p.Stage(bytes.NewReader(good), sign(t, k, good, here), []Key{k.Public()}); err != nil {
		t.Fatal(err)
	}
	for _, name := range left {
		if _, err := os.Stat(name); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s was left: %v", name, err)
		}
	}
}

// A disk on which the reason cannot be noted does not keep a node on a program that
// has failed.
func TestGuardOnAFullDisk(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	p, s := staged(t, "v2")
	p.mustSwitch(t, s.Digest, time.Second)
	// Nothing can take the name of a directory with something in it.
	if err := os.MkdirAll(p.state("failure.json/full"), 0o700); err != nil {
		t.Fatal(err)
	}
	c := node(t)
	reap(t, c)
	if got := ending(t, guardOf(p, c.Process.Pid)); got != "true [clusterd run] <nil>" {
		t.Error(got)
	}
	if tr, err := p.Trial(); tr != nil || err != nil || !same(t, p.Exe, self(t)) {
		t.Errorf("it did not go back: %+v %v", tr, err)
	}
	p, s = staged(t, "v2")
	p.mustSwitch(t, s.Digest, time.Minute)
	startOnce(t, p)
	if err := os.MkdirAll(p.state("failure.json/full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if back, _, err := p.Start("v2", time.Now()); !back || err != nil {
		t.Errorf("a start after a crash: back %v, %v", back, err)
	}
}

// A clock that is set gives the program no more time and no less. One that an older
// version has begun goes by the clock and by how long it was watched.
func TestTrialAndTheClock(t *testing.T) {
	boot, uptime := machineTime()
	if boot == "" || uptime <= 0 {
		t.Fatalf("run of the kernel %q, for %s", boot, uptime)
	}
	now := time.Now()
	ours := Trial{Began: now, Boot: boot, Uptime: uptime, Limit: time.Hour, UpWithin: time.Minute}
	other, older := ours, ours
	other.Boot, older.Boot = "another", ""
	for _, tt := range []struct {
		what    string
		trial   Trial
		now     time.Time
		watched time.Duration
		late    bool
	}{
		{"a clock set forward", ours, now.Add(24 * time.Hour), 0, false},
		{"a clock set back", ours, now.Add(-24 * time.Hour), 0, false},
		{"watched for too long", ours, now, 2 * time.Minute, true},
		{"after a new start of the machine", other, now.Add(2 * time.Minute), 0, true},
		{"after a quick one", other, now.Add(30 * time.Second), 0, false},
		{"an older version's", older, now.Add(2 * time.Minute), 0, true},
		{"an older version's, the clock set back", older, now.Add(-24 * time.Hour), 2 * time.Minute, true},
	} {
		if why := tt.trial.late(tt.now, tt.watched); (why != "") != tt.late {
			t.Errorf("%s: late %q, want %v", tt.what, why, tt.late)
		}
	}
	ours.Uptime -= 2 * time.Minute
	if why := ours.late(now.Add(-24*time.Hour), 0); why != "it was not up within 1m0s" {
		t.Errorf("%q", why)
	}
}

// A trial that an older version has begun, whose clock was set back since, is over when
// it was watched for its time.
func TestGuardAfterTheClockWasSetBack(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	for _, up := range []bool{false, true} {
		p, s := staged(t, "v2")
		p.mustSwitch(t, s.Digest, 2*time.Second)
		p.change(t, func(tr *Trial) { tr.Boot, tr.Began = "", tr.Began.Add(24*time.Hour) })
		want := "not up within 1s"
		if up {
			beUp(t, p)
			want = "not confirmed within 2s"
		}
		c := node(t)
		reap(t, c)
		if got := ending(t, guardOf(p, c.Process.Pid)); got != "true [clusterd run] <nil>" {
			t.Error(got)
		}
		if _, failure := p.outcome(t); !strings.Contains(failure, want) {
			t.Errorf("failure %q, want %q", failure, want)
		}
	}
}

// A trial that cannot be read for a moment is guarded on.
func TestGuardReadsAgain(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	p, s := staged(t, "v2")
	p.mustSwitch(t, s.Digest, time.Hour)
	good, err := os.ReadFile(p.state("trial.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p.state("trial.json"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := node(t)
	said, log := io.Pipe()
	type result struct {
		start bool
		err   error
	}
	end := make(chan result, 1)
	go func() {
		start, _, err := p.Guard(c.Process.Pid, func() {}, log)
		log.Close()
		end <- result{start, err}
	}()
	if n, err := said.Read(make([]byte, 1024)); n == 0 {
		t.Fatal("the guard has ended: ", err, <-end)
	}
	go func() { _, _ = io.Copy(io.Discard, said) }()
	if err := os.WriteFile(p.state("t"), good, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(p.state("t"), p.state("trial.json")); err != nil {
		t.Fatal(err)
	}
	_ = c.Process.Kill()
	_ = c.Wait()
	if got := <-end; !got.start || got.err != nil {
		t.Errorf("%+v", got)
	}
}

// A program on trial is not begun without a guard: the one before goes on.
func TestGuardedOrBack(t *testing.T) {
	p, s := staged(t, "v2")
	p.mustSwitch(t, s.Digest, time.Minute)
	if err := os.Chmod(p.Previous(), 0o600); err != nil { // it cannot be started
		t.Fatal(err)
	}
	tr, err := p.Trial()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Guarded(*tr, os.Getpid(), "data", time.Now()); err != nil {
		t.Error(err)
	}
	if trial, failure := p.outcome(t); trial || !strings.Contains(failure, "start the guard of the upgrade") || !same(t, p.Exe, self(t)) {
		t.Errorf("on trial %v, failure %q", trial, failure)
	}
}
