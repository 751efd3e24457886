package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/servers"
)

// runsAsService has this process be one that a service manager runs; with an empty
// socket it is none.
func runsAsService(t *testing.T, socket string) {
	t.Helper()
	t.Setenv(notifyEnv, socket)
	before := notifySocket
	notifySocket = socket
	t.Cleanup(func() { notifySocket = before })
}

// TestNotifySystemd is a service manager: it hears that the node is ready,
// and that it stops.
func TestNotifySystemd(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "notify")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer manager.Close()
	runsAsService(t, socket)
	hideNotifySocket()
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

	// The bug: k8s.io/apiserver does this when it serves. It said that a server was ready
	// before it was, and took the socket away from whoever asked for it after that.
	if sent, err := daemon.SdNotify(true, daemon.SdNotifyReady); sent || err != nil {
		t.Errorf("a library's message was sent: %t, %v", sent, err)
	}
	// How it ends: it is asked to, a part fails, or it goes on with another program, as
	// in a roll-out. Of that systemd must not hear that it stops: it kills after 90 s.
	for _, tt := range []struct {
		name string
		ends error
		want string
	}{
		{"asked to stop", nil, "STOPPING=1"},
		{"a part fails", errors.New("no disk"), "STOPPING=1"},
		{"another program", &reexecError{why: "this node goes on with version v2"}, "STATUS=starts again: this node goes on with version v2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := &group{log: slog.New(slog.DiscardHandler)}
			heard := make(chan struct{})
			g.add("store", func(ctx context.Context) error {
				select {
				case <-ctx.Done():
					return nil
				case <-heard:
					return tt.ends
				}
			})
			g.add("ready", func(ctx context.Context) error { return notifySystemd(ctx, g.log, "answers at 192.0.2.7:6443") })
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			done := make(chan error, 1)
			go func() { done <- g.run(ctx) }()
			if got := hear(); !strings.HasPrefix(got, "READY=1\n") || !strings.Contains(got, "192.0.2.7:6443") {
				t.Errorf("ready: %q", got)
			}
			if tt.ends != nil {
				close(heard)
			} else {
				stop()
			}
			if got := hear(); got != tt.want {
				t.Errorf("at the end: %q, want %q", got, tt.want)
			}
			if err := <-done; !errors.Is(err, tt.ends) {
				t.Errorf("the group: %v", err)
			}
		})
	}
}

// TestAgentNotifies: an agent is ready when its port listens, with no server there to
// answer it, and whatever comes of its containers.
func TestAgentNotifies(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "notify")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer manager.Close()
	runsAsService(t, socket)
	now := time.Now()
	ca, err := pki.NewCA("c", now)
	if err != nil {
		t.Fatal(err)
	}
	id := &nodedir.Identity{Trust: pki.NewTrust(0, ca)}
	if id.Key, err = pki.NewKey(); err != nil {
		t.Fatal(err)
	}
	if id.Cert, err = ca.IssueAgent(id.Key.Public(), "a1", now); err != nil {
		t.Fatal(err)
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cfg := defaultConfig()
	cfg.Name, cfg.Data, cfg.Advertise, cfg.KubeletPort = "a1", t.TempDir(), "127.0.0.1", 0
	cfg.ShutdownGracePeriod = Duration{} // this machine's shutdowns are not the test's
	cfg.Port = uint16(free.Addr().(*net.TCPAddr).Port)
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	dir := nodedir.KeyDir{Dir: nodedir.Dir(cfg.Data)}
	if err := dir.WriteIdentity(id); err != nil {
		t.Fatal(err)
	}
	list, err := servers.Encode([]join.ServerAddr{{ID: "s", Name: "s1", Addr: netip.MustParseAddrPort("127.0.0.1:1")}})
	if err != nil {
		t.Fatal(err)
	}
	if err := dir.WriteServers(list); err != nil {
		t.Fatal(err)
	}
	// No container is started here.
	if err := os.WriteFile(dir.Path("podmon"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- runAgentNode(ctx, cfg, slog.New(slog.DiscardHandler)) }()
	if err := manager.SetReadDeadline(now.Add(2 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	message := make([]byte, 512)
	n, err := manager.Read(message)
	if err != nil || !strings.HasPrefix(string(message[:n]), "READY=1\n") {
		t.Errorf("%q, %v", message[:n], err)
	}
	cancel()
	<-ended
}

// TestNoServiceManager: without one nothing is notified and nothing fails.
func TestNoServiceManager(t *testing.T) {
	runsAsService(t, "")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := notifySystemd(ctx, slog.New(slog.DiscardHandler), "answers at 192.0.2.7:6443"); err != nil {
		t.Error(err)
	}
}
