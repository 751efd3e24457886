package podmon

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// stateVersion is in every state file; see formats in DESIGN.md.
const stateVersion = 1

// fenceFile is live/fence.json.
type fenceFile struct {
	Version  int
	BootID   string
	Deadline int64 // see api.Fence
	Pods     []fenceFilePod
}

type fenceFilePod struct {
	api.FencedPod
	Fenced, Ended bool
}

// checkState finds a record below dir that a newer podmon wrote in a way that
// this one does not know. What cannot be read at all is ignored.
func checkState(dir string) error {
	for _, kind := range []struct{ dir, file string }{{sandboxesDir, "sandbox.json"}, {containerDir, "container.json"}} {
		for _, id := range dirNames(filepath.Join(dir, kind.dir)) {
			path := filepath.Join(dir, kind.dir, id, kind.file)
			var f struct{ Version int }
			if err := readState(path, &f); err == nil && f.Version > stateVersion {
				return tooNew(path, f.Version)
			}
		}
	}
	return nil
}

func tooNew(path string, version int) error {
	return fmt.Errorf("%s has version %d, this podmon knows up to %d", path, version, stateVersion)
}

// sandboxFile is sandboxes/<id>/sandbox.json.
type sandboxFile struct {
	Version int
	BootID  string
	Start   uint64 // start time of the pause; 0: not started yet
	Status  api.SandboxStatus
}

// containerFile is containers/<id>/container.json.
type containerFile struct {
	Version int
	BootID  string
	State   string
	Start   uint64 // start time of the first process; 0: not started yet
	Status  api.ContainerStatus
}

func (s *Supervisor) saveSandbox(sb *sandbox) error {
	sb.saving.Lock() // what is written last is the newest
	defer sb.saving.Unlock()
	s.mu.Lock()
	f := sandboxFile{Version: stateVersion, BootID: bootID(), Start: sb.start, Status: sb.status}
	removed := sb.removed
	s.mu.Unlock()
	if removed {
		return nil
	}
	return writeState(s.sandboxPath(f.Status.Sandbox.ID, "sandbox.json"), f)
}

func (s *Supervisor) saveContainer(c *container) error {
	s.mu.Lock()
	f := containerFile{Version: stateVersion, BootID: bootID(), State: c.state, Start: c.start, Status: c.status}
	removed := c.removed
	s.mu.Unlock()
	if removed {
		return nil
	}
	return writeState(s.containerPath(c.id, "container.json"), f)
}

// writeState replaces a file at once, so that a killed podmon leaves the old or
// the new one. It does not sync: after a power cut no process is left that the
// state could tell of.
func writeState(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %s: %w", filepath.Base(path), err)
	}
	tmp := path + ".new"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

func readState(path string, v any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("decode %s: %w", path, err)
	}
	return nil
}
