package pod

import "k8s.io/apimachinery/pkg/types"

// Views lists the pods of the node as the workers see them.
func (m *Manager) Views() []*View {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]*View, 0, len(m.workers))
	for _, w := range m.workers {
		if v := w.view.Load(); v != nil {
			out = append(out, v)
		}
	}
	return out
}

// View is the pod as its worker sees it.
func (m *Manager) View(uid types.UID) (*View, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.workers[uid]; w != nil {
		return w.view.Load(), true
	}
	return nil, false
}

// Find looks up a pod by namespace and name, and UID if that is not empty.
func (m *Manager) Find(namespace, name string, uid types.UID) (*View, bool) {
	for _, v := range m.Views() {
		if v.Pod.Namespace == namespace && v.Pod.Name == name && (uid == "" || v.Pod.UID == uid || v.MirrorUID == uid) {
			return v, true
		}
	}
	return nil, false
}
