package volume

import (
	"os"
	"slices"
	"sync"
	"testing"
)

func TestKernelMounted(t *testing.T) {
	for dir, want := range map[string]bool{"/proc": true, t.TempDir(): false} {
		if got, err := (Kernel{}).Mounted(dir); got != want || err != nil {
			t.Errorf("%s: mounted %t %v, want %t", dir, got, err, want)
		}
		at, err := Kernel{}.Below(dir)
		if slices.Contains(at, dir) != want || err != nil {
			t.Errorf("%s: mount points below: %q %v", dir, at, err)
		}
	}
	if _, err := (Kernel{}).Mounted(t.TempDir() + "/none"); !os.IsNotExist(err) {
		t.Errorf("a folder that is not there: %v", err)
	}
}

// TestMountTableShared: whoever asks gets the table, also when all ask at once.
func TestMountTableShared(t *testing.T) {
	var table mountTable
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			for range 10 {
				if points, err := table.read(); err != nil || !slices.Contains(points, "/proc") {
					t.Errorf("mount points %q, %v", points, err)
				}
			}
		})
	}
	wg.Wait()
}
