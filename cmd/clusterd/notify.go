package main

import (
	"context"
	"errors"
	"log/slog"
	"os"

	"github.com/coreos/go-systemd/v22/daemon"
)

const notifyEnv = "NOTIFY_SOCKET"

// notifySocket is the address of the service manager's socket (sd_notify(3)); empty:
// systemd does not run this process as a service. It is read when the process starts:
// k8s.io/apiserver takes it out of the environment later.
var notifySocket = os.Getenv(notifyEnv)

// hideNotifySocket takes the socket out of the environment. k8s.io/apiserver would
// say there that the server is ready as soon as it listens, and podmon would inherit it.
func hideNotifySocket() { _ = os.Unsetenv(notifyEnv) }

// restoreNotifySocket puts it back, for a program that takes this one's place.
func restoreNotifySocket() {
	if notifySocket != "" {
		_ = os.Setenv(notifyEnv, notifySocket)
	}
}

// notifySystemd tells the service manager that this node is ready, with a line that
// says at what, and when ctx ends that it stops (sd_notify(3), Type=notify in the
// unit). A server is ready once it answers API requests, an agent when its port
// listens: servers find it whenever they come up.
// A process that goes on with another program does not stop: the manager would kill it
// once TimeoutStopSec is over, whatever the new program says.
// Without a service manager it does nothing. A manager that cannot be reached is
// logged: the node runs all the same.
func notifySystemd(ctx context.Context, log *slog.Logger, status string) error {
	notify := func(state string) {
		restoreNotifySocket()
		if _, err := daemon.SdNotify(true, state); err != nil { // true: it is hidden again
			log.Warn("the service manager could not be notified", "err", err)
		}
	}
	notify(daemon.SdNotifyReady + "\nSTATUS=" + status)
	<-ctx.Done()
	if again := (*reexecError)(nil); errors.As(context.Cause(ctx), &again) {
		notify("STATUS=starts again: " + again.why)
		return nil
	}
	notify(daemon.SdNotifyStopping)
	return nil
}
