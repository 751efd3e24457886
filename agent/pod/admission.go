package pod

import (
	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/podstate"
)

// isNew tells whether no agent of this node has admitted the pod before.
func isNew(pod *v1.Pod) bool { return pod.Status.StartTime == nil }

// admit is the admission of a pod of which nothing runs here: nil, it may. byShutdown:
// it is refused as the machine is about to go down. The caller holds mu.
func (m *Manager) admit(pod *v1.Pod) (v *podstate.Verdict, byShutdown bool) {
	if v := m.refusedByShutdown(!isNew(pod)); v != nil {
		return v, true
	}
	if !isNew(pod) {
		return nil, false
	}
	if v := m.refusal(pod); v != nil {
		return v, false
	}
	return podstate.Admit(pod, m.cfg.Node(), m.holders()), false
}

// awaitsNode tells whether the admission of a new pod has to wait: its node
// affinity does not match the Node as last known, but the scheduler may have
// bound it by labels that the watch has not brought here yet. The Node is then
// read from the API, and the newest version of the pod is admitted by that one.
// The caller holds mu.
func (m *Manager) awaitsNode(pod *v1.Pod) bool {
	_, waits := m.awaiting[pod.UID]
	if !waits {
		held := m.records[pod.UID] != nil
		if m.cfg.ReadNode == nil || held || !isNew(pod) || podstate.MatchesNode(pod, m.cfg.Node()) {
			return false
		}
		m.wg.Go(func() { m.admitAfterRead(pod) })
	}
	m.awaiting[pod.UID] = pod
	return true
}

// admitAfterRead begins a pod whose admission waits for the Node to be read.
func (m *Manager) admitAfterRead(pod *v1.Pod) {
	m.cfg.ReadNode(m.ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	newest, waits := m.awaiting[pod.UID]
	delete(m.awaiting, pod.UID)
	if waits && m.ctx.Err() == nil {
		m.launch(m.begin(newest, false))
	}
}

// refusal is the part of a pod's admission that does not depend on other pods:
// what it asks for that this node does not do, and the node's pressures.
func (m *Manager) refusal(pod *v1.Pod) *podstate.Verdict {
	if v := m.unsupported(pod); v != nil {
		return v
	}
	if v := podstate.ForbiddenSysctl(pod, m.cfg.UnsafeSysctls); v != nil {
		return v
	}
	if m.cfg.Refuse == nil {
		return nil
	}
	if message := m.cfg.Refuse(pod); message != "" {
		return &podstate.Verdict{Reason: Evicted, Message: message}
	}
	return nil
}
