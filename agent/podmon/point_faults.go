//go:build faultpoints

package podmon

import (
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// point kills this process when it is at the place that the file kill-at beside
// its state directory says. The file is removed first: it happens once.
func point(name string) {
	i := slices.Index(os.Args, "--root")
	if i < 0 || i+1 >= len(os.Args) {
		return
	}
	file := filepath.Join(filepath.Dir(os.Args[i+1]), "kill-at")
	if b, err := os.ReadFile(file); err != nil || string(b) != name || os.Remove(file) != nil {
		return
	}
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	select {} // it comes at the next system call at the latest
}
