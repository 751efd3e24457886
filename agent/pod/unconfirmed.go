package pod

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// A pod is *unconfirmed* that was started without the API, as it was last known to be:
// after a boot with no server in reach. The API's first list of the node's pods confirms
// it, with all that changed meanwhile; one that is not on the list ends as a pod does
// that was deleted by force. Until then podmon's other containers and the directories of
// other pods are left alone, as before any first list.

// awaitUnconfirmed starts pods without the API if that is asked for before its list came.
func (m *Manager) awaitUnconfirmed(ctx context.Context) {
	select {
	case pods := <-m.cfg.Unconfirmed:
		m.startUnconfirmed(pods)
	case <-m.seen:
	case <-ctx.Done():
	}
}

func (m *Manager) startUnconfirmed(pods []*v1.Pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, pod := range pods {
		if m.synced || m.ctx.Err() != nil {
			return
		}
		if m.workers[pod.UID] != nil || m.ended[pod.UID] {
			continue
		}
		w := m.begin(pod, false)
		w.unconfirmed.Store(true)
		m.launch(w)
	}
}

// confirm notes that the API has the pod. The caller holds mu.
func (m *Manager) confirm(w *worker) {
	if w.unconfirmed.CompareAndSwap(true, false) {
		w.send(func() {
			w.event(v1.EventTypeNormal, "StartedWithoutAPI", "The node had started the pod from its own record, as the API did not answer; the pod is confirmed now")
		})
	}
}

// dropUnconfirmed ends the pods that the API's first list does not have. The caller
// holds mu.
func (m *Manager) dropUnconfirmed() {
	for _, w := range m.workers {
		if w.unconfirmed.CompareAndSwap(true, false) {
			klog.FromContext(m.ctx).Info("A pod that was started without the API is no more: it ends", "pod", klog.KObj(w.view.Load().Pod), "uid", w.uid)
			w.removed = true
			w.send(w.setGone)
		}
	}
}

func (m *Manager) isUnconfirmed(uid types.UID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.workers[uid]
	return w != nil && w.unconfirmed.Load()
}

// changed passes on that a pod's object, status or sandbox has changed, or its worker ended.
func (m *Manager) changed(uid types.UID) {
	if m.cfg.Changed != nil {
		m.cfg.Changed(uid)
	}
}
