package pod

import (
	"context"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/slack"
)

// connect opens podmon's event stream and then lists, so that nothing falls
// between the two; it tries until podmon answers or ctx ends.
func (m *Manager) connect(ctx context.Context) (<-chan api.Event, error) {
	delay := 10 * time.Millisecond
	for {
		events, err := m.cfg.Runtime.Events(ctx)
		if err == nil {
			if err = m.list(ctx); err == nil {
				m.setFault("")
				return events, nil
			}
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		m.setFault(err.Error())
		klog.FromContext(ctx).Info("Container runtime does not answer, will retry", "err", err, "after", delay)
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(delay):
		}
		delay = min(2*delay, 5*time.Second)
	}
}

// listen passes podmon's events on, and lists again after a gap and from time
// to time.
func (m *Manager) listen(ctx context.Context, events <-chan api.Event) {
	tick := slack.NewTicker(resync)
	defer tick.Stop()
	clock := wallClock{last: time.Now()}
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if clock.wasSet(time.Now()) {
				m.refreshAll()
			}
			if err := m.list(ctx); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Containers could not be listed")
			}
		case e, ok := <-events:
			if !ok {
				klog.FromContext(ctx).Info("Event stream of the container runtime broke, opening it again")
				var err error
				if events, err = m.connect(ctx); err != nil {
					return
				}
				continue
			}
			m.onEvent(ctx, e)
		}
	}
}

// wallClock notices that the machine slept, or its clock was set: pods' tokens and certificates
// may have ended meanwhile, and nothing is due by the monotonic clock.
type wallClock struct {
	last  time.Time
	again int // so often it is said again: the servers may not have answered yet
}

func (c *wallClock) wasSet(now time.Time) bool {
	if (now.Round(0).Sub(c.last.Round(0)) - now.Sub(c.last)).Abs() > 10*time.Second {
		c.again = 3
	}
	c.last = now
	if c.again == 0 {
		return false
	}
	c.again--
	return true
}

// refreshAll renders all pods' changing volumes again.
func (m *Manager) refreshAll() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.workers {
		w.send(w.refresh)
	}
}

// endAll ends what podmon holds of a pod that has ended here. The caller holds
// mu.
func (m *Manager) endAll(rec podstate.Records) {
	m.wg.Go(func() {
		ctx, cancel := context.WithTimeout(m.ctx, teardownDeadline)
		defer cancel()
		end := func(id string, container bool) {
			if err := m.endStray(ctx, id, container); err != nil { // listed again in a minute
				klog.FromContext(ctx).Info("Left-over of an ended pod stays", "id", id, "err", err)
			}
		}
		for _, c := range rec.Containers {
			end(c.Container.ID, true)
		}
		for _, s := range rec.Sandboxes {
			end(s.Sandbox.ID, false)
			m.unroute(s.Sandbox.ID)
		}
	})
}

func (m *Manager) onEvent(ctx context.Context, e api.Event) {
	switch {
	case e.Kind == api.EventFenced:
		m.FailFenced(types.UID(e.ID))
	case e.Container != nil:
		m.deliver(nil, e.Container)
	case e.Sandbox != nil:
		m.deliver(e.Sandbox, nil)
	default:
		if err := m.list(ctx); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Containers could not be listed")
		}
	}
}

// recordsOf finds or makes the waiting records of a pod. The caller holds mu.
func (m *Manager) recordsOf(uid types.UID) *podstate.Records {
	r := m.records[uid]
	if r == nil {
		r = &podstate.Records{}
		m.records[uid] = r
	}
	return r
}

// deliver passes one status to its worker, or keeps it for the worker to
// come.
func (m *Manager) deliver(s *api.SandboxStatus, c *api.ContainerStatus) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var uid types.UID
	if s != nil {
		uid = types.UID(s.Sandbox.PodUID)
	} else {
		uid = m.routes[c.Container.SandboxID]
	}
	w := m.workers[uid]
	switch {
	case uid == "":
		return // of a sandbox already removed
	case w != nil && s != nil:
		w.send(func() { w.onSandbox(*s) })
	case w != nil:
		w.send(func() { w.onContainer(*c) })
	case !m.synced:
		m.recordsOf(uid).Put(s, c)
	}
}

// list takes all that podmon holds: for pods with a worker as news, for
// others as records that wait for one; after the API's list was seen such
// others are orphans.
func (m *Manager) list(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, apiDeadline)
	defer cancel()
	asOf := time.Now()
	m.mu.Lock()
	m.listing++
	m.mu.Unlock()
	sandboxes, containers, err := m.cfg.Runtime.List(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	defer func() {
		if m.listing--; m.listing == 0 {
			clear(m.unrouted)
		}
	}()
	if err != nil {
		return err
	}
	sandboxes = slices.DeleteFunc(sandboxes, func(s api.SandboxStatus) bool { return m.unrouted[s.Sandbox.ID] })
	listed := map[string]bool{}
	fresh := map[types.UID]*podstate.Records{}
	of := func(uid types.UID) *podstate.Records {
		if fresh[uid] == nil {
			fresh[uid] = &podstate.Records{}
		}
		return fresh[uid]
	}
	for i := range sandboxes {
		uid := types.UID(sandboxes[i].Sandbox.PodUID)
		m.routes[sandboxes[i].Sandbox.ID] = uid
		listed[sandboxes[i].Sandbox.ID] = true
		of(uid).Put(&sandboxes[i], nil)
	}
	for i := range containers {
		listed[containers[i].Container.ID] = true
		if uid := m.routes[containers[i].Container.SandboxID]; uid != "" && containers[i].State != api.StateStarting {
			of(uid).Put(nil, &containers[i])
		}
	}
	m.records = map[types.UID]*podstate.Records{}
	for uid, rec := range fresh {
		w := m.workers[uid]
		if w == nil {
			m.records[uid] = rec
			switch {
			case !m.synced || m.ctx.Err() != nil:
			case m.ended[uid]:
				m.endAll(m.take(uid))
			default:
				m.adopt(uid)
			}
			continue
		}
		w.send(func() {
			for _, s := range rec.Sandboxes {
				w.onSandbox(s)
			}
			for _, c := range rec.Containers {
				w.onContainer(c)
			}
			w.findStrays(*rec)
		})
	}
	for _, w := range m.workers {
		w.send(func() {
			w.lost(listed, asOf)
			w.lostPause(listed, asOf)
		})
	}
	return nil
}
