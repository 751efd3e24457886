package main

import (
	"context"

	"github.com/coreos/go-systemd/v22/daemon"
)

// notifySystemd tells the service manager that this node answers API requests
// and, when ctx ends, that it stops (sd_notify(3), Type=notify in the unit).
// Without a service manager, which is without $NOTIFY_SOCKET, it does nothing.
// A manager that cannot be reached is logged: the node runs all the same.
func (m *Main) notifySystemd(ctx context.Context) error {
	// The library removes nothing from the environment (false): a clusterd that
	// replaces its own program by exec, see runAgain, notifies again.
	if _, err := daemon.SdNotify(false, daemon.SdNotifyReady+"\nSTATUS=answers at "+m.cfg.addr().String()); err != nil {
		m.log.Warn("the service manager could not be notified", "err", err)
	}
	<-ctx.Done()
	if _, err := daemon.SdNotify(false, daemon.SdNotifyStopping); err != nil {
		m.log.Warn("the service manager could not be notified", "err", err)
	}
	return nil
}
