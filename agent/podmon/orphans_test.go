package podmon

import (
	"os"
	"os/exec"
	"testing"
	"time"
)

// TestOrphansAreReapedInTwoLooks, and what someone waits for never is.
func TestOrphansAreReapedInTwoLooks(t *testing.T) {
	o := newOrphanReaper()
	start := func() *exec.Cmd {
		cmd := exec.Command(os.Args[0], "-test.run=^$")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	orphan, owned := start(), start()
	o.own(owned.Process.Pid)
	zombie := func(c *exec.Cmd) bool {
		st, err := readProcStat(c.Process.Pid)
		return err == nil && st.state == 'Z'
	}
	deadline := time.Now().Add(2 * time.Minute)
	for !zombie(orphan) || !zombie(owned) {
		if time.Now().After(deadline) {
			t.Fatal("children do not end")
		}
		<-time.After(time.Millisecond)
	}
	seen := o.look(nil)
	for !seen[orphan.Process.Pid] && time.Now().Before(deadline) {
		seen = o.look(nil) // a look may miss one
	}
	if !seen[orphan.Process.Pid] || seen[owned.Process.Pid] || !zombie(orphan) {
		t.Fatalf("first look: %v", seen)
	}
	for seen = o.look(seen); len(seen) > 0 && time.Now().Before(deadline); {
		seen = o.look(seen) // its first thread is dead, but not yet all of them
	}
	if len(seen) > 0 || zombie(orphan) || !zombie(owned) {
		t.Fatalf("second look: %v, orphan there: %v, owned there: %v", seen, zombie(orphan), zombie(owned))
	}
	if err := owned.Wait(); err != nil {
		t.Error(err)
	}
	_ = orphan.Process.Release()
}
