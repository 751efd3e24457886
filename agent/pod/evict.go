package pod

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/agent/fence"
	"github.com/clusterd/clusterd/agent/podstate"
)

// Evicted is the reason of pods that the node ended, or did not take, because
// it ran short of something.
const Evicted = "Evicted"

// Evict ends a pod for good because the node runs short. hard: its containers
// get the shortest grace there is; else their own. Unknown pods, and those that
// have ended, are left alone.
func (m *Manager) Evict(uid types.UID, message string, hard bool) {
	m.evict(uid, message, hard, true)
}

// EvictOver ends a pod for good, and at once, because it uses more than it may.
// It has itself to blame: no DisruptionTarget tells that it was disturbed.
func (m *Manager) EvictOver(uid types.UID, message string) {
	m.evict(uid, message, true, false)
}

func (m *Manager) evict(uid types.UID, message string, hard, disrupted bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.workers[uid]
	if w == nil {
		return
	}
	w.send(func() {
		if podstate.Ending(podstate.Desired{Pod: w.pod, Gone: w.gone}, w.obs) {
			return // it goes anyway
		}
		grace := podstate.MinGrace
		if !hard {
			grace = podstate.Grace(defaultGrace)
			if g := w.pod.Spec.TerminationGracePeriodSeconds; g != nil {
				grace = podstate.Grace(*g)
			}
		}
		w.obs.EvictGrace, w.obs.Disrupted = &grace, disrupted
		w.fail(podstate.Verdict{Reason: Evicted, Message: message})
	})
}

// FailFenced ends a pod for good that podmon has ended because the node had lost
// its Lease: it may run elsewhere by now. Unknown pods, and those that have ended,
// are left alone.
func (m *Manager) FailFenced(uid types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.workers[uid]
	if w == nil {
		return
	}
	w.send(func() {
		if podstate.Ending(podstate.Desired{Pod: w.pod, Gone: w.gone}, w.obs) {
			return // it goes anyway
		}
		w.obs.EvictGrace, w.obs.Disrupted = new(podstate.MinGrace), true
		w.fail(podstate.Verdict{Reason: fence.Reason, Message: fence.Message})
	})
}

// guard has the pod end with the node's Lease, if it is one that is to.
func (m *Manager) guard(ctx context.Context, pod *v1.Pod, static bool) (guarded bool, err error) {
	if m.cfg.Fence == nil || static {
		return false, nil
	}
	return m.cfg.Fence.Guard(ctx, pod)
}

// unguard forgets a pod of which nothing is left.
func (m *Manager) unguard(ctx context.Context, uid string) error {
	if m.cfg.Fence == nil {
		return nil
	}
	return m.cfg.Fence.Drop(ctx, types.UID(uid))
}

// sweepFence forgets pods that ended while there was no agent.
func (m *Manager) sweepFence(ctx context.Context) error {
	if m.cfg.Fence == nil {
		return nil
	}
	return m.cfg.Fence.Sweep(ctx, func(uid types.UID) bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.workers[uid] != nil
	})
}
