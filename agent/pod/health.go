package pod

import (
	"context"
	"fmt"
	"time"

	"k8s.io/klog/v2"
)

// Every healthPeriod podmon is asked whether it answers. One that is silent for
// healthDeadline makes the node not ready, until it has answered again. A busy
// machine's podmon answers in milliseconds: the question waits for no other.
const (
	healthPeriod   = 5 * time.Second
	healthDeadline = 10 * time.Second
)

// watchRuntime keeps what RuntimeFault says of a podmon that lives and does
// nothing. What breaks its stream of events is connect's.
func (m *Manager) watchRuntime(ctx context.Context) {
	for ctx.Err() == nil {
		attempt, cancel := context.WithTimeout(ctx, healthDeadline)
		err := m.cfg.Runtime.Ping(attempt)
		cancel()
		if ctx.Err() != nil {
			return
		}
		pause := healthPeriod
		if err != nil {
			klog.FromContext(ctx).Info("Container runtime does not answer", "err", err)
			m.setHung(fmt.Sprintf("it does not answer: %v", err))
			pause = healthPeriod / 5 // to see soon that it is back
		} else {
			m.setHung("")
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}
