package pressure

import (
	"os"
	"path/filepath"
	"testing"
)

// TestPids: the lower of the kernel's limits is the one that ends first.
func TestPids(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	load := file("loadavg", "0.10 0.20 0.30 2/30500 6789\n")
	for _, tt := range []struct {
		pidMax, threadsMax string
		want               Level
	}{
		{"4194304\n", "31000\n", Level{Available: 500, Capacity: 31000}},
		{"32768\n", "127000\n", Level{Available: 2268, Capacity: 32768}},
	} {
		got, err := pids(load, file("pid_max", tt.pidMax), file("threads-max", tt.threadsMax))
		if err != nil || got != tt.want {
			t.Errorf("pid_max %s threads-max %s: %+v, %v, want %+v", tt.pidMax, tt.threadsMax, got, err, tt.want)
		}
	}
	if _, err := pids(load, filepath.Join(dir, "none")); err == nil {
		t.Error("a limit that cannot be read is no error")
	}
	if l, ok := (Machine{NodeDir: dir, ImageDir: dir}).Measure()[PidAvailable]; !ok || l.Capacity <= 0 {
		t.Errorf("this machine: %+v, %t", l, ok)
	}
}
