package releases

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/clusterd/clusterd/durable"
)

// TestMain lets copies of this program be guards, as clusterd's are, and nodes.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == GuardCommand {
		if err := guardMain(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// guardMain is upgradeGuardCommand of cmd/clusterd. That it is there is a file, and that
// it starts the node.
func guardMain(args []string) error {
	if args[len(args)-1] == "--detach" {
		return Detach()
	}
	ready := func() {}
	if args[len(args)-1] == "--"+ReadyFlag {
		ready = Ready
	}
	data, exe := args[1], args[3]
	pid, err := strconv.Atoi(args[5])
	if err != nil {
		return err
	}
	p := Place{Exe: exe, State: filepath.Join(data, "upgrade")}
	alive := fmt.Sprint("alive-", os.Getpid())
	if err := p.write(alive, true); err != nil {
		return err
	}
	start, _, err := p.Guard(pid, ready, io.Discard)
	if start {
		err = errors.Join(err, p.write("started", true))
	}
	return errors.Join(err, os.Remove(p.state(alive)))
}

// nodeThatBecomes is a node that goes on with another program, under its pid, once the
// file is there.
func nodeThatBecomes(t *testing.T, file, program string) *exec.Cmd {
	t.Helper()
	c := exec.Command("sh", "-c", `while [ ! -e "$1" ]; do sleep 0.02; done; exec "$2" 600`, "sh", file, program)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	reap(t, c)
	return c
}

// sleeper writes a program that runs for as long as its argument says.
func sleeper(t *testing.T, to string) {
	t.Helper()
	from, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, b, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never:", what)
		}
	}
}

// guarded waits for the end of the guards in processes of their own.
func (p Place) guarded(t *testing.T) (start bool) {
	t.Helper()
	eventually(t, "the guards end", func() bool {
		left, err := filepath.Glob(p.state("alive-*"))
		return err == nil && len(left) == 0
	})
	_, err := os.Stat(p.state("started"))
	return err == nil
}

// The guard watches from the switch on: a node that is killed, or hangs, before the new
// program has begun goes back.
func TestGuardFromTheSwitchOn(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	for _, tt := range []struct {
		what, want string
		do         func(*testing.T, Place, *exec.Cmd)
	}{
		{"killed", "the node ended before it was begun", func(t *testing.T, _ Place, c *exec.Cmd) {
			if err := c.Process.Kill(); err != nil {
				t.Error(err)
			}
		}},
		{"killed as soon as it has become it", "it ended by itself", func(t *testing.T, p Place, c *exec.Cmd) {
			if err := errors.Join(p.Guarded(Trial{Version: "v2"}, c.Process.Pid, filepath.Dir(p.State), time.Now()), c.Process.Kill()); err != nil {
				t.Error(err)
			}
		}},
		{"hangs while it stops", "it was not up within 1h0m0s", func(t *testing.T, p Place, _ *exec.Cmd) { p.age(t, time.Hour) }},
	} {
		t.Run(tt.what, func(t *testing.T) {
			p, s := staged(t, "v2")
			c := node(t)
			reap(t, c)
			watched := false
			_, err := p.Switch(t.Context(), s.Digest, []Key{stagedKey}, Trial{From: "v1", Args: []string{"clusterd", "run"}, Limit: 2 * time.Hour, UpWithin: time.Hour}, func() error {
				if !same(t, p.Exe, []byte("installed")) {
					t.Error("the program is in place before it is guarded")
				}
				err := p.SpawnGuard(c.Process.Pid, filepath.Dir(p.State))
				watched = p.hasGuard()
				return err
			}, time.Now())
			if err != nil || !watched {
				t.Fatalf("guarded %v, %v", watched, err)
			}
			tt.do(t, p, c)
			if !p.guarded(t) {
				t.Error("the guard does not start the node")
			}
			if trial, failure := p.outcome(t); trial || !strings.Contains(failure, tt.want) || !same(t, p.Exe, self(t)) {
				t.Errorf("on trial %v, failure %q", trial, failure)
			}
		})
	}
}

// A switch that cannot be guarded is none.
func TestSwitchWithoutGuard(t *testing.T) {
	p, s := staged(t, "v2")
	_, err := p.Switch(t.Context(), s.Digest, []Key{stagedKey}, Trial{From: "v1", Limit: time.Minute, UpWithin: time.Minute}, func() error { return errors.New("no process left") }, time.Now())
	if err == nil || !strings.Contains(err.Error(), "no process left") {
		t.Errorf("%v", err)
	}
	if trial, failure := p.outcome(t); trial || failure != "" || !same(t, p.Exe, []byte("installed")) {
		t.Errorf("on trial %v, failure %q", trial, failure)
	}
	if again, err := p.Staged(); again == nil || err != nil {
		t.Errorf("it is staged no more: %v", err)
	}
}

// Detach does not say that one watches that has ended.
func TestDetach(t *testing.T) {
	p := place(t)
	cmd := exec.Command("/proc/self/exe", GuardCommand, "--data", filepath.Dir(p.State), "--exe", p.Exe, "--pid", "1", "--detach")
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "the guard does not watch") {
		t.Errorf("without a folder for its state: %v %s", err, out)
	}
}

// On the way back the node is guarded until it runs the program before.
func TestGuardOfTheWayBack(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	was := endFor
	t.Cleanup(func() { endFor = was })
	for _, tt := range []struct {
		what   string
		endFor time.Duration
		do     func(*testing.T, Place, *exec.Cmd, string)
		want   string
	}{
		{"it goes on with the program before", time.Hour, func(t *testing.T, p Place, _ *exec.Cmd, file string) {
			if err := os.WriteFile(file, nil, 0o600); err != nil {
				t.Error(err)
			}
		}, "false [] <nil>"},
		{"it hangs", time.Millisecond, func(*testing.T, Place, *exec.Cmd, string) {}, "true [clusterd run] <nil>"},
		{"it is killed", time.Hour, func(_ *testing.T, _ Place, c *exec.Cmd, _ string) { _ = c.Process.Kill() }, "true [clusterd run] <nil>"},
		{"somebody stops it", time.Hour, func(t *testing.T, p Place, c *exec.Cmd, _ string) {
			if err := p.Stopping(); err != nil {
				t.Error(err)
			}
			_ = c.Process.Kill()
		}, "false [] <nil>"},
	} {
		t.Run(tt.what, func(t *testing.T) {
			endFor = tt.endFor
			p, s := staged(t, "v2")
			p.mustSwitch(t, s.Digest, time.Hour)
			file, before := filepath.Join(t.TempDir(), "on"), filepath.Join(t.TempDir(), "sleep")
			sleeper(t, before)
			c := nodeThatBecomes(t, file, before) // another program than the one that it runs now
			startOnce(t, p)
			end := watching(t, p, c.Process.Pid)
			if err := p.Back("v2", "it is not Ready", time.Now()); err != nil {
				t.Fatal(err)
			}
			tt.do(t, p, c, file)
			if got := ending(t, end); got != tt.want {
				t.Errorf("the guard ended with %s, want %s", got, tt.want)
			}
		})
	}
}

// watching runs a guard that has seen the node once.
func watching(t *testing.T, p Place, pid int) <-chan string {
	t.Helper()
	sees, end := make(chan struct{}), make(chan string, 1)
	go func() {
		start, args, err := p.Guard(pid, func() { close(sees) }, io.Discard)
		end <- fmt.Sprint(start, args, err)
	}()
	select {
	case <-sees:
	case <-time.After(time.Minute):
		t.Fatal("the guard does not watch")
	}
	return end
}

// A node whose program was confirmed is guarded no more, and left alone.
func TestGuardEndsWithConfirm(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	was := endFor
	t.Cleanup(func() { endFor = was })
	endFor = time.Millisecond
	p, s := staged(t, "v2")
	p.mustSwitch(t, s.Digest, time.Hour)
	if err := os.Remove(p.Exe); err != nil {
		t.Fatal(err)
	}
	sleeper(t, p.Exe)
	c := exec.Command(p.Exe, "600")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	reap(t, c)
	startOnce(t, p)
	end := watching(t, p, c.Process.Pid)
	if err := p.Confirm("v2"); err != nil {
		t.Fatal(err)
	}
	if got := ending(t, end); got != "false [] <nil>" {
		t.Error(got)
	}
	if err := c.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the node: %v", err)
	}
}

// unsynced makes syncs of the directory that the program lies in fail, after the rename.
func unsynced(t *testing.T, p Place) {
	t.Helper()
	renamed, synced := rename, syncDir
	t.Cleanup(func() { rename, syncDir = renamed, synced })
	broken := &fs.PathError{Op: "sync", Path: filepath.Dir(p.Exe), Err: syscall.EIO}
	rename = func(from, to string) error {
		if err := renamed(from, to); err != nil || to != p.Exe {
			return err
		}
		return broken
	}
	syncDir = func(dir string) error {
		if dir == filepath.Dir(p.Exe) {
			return broken
		}
		return synced(dir)
	}
}

// A directory that cannot be synced after a rename leaves the node with the program before,
// and says so; what a power cut may undo is remembered until it is safe.
func TestFolderIsNotSynced(t *testing.T) {
	mended := func() { rename, syncDir = durable.Rename, durable.SyncDir }
	t.Run("switch", func(t *testing.T) {
		p, s := staged(t, "v2")
		unsynced(t, p)
		_, err := p.Switch(t.Context(), s.Digest, []Key{stagedKey}, Trial{From: "v1", Limit: time.Minute, UpWithin: time.Minute}, unguarded, time.Now())
		if err == nil || !strings.Contains(err.Error(), "could not be synced") || !strings.Contains(err.Error(), "the program before is in place again") {
			t.Errorf("%v", err)
		}
		if !same(t, p.Exe, self(t)) {
			t.Error("the new program is in place")
		}
		if s, err := p.Staged(); s != nil || err != nil {
			t.Errorf("it is staged still: %+v %v", s, err)
		}
		tr, err := p.Trial()
		if err != nil || tr == nil || tr.Back == "" {
			t.Fatalf("that it was taken back is not safe, and forgotten: %+v %v", tr, err)
		}
		// Nothing else is begun on such a disk.
		if _, err := p.Switch(t.Context(), s.Digest, []Key{stagedKey}, Trial{}, unguarded, time.Now()); !IsRefused(err) || !strings.Contains(err.Error(), "was taken back on this node") {
			t.Errorf("%v", err)
		}
		if _, on, err := p.Start("v1", time.Now()); on != nil || err == nil || !strings.Contains(err.Error(), "cannot be synced: look at the disk") {
			t.Errorf("a start with the disk as it is: %+v %v", on, err)
		}
		mended()
		if back, on, err := p.Start("v1", time.Now()); back || on != nil || err != nil {
			t.Errorf("a start with a disk that was mended: %v %+v %v", back, on, err)
		}
		if trial, failure := p.outcome(t); trial || !strings.Contains(failure, "could not be synced after the new program was put there") {
			t.Errorf("on trial %v, failure %q", trial, failure)
		}
	})
	t.Run("back", func(t *testing.T) {
		p, s := staged(t, "v2")
		p.mustSwitch(t, s.Digest, time.Minute)
		startOnce(t, p)
		unsynced(t, p)
		if err := p.Back("v2", "it is not Ready", time.Now()); err != nil {
			t.Fatalf("the node does not go back: %v", err)
		}
		if _, failure := p.outcome(t); !same(t, p.Exe, self(t)) || !strings.Contains(failure, "it is not Ready") || !strings.Contains(failure, "look at the disk") {
			t.Errorf("failure %q", failure)
		}
		if err := p.Back("v2", "it is not Ready", time.Now()); err == nil || !strings.Contains(err.Error(), "cannot be synced") {
			t.Errorf("a second time: %v", err)
		}
		// The power cut: the rename is undone.
		if err := os.Rename(p.Exe, p.Previous()); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p.Exe, program("v2"), 0o755); err != nil {
			t.Fatal(err)
		}
		mended()
		if back, _, err := p.Start("v2", time.Now()); !back || err != nil {
			t.Errorf("back %v, %v", back, err)
		}
		if trial, failure := p.outcome(t); trial || !strings.Contains(failure, "it is not Ready") || !same(t, p.Exe, self(t)) {
			t.Errorf("on trial %v, failure %q", trial, failure)
		}
	})
	t.Run("a rename that fails changes nothing", func(t *testing.T) {
		p, s := staged(t, "v2")
		was := rename
		t.Cleanup(func() { rename = was })
		rename = func(from, to string) error {
			return &os.LinkError{Op: "rename", Old: from, New: to, Err: syscall.EROFS}
		}
		if _, err := p.Switch(t.Context(), s.Digest, []Key{stagedKey}, Trial{From: "v1", Limit: time.Minute, UpWithin: time.Minute}, unguarded, time.Now()); !errors.Is(err, syscall.EROFS) {
			t.Errorf("%v", err)
		}
		if trial, failure := p.outcome(t); trial || failure != "" || !same(t, p.Exe, []byte("installed")) {
			t.Errorf("on trial %v, failure %q", trial, failure)
		}
		if s, err := p.Staged(); s == nil || err != nil {
			t.Errorf("it is staged no more: %v", err)
		}
	})
}

// What systemd does not start again is started: a unit that has RestartPreventExitStatus=78,
// when a program on trial ends with 78.
func TestGuardStartsTheService(t *testing.T) {
	for _, tt := range []struct{ what, shows, did string }{
		{"an exit code that is not started again", "ActiveState=failed MainPID=0 Result=exit-code", "reset-failed clusterd.service, start --no-block clusterd.service"},
		{"too many starts in a row", "ActiveState=failed MainPID=0 Result=start-limit-hit", "reset-failed clusterd.service, start --no-block clusterd.service"},
		{"started again by systemd", "ActiveState=activating MainPID=0 Result=exit-code", ""},
		{"stopped by somebody", "ActiveState=inactive MainPID=0 Result=success", ""},
		{"stopped by somebody, and killed", "ActiveState=failed MainPID=0 Result=timeout", ""},
	} {
		t.Run(tt.what, func(t *testing.T) {
			dir := t.TempDir()
			p, s := staged(t, "v2")
			p.mustSwitch(t, s.Digest, time.Hour)
			startOnce(t, p)
			c := node(t)
			// systemd hears of the end after the second question.
			script := fmt.Sprintf(`#!/bin/sh
cd %q
if [ "$1" != show ]; then echo "$@" >>did; exit; fi
case $* in *" clusterd.service") ;; *) exit 1 ;; esac
if [ ! -e once ]; then touch once; echo ActiveState=active; echo MainPID=%d; echo Result=success; exit; fi
if [ ! -e twice ]; then touch twice; echo ActiveState=deactivating; echo MainPID=0; echo Result=success; exit; fi
for line in %s; do echo $line; done
`, dir, c.Process.Pid, tt.shows)
			if err := errors.Join(os.WriteFile(filepath.Join(dir, "systemctl"), []byte(script), 0o755), os.WriteFile(filepath.Join(dir, "cgroup"), []byte("4:memory:/x.service\n0::/system.slice/clusterd.service\n"), 0o600)); err != nil {
				t.Fatal(err)
			}
			t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
			t.Setenv("SYSTEMD_EXEC_PID", strconv.Itoa(c.Process.Pid))
			was := ownCgroup
			t.Cleanup(func() { ownCgroup = was })
			ownCgroup = filepath.Join(dir, "cgroup")
			end := guardOf(p, c.Process.Pid)
			_ = c.Process.Kill()
			_ = c.Wait()
			if got := ending(t, end); got != "false [] <nil>" {
				t.Error(got)
			}
			did, err := os.ReadFile(filepath.Join(dir, "did"))
			if got := strings.ReplaceAll(strings.TrimSpace(string(did)), "\n", ", "); got != tt.did || err != nil && tt.did != "" {
				t.Errorf("it did %q, want %q (%v)", got, tt.did, err)
			}
		})
	}
}

func TestUnitOf(t *testing.T) {
	for cgroups, want := range map[string]string{
		"0::/system.slice/clusterd.service\n":                                     "clusterd.service",
		"12:memory:/a.service\n1:name=systemd:/system.slice/n1.service\n0::/\n":   "n1.service",
		"12:memory:/system.slice/a.service\n1:name=systemd:/\n":                   "",
		"0::/user.slice/user-0.slice/user@0.service/app.slice/terminal-1.scope\n": "",
		"": "",
	} {
		if got := unitOf([]byte(cgroups)); got != want {
			t.Errorf("%q: %q, want %q", cgroups, got, want)
		}
	}
}
