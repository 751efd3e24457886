package main

import (
	"context"
	"log/slog"

	"github.com/coreos/go-systemd/v22/daemon"
)

// notifySystemd tells the service manager that this node is ready, with a line that
// says at what, and when ctx ends that it stops (sd_notify(3), Type=notify in the
// unit). A server is ready once it answers API requests, an agent when its port
// listens: servers find it whenever they come up.
// Without a service manager, which is without $NOTIFY_SOCKET, it does nothing.
// A manager that cannot be reached is logged: the node runs all the same.
func notifySystemd(ctx context.Context, log *slog.Logger, status string) error {
	// The library removes nothing from the environment (false): a clusterd that
	// replaces its own program by exec, see reexec, notifies again.
	if _, err := daemon.SdNotify(false, daemon.SdNotifyReady+"\nSTATUS="+status); err != nil {
		log.Warn("the service manager could not be notified", "err", err)
	}
	<-ctx.Done()
	if _, err := daemon.SdNotify(false, daemon.SdNotifyStopping); err != nil {
		log.Warn("the service manager could not be notified", "err", err)
	}
	return nil
}
