package plugin

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
)

// TestNoInotify: a pod that has taken all of the user's inotify instances keeps no
// agent from its work.
func TestNoInotify(t *testing.T) {
	root := t.TempDir()
	r := New(root)
	r.watch = func(string) (*fsnotify.Watcher, error) { return nil, errors.New("too many open files") }
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	for {
		if _, err := os.Stat(filepath.Join(root, "plugins_registry")); err == nil {
			break
		}
		select {
		case err := <-ended:
			t.Fatalf("ended with %v", err)
		case <-time.After(5 * time.Millisecond):
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("ended with %v, want it to go on without inotify", err)
	}
}
