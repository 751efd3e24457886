package pod

import (
	"context"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/image"
)

// progressFirst is after what time a pull says how far it is; from then on after twice
// the time each: clients drop events of an object that has too many.
const progressFirst = 30 * time.Second

// tellPull makes events of how far a pull is until stop is called.
func (m *Manager) tellPull(ctx context.Context, ref string, tell func(kind, reason, msg string)) (stop func()) {
	full, err := image.Normalize(ref)
	if err != nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for wait := progressFirst; ; wait *= 2 {
			timer := time.NewTimer(wait)
			select {
			case <-timer.C:
			case <-ctx.Done():
				timer.Stop()
				return
			}
			for _, p := range m.cfg.Images.Pulling() {
				if p.Ref == full {
					tell(v1.EventTypeNormal, "Pulling", fmt.Sprintf("Pulling image %q: %s of %s are here", ref, mebibytes(p.Done), mebibytes(p.Total)))
				}
			}
		}
	})
	return func() { cancel(); wg.Wait() }
}

func mebibytes(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }
