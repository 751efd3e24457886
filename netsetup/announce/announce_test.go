package announce

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
)

// TestSaveLeavesNothing: what could not take the file's name does not stay
// beside it, and what was recorded before still counts.
func TestSaveLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	old, now := []netip.Addr{netip.MustParseAddr("192.0.2.1")}, []netip.Addr{netip.MustParseAddr("192.0.2.2")}
	a := &Announcer{cfg: Config{File: filepath.Join(dir, "announced.json")}}
	if err := a.save(old); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(a.cfg.File); err != nil || string(b) != `["192.0.2.1"]` {
		t.Errorf("the file holds %s %v", b, err)
	}
	a.cfg.File = filepath.Join(dir, "taken")
	if err := os.MkdirAll(filepath.Join(a.cfg.File, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := a.save(now); err == nil {
		t.Error("saved over a folder")
	}
	if own := a.Own(); len(own) != 1 || own[0] != old[0] {
		t.Errorf("own are %v, want %v", own, old)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("left in the folder: %v %v", left, err)
	}
}
