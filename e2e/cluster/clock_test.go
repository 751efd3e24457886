package cluster

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// TestMovedClock is a Go program, this one, whose wall clock is elsewhere and whose
// monotonic clock is not.
func TestMovedClock(t *testing.T) {
	if os.Getenv("CLUSTERD_TEST_CLOCK") != "" {
		begin := time.Now()
		time.Sleep(10 * time.Millisecond)
		fmt.Printf("clock %d %d\n", begin.Unix(), time.Since(begin).Milliseconds())
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	for _, ahead := range []time.Duration{0, 40 * 24 * time.Hour, -time.Duration(time.Now().Unix()) * time.Second} {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestMovedClock$")
		cmd.Env = append(os.Environ(), "CLUSTERD_TEST_CLOCK=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{}
		var out bytes.Buffer
		cmd.Stdout = &out
		want := time.Now().Add(ahead).Unix()
		if err := StartAt(cmd, "/proc/self/ns/net", ahead); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
		var got, slept int64
		if _, err := fmt.Sscanf(out.String(), "clock %d %d", &got, &slept); err != nil {
			t.Fatalf("%v in %q", err, out.String())
		}
		if got < want-1 || got > want+60 {
			t.Errorf("%s ahead: the clock says %s, want %s", ahead, time.Unix(got, 0), time.Unix(want, 0))
		}
		if slept < 10 || slept > 60_000 {
			t.Errorf("%s ahead: %d ms passed", ahead, slept)
		}
	}
}
