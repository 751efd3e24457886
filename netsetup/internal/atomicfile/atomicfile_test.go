package atomicfile

import (
	"os"
	"path/filepath"
	"testing"
)

func TestReplace(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "state.json")
	for _, want := range []string{"the old one is longer", "new"} {
		if err := Replace(name, []byte(want)); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(name); err != nil || string(got) != want {
			t.Errorf("%q %v, want %q", got, err, want)
		}
	}
	if info, err := os.Stat(name); err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v %v, want 0600", info.Mode(), err)
	}
	taken := filepath.Join(dir, "folder")
	if err := os.MkdirAll(filepath.Join(taken, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Replace(taken, nil); err == nil {
		t.Error("a folder was replaced by a file")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("left in the folder: %v %v", left, err)
	}
	if err := Replace(filepath.Join(dir, "none", "state.json"), nil); err == nil {
		t.Error("written into a folder that is not there")
	}
}
