package netnstest

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

const killedEnv = "NETNSTEST_KILLED"

// TestRootRemains: the namespace of a killed test is dropped by the next, that
// of one that runs is not.
func TestRootRemains(t *testing.T) {
	NeedRoot(t)
	if os.Getenv(killedEnv) != "" {
		fmt.Println("pinned " + New(t).Path)
		select {} // until it is killed
	}
	mine := New(t)
	cmd := exec.Command(os.Args[0], "-test.run=^TestRootRemains$", "-test.v")
	cmd.Env = append(os.Environ(), killedEnv+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var path string
	for lines := bufio.NewScanner(out); path == "" && lines.Scan(); {
		path, _ = strings.CutPrefix(lines.Text(), "pinned ")
		if !strings.HasPrefix(path, "/") {
			path = ""
		}
	}
	if err := dropRemains(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("that of a test that runs: %v", err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if err := dropRemains(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("that of a killed test is left: %v", err)
	}
	mine.Do(func() error { return nil })
}

func TestDead(t *testing.T) {
	mine, err := marked(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for folder, want := range map[string]bool{
		mine: false, fmt.Sprintf("netnstest-%d-1", os.Getpid()): true,
		"001": false, "netnstest-": false, "netnstest-x-1": false, "netnstest-1": false,
	} {
		if got := dead(folder); got != want {
			t.Errorf("dead(%q) is %v", folder, got)
		}
	}
}
