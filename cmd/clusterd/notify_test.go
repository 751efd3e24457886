package main

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestNotifySystemd is a service manager: it hears that the node is ready,
// and that it stops.
func TestNotifySystemd(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "notify")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer manager.Close()
	t.Setenv("NOTIFY_SOCKET", socket)
	hear := func() string {
		t.Helper()
		if err := manager.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
			t.Fatal(err)
		}
		message := make([]byte, 512)
		n, err := manager.Read(message)
		if err != nil {
			t.Fatal(err)
		}
		return string(message[:n])
	}

	m := &Main{cfg: Config{Advertise: "192.0.2.7", Port: 6443}, log: slog.New(slog.DiscardHandler)}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.notifySystemd(ctx) }()
	if got := hear(); !strings.HasPrefix(got, "READY=1\n") || !strings.Contains(got, "192.0.2.7:6443") {
		t.Errorf("ready: %q", got)
	}
	cancel()
	if got := hear(); got != "STOPPING=1" {
		t.Errorf("stopping: %q", got)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestNoServiceManager: without one nothing is notified and nothing fails.
func TestNoServiceManager(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	m := &Main{cfg: Config{Advertise: "192.0.2.7", Port: 6443}, log: slog.New(slog.DiscardHandler)}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.notifySystemd(ctx); err != nil {
		t.Error(err)
	}
}
