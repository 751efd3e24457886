package pod

import (
	"context"
	"errors"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podstate"
)

// devicesDeadline bounds one try to have devices prepared, or taken back.
const devicesDeadline = 2 * time.Minute

var errNoDevices = errors.New("this node has no API, which says what the pod's resourceClaims were given")

// prepareDevices has drivers and plugins prepare the pod's devices.
func (w *worker) prepareDevices() {
	d := &w.obs.Devices
	before, pod, devices := d.Err, w.pod, w.m.cfg.Devices
	d.Preparing, d.Since, d.Held = true, time.Now(), devices != nil
	ctx, cancel := context.WithTimeout(w.ctx, devicesDeadline)
	w.preparing = cancel
	ctx, ended := w.traced(ctx)
	w.wg.Go(func() {
		defer cancel()
		var err error
		held := false
		if devices == nil && podstate.UsesClaims(pod) {
			err = errNoDevices
		} else if devices != nil {
			err = devices.Prepare(ctx, pod)
			held = devices.Held(pod.UID)
		}
		given := errors.Is(ctx.Err(), context.Canceled) // up, since the pod ends
		ended()
		w.send(func() {
			w.preparing = nil
			*d = podstate.Devices{Ready: err == nil, Held: held}
			if err == nil || given {
				return
			}
			d.Err = faulted(before, podstate.ReasonPrepareDevices, err)
			if d.Err.News() {
				w.event(v1.EventTypeWarning, d.Err.Reason, "%s", err)
			}
		})
	})
}

// releaseDevices has drivers take back what they have prepared for the pod.
func (w *worker) releaseDevices() {
	d := &w.obs.Devices
	d.Releasing, d.Since = true, time.Now()
	before, devices := w.obs.TeardownErr, w.m.cfg.Devices
	w.background(devicesDeadline, func(ctx context.Context) func() {
		err := devices.Unprepare(ctx, w.uid)
		return func() {
			d.Releasing = false
			if err != nil {
				w.obs.TeardownErr = faulted(before, podstate.ReasonKillPod, err)
				if w.obs.TeardownErr.News() {
					w.event(v1.EventTypeWarning, podstate.ReasonKillPod, "error killing pod: %v", err)
				}
				return
			}
			*d, w.obs.TeardownErr = podstate.Devices{}, nil
		}
	})
}

// DevicesChanged makes every pod look again at once that waits for devices or for
// their driver: some are free, or one has come.
func (m *Manager) DevicesChanged() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.workers {
		w.send(func() {
			if f := w.obs.Devices.Err; f != nil {
				f.RetryAt = time.Time{}
			}
			if f := w.obs.TeardownErr; f != nil && w.obs.Devices.Held {
				f.RetryAt = time.Time{}
			}
		})
	}
}

// inject gives a container its devices.
func (m *Manager) inject(ctx context.Context, pod *v1.Pod, c *v1.Container, to *api.Container) error {
	if m.cfg.Devices == nil {
		return nil
	}
	return m.cfg.Devices.Inject(ctx, pod, c, to)
}

// sweepDevices has devices taken back that pods had which are no more.
func (m *Manager) sweepDevices(ctx context.Context) {
	if m.cfg.Devices == nil {
		return
	}
	uids, err := m.cfg.Devices.Pods()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Devices of pods that are no more stay prepared")
		return
	}
	for _, uid := range uids {
		if !m.works(uid) {
			m.wg.Go(func() { m.releaseLater(ctx, uid) })
		}
	}
}

// works reports whether the pod has a worker.
func (m *Manager) works(uid types.UID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.workers[uid] != nil
}

// releaseLater has the devices of a deleted pod taken back: their driver
// may register later than the agent starts.
func (m *Manager) releaseLater(ctx context.Context, uid types.UID) {
	for wait := time.Second; ; wait = min(2*wait, time.Minute) {
		try, cancel := context.WithTimeout(ctx, devicesDeadline)
		err := m.cfg.Devices.Unprepare(try, uid)
		cancel()
		if err == nil {
			klog.FromContext(ctx).Info("Devices of a deleted pod are unprepared", "uid", uid)
			return
		}
		if ctx.Err() != nil {
			return
		}
		klog.FromContext(ctx).Info("Devices of a deleted pod were not unprepared, will retry", "uid", uid, "err", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}
