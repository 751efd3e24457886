package runtime

import (
	"context"
	"errors"
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
