package image

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestRootFullDisk: a process that was taken over and fills the disk is killed, and the
// error says that the disk is full.
func TestRootFullDisk(t *testing.T) {
	dir := t.TempDir()
	isolated(t, t.TempDir(), nil) // for the conditions of these tests
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=16m"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	fill := filepath.Join(dir, "fill")
	s := isolated(t, dir, func(i *Isolation) {
		i.Program = script(t, nil, "head -c 32M /dev/zero >"+fill+"; exec sleep 100")
	})
	start := time.Now()
	_, err := s.Pull(t.Context(), "registry.example/a:1", Auth{})
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "left on the disk") || time.Since(start) > 60*time.Second {
		t.Errorf("after %s: %v", time.Since(start), err)
	}
	if err := errors.Join(s.Close(), os.Remove(fill)); err != nil {
		t.Error(err)
	}
}

// TestRootDownloadIsBounded: the process that downloads can make no file larger than the
// largest layer of the manifest.
func TestRootDownloadIsBounded(t *testing.T) {
	ref, reached, goOn := stuck(t)
	s := isolated(t, t.TempDir(), nil)
	done := make(chan error, 1)
	go func() {
		_, err := s.Pull(t.Context(), ref, Auth{})
		done <- err
	}()
	until(t, "half of the layer has been sent", reached.Load)
	pids := workers(t, os.Getpid())
	if len(pids) != 1 {
		t.Fatalf("%v", pids)
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pids[0]))
	if err != nil {
		t.Fatal(err)
	}
	var most int64
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "Max file size"); ok {
			_, _ = fmt.Sscan(rest, &most) // unlimited: 0
		}
	}
	limit := int64(300_000 + fileSlack)
	if !hasResource(t) {
		limit = s.cfg.Limits.Download + fileSlack
	}
	if most < 200_000 || most > limit {
		t.Errorf("%d bytes\n%s", most, b)
	}
	close(goOn)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// hasResource: this process has CAP_SYS_RESOURCE.
func hasResource(t *testing.T) bool {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "CapEff:")
	var caps uint64
	if _, err := fmt.Sscanf(rest, "%x", &caps); err != nil {
		t.Fatal(err)
	}
	return caps&(1<<unix.CAP_SYS_RESOURCE) != 0
}
