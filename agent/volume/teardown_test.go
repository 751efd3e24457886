package volume_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/agenttest"
	"github.com/clusterd/clusterd/agent/volume"
)

// stuck is a mount table that says what the test wants and unmounts nothing.
type stuck struct {
	agenttest.Mounter
	at    []string
	err   error
	asked int
}

func (s *stuck) Below(string) ([]string, error) {
	s.asked++
	return s.at, s.err
}

// TestTeardownLooksForMounts: the directory of a pod with a volume goes only when
// the mount table says that nothing is mounted there; a pod without is torn down
// without a look at it.
func TestTeardownLooksForMounts(t *testing.T) {
	for _, tt := range []struct {
		name    string
		volumes []v1.Volume
		subPath bool
		looks   bool
	}{
		{name: "no volume"},
		{name: "a volume", volumes: []v1.Volume{{Name: "v", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}}}, looks: true},
		{name: "the place of a subPath alone", subPath: true, looks: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, table := t.TempDir(), &stuck{}
			m := volume.New(volume.Config{Dir: dir, Mounter: table})
			p := pod(tt.volumes...)
			if err := m.Setup(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			folder := filepath.Join(dir, string(p.UID))
			made := filepath.Join(folder, "containers", "c")
			if tt.subPath {
				made = filepath.Join(folder, "volume-subpaths", "v", "c", "0")
			}
			if err := os.MkdirAll(made, 0o755); err != nil {
				t.Fatal(err)
			}
			table.asked = 0
			if tt.looks {
				table.err = errors.New("unreadable")
				if err := m.Teardown(t.Context(), p.UID); !errors.Is(err, table.err) {
					t.Errorf("the mount table cannot be read: %v", err)
				}
				table.err, table.at = nil, []string{made}
				if err := m.Teardown(t.Context(), p.UID); err == nil {
					t.Error("torn down with a mount in it")
				}
				if _, err := os.Lstat(made); err != nil {
					t.Errorf("touched with a mount in it: %v", err)
				}
				table.at = nil
			}
			if err := m.Teardown(t.Context(), p.UID); err != nil {
				t.Error(err)
			}
			if _, err := os.Lstat(folder); !os.IsNotExist(err) {
				t.Errorf("the folder stays: %v", err)
			}
			if (table.asked > 0) != tt.looks {
				t.Errorf("the mount table was read %d times", table.asked)
			}
		})
	}
}
