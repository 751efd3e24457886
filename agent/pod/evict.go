package pod

import (
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
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
		if ending(Desired{Pod: w.pod, Gone: w.gone}, w.obs) {
			return // it goes anyway
		}
		grace := minGrace
		if !hard {
			grace = seconds(30)
			if g := w.pod.Spec.TerminationGracePeriodSeconds; g != nil {
				grace = seconds(*g)
			}
		}
		w.obs.EvictGrace, w.obs.Disrupted = &grace, disrupted
		w.fail(Verdict{Evicted, message})
	})
}

// refusal is the part of a pod's admission that does not depend on other pods:
// what it asks for that this node does not do, and the node's pressures.
func (m *Manager) refusal(pod *v1.Pod) *Verdict {
	if v := m.unsupported(pod); v != nil {
		return v
	}
	if v := forbiddenSysctl(pod, m.cfg.UnsafeSysctls); v != nil {
		return v
	}
	if m.cfg.Refuse == nil {
		return nil
	}
	if message := m.cfg.Refuse(pod); message != "" {
		return &Verdict{Evicted, message}
	}
	return nil
}
