package pod

import (
	"context"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/claim"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/apis/core"
)

// A pod is *unconfirmed* that was started without the API, as it was last known to be:
// after a boot with no server in reach. The API's first list of the node's pods confirms
// it, with all that changed meanwhile; one that is not on the list ends as a pod does
// that was deleted by force, and what replaces it waits for that. Until then podmon's other containers and the directories of
// other pods are left alone, as before any first list.

// awaitUnconfirmed starts pods without the API if that is asked for before its list came,
// and ends those that are not on it.
func (m *Manager) awaitUnconfirmed(ctx context.Context, listed <-chan struct{}) {
	select {
	case pods := <-m.cfg.Unconfirmed:
		m.startUnconfirmed(pods, listed)
	case <-listed:
	case <-ctx.Done():
		return
	}
	select {
	case <-listed:
	case <-ctx.Done():
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dropUnconfirmed()
	close(m.taken)
	m.takeBehind()
}

// Listed is closed when the API's list of the node's pods has been taken. Static pods may
// not have been read by then: see Seen.
func (m *Manager) Listed() <-chan struct{} { return m.taken }

func (m *Manager) startUnconfirmed(pods []*v1.Pod, listed <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	select {
	case <-listed:
		return
	default:
	}
	for _, pod := range pods {
		if m.synced || m.ctx.Err() != nil {
			return
		}
		if m.workers[pod.UID] != nil || m.ended[pod.UID] || m.replaced(pod) {
			continue
		}
		w := m.begin(pod, false)
		w.unconfirmed.Store(true)
		m.launch(w)
	}
}

// replaced reports whether a pod runs that may be there in place of an older one: part of the
// API's list has come. The caller holds mu.
func (m *Manager) replaced(old *v1.Pod) bool {
	for _, w := range m.workers {
		if !w.static && !w.unconfirmed.Load() && replaces(w.view.Load().Pod, old) {
			return true
		}
	}
	return false
}

// standsBehind reports whether a pod has to wait that is new to the node: one that was started
// without the API has its name, a claim or a host port of it, and may be what it replaces. That
// one is confirmed or ends first. The caller holds mu.
func (m *Manager) standsBehind(pod *v1.Pod) bool {
	delete(m.behind, pod.UID)
	if m.records[pod.UID] != nil || pod.DeletionTimestamp != nil || core.FinalPhase(pod.Status.Phase) {
		return false
	}
	for _, w := range m.workers {
		if (w.unconfirmed.Load() || w.dropped) && w.uid != pod.UID && replaces(pod, w.view.Load().Pod) {
			m.behind[pod.UID] = pod
			return true
		}
	}
	return false
}

// takeBehind begins the pods that need not wait any more. The caller holds mu.
func (m *Manager) takeBehind() {
	for _, pod := range m.behind {
		if m.ctx.Err() == nil && !m.standsBehind(pod) && !m.awaitsNode(pod) {
			m.launch(m.begin(pod, false))
		}
	}
}

// replaces reports whether a may be there in place of b: they must not run at a time.
func replaces(a, b *v1.Pod) bool {
	if fullName(a) == fullName(b) {
		return true
	}
	claims := sets.New[string]()
	for i := range b.Spec.Volumes {
		claims.Insert(claim.NameOf(b, &b.Spec.Volumes[i]))
	}
	for i := range a.Spec.Volumes {
		if name := claim.NameOf(a, &a.Spec.Volumes[i]); name != "" && a.Namespace == b.Namespace && claims.Has(name) {
			return true
		}
	}
	ports := podstate.HostPorts(b)
	return slices.ContainsFunc(podstate.HostPorts(a), func(p podstate.HostPort) bool {
		return slices.ContainsFunc(ports, func(q podstate.HostPort) bool { return p.Protocol == q.Protocol && p.HostPort == q.HostPort })
	})
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
			w.removed, w.dropped = true, true
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
