package podmon

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// TestAdoptWithoutFiles: a podmon that may open no more files does not take what it
// cannot read for broken, which would end the container.
func TestAdoptWithoutFiles(t *testing.T) {
	dir, id := t.TempDir(), "c"
	if err := makeDirs(dir, sandboxesDir, containerDir, filepath.Join(containerDir, id)); err != nil {
		t.Fatal(err)
	}
	record := filepath.Join(dir, containerDir, id, "container.json")
	if err := writeState(record, containerFile{Version: stateVersion, BootID: bootID(), State: stateRunning, Status: api.ContainerStatus{Pid: os.Getpid()}}); err != nil {
		t.Fatal(err)
	}
	s := &Supervisor{cfg: Config{Dir: dir}, log: slog.New(slog.DiscardHandler), sandboxes: map[string]*sandbox{}, containers: map[string]*container{}}
	held, err := openProcess(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer held.close()
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	all, one := s.adoptAll(), s.adoptContainer(id)
	running := s.adoptRunning(&container{id: id, done: make(chan struct{})}, held)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(all, unix.EMFILE) || !errors.Is(one, unix.EMFILE) || !errors.Is(running, unix.EMFILE) {
		t.Errorf("all: %v, the container: %v, one that is held: %v", all, one, running)
	}
	if _, err := os.Stat(record); err != nil {
		t.Errorf("the record is gone: %v", err)
	}
}
