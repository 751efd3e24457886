package runtime

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"
)

// The bug of issue 9: a lock was held while podmon was dialled or started, so
// that the other callers' contexts and Close waited for a minute and more.
func TestConnectingHoldsUpNobody(t *testing.T) {
	dir := t.TempDir()
	silent, err := net.Listen("unix", filepath.Join(dir, "podmon.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	c := &Client{cfg: Config{Dir: dir, PodmonPath: filepath.Join(dir, "none"), Logger: slog.New(slog.DiscardHandler)}}
	c.life, c.stop = context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() {
		_, err := c.connect(t.Context())
		first <- err
	}()
	conn, err := silent.Accept() // it says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()

	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	began := time.Now()
	if _, err := c.connect(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a second caller: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := <-first; !errors.Is(err, ErrClosed) {
		t.Errorf("the first caller after Close: %v", err)
	}
	if took := time.Since(began); took > helloTime*9/10 {
		t.Errorf("it took %v", took)
	}
	if _, err := c.connect(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// The bug of issue 9: after an attempt that failed each of those who had waited for it
// made its own, one after the other, a minute each.
func TestFailedAttemptCountsForAll(t *testing.T) {
	dir := t.TempDir()
	c := &Client{cfg: Config{Dir: dir, PodmonPath: filepath.Join(dir, "none"), Logger: slog.New(slog.DiscardHandler)}}
	c.life, c.stop = context.WithCancel(t.Context())
	defer c.Close()
	under := &attempt{done: make(chan struct{})}
	_, err := c.reconnect(t.Context(), under)
	if !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("there is no program to start: %v", err)
	}
	c.connecting = under // as one sees it who came while it was under way
	if _, got := c.connect(t.Context()); !errors.Is(got, err) {
		t.Errorf("one who waited has %v, want the attempt's %v", got, err)
	}
	// An attempt whose caller went says nothing to others.
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	under = &attempt{done: make(chan struct{})}
	if _, err := c.reconnect(gone, under); err == nil || under.err != nil {
		t.Errorf("the attempt of a caller who went ended with %v, for others with %v", err, under.err)
	}
	<-under.done
}
