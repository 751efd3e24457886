package pod

import (
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/apis/core"
)

// Words of the kubelet's about a machine that goes down; the reason of pods that ran
// is podstate.ReasonTerminated.
const (
	reasonRefused     = "NodeShutdown"
	messageRefused    = "Pod was rejected as the node is shutting down."
	messageTerminated = "Pod was terminated in response to imminent node shutdown."
)

// SetShutdown says whether the machine is about to go down. While it is, new pods
// are refused. When it is not any more (the shutdown was cancelled), static pods
// that it ended or refused are begun again; pods of the API have ended for good, and
// their controllers have made others.
func (m *Manager) SetShutdown(on bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.shutdown = on
	if on {
		return
	}
	for _, w := range m.workers {
		if w.static {
			w.send(func() { w.again = w.shutdown })
		}
	}
}

// Active are the pods of the node that have not ended.
func (m *Manager) Active() []*v1.Pod {
	var out []*v1.Pod
	for _, v := range m.Views() {
		if !core.FinalPhase(v.Status.Phase) {
			out = append(out, v.Pod)
		}
	}
	return out
}

// Terminate ends a pod for good because the machine goes down: its containers get
// the pod's own grace period, but no more than most. left is closed when they have
// ended, the API has their last status, and nothing of the pod is mounted any more.
// One that is ending already keeps its reason; of one that is not known nothing is
// left.
func (m *Manager) Terminate(uid types.UID, most time.Duration) (left <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.workers[uid]
	if w == nil {
		none := make(chan struct{})
		close(none)
		return none
	}
	w.send(func() { w.terminate(most) })
	return w.left
}

// terminate is Terminate, in the loop.
func (w *worker) terminate(most time.Duration) {
	if podstate.Ending(podstate.Desired{Pod: w.pod, Gone: w.gone}, w.obs) {
		return // it goes anyway
	}
	grace := podstate.Grace(defaultGrace)
	if g := w.pod.Spec.TerminationGracePeriodSeconds; g != nil {
		grace = podstate.Grace(*g)
	}
	grace = max(min(grace, most), podstate.MinGrace)
	w.obs.EvictGrace, w.obs.Disrupted, w.shutdown = &grace, true, true
	w.fail(podstate.Verdict{Reason: podstate.ReasonTerminated, Message: messageTerminated})
}

// defaultGrace is the grace period, in seconds, of a pod that does not say one.
const defaultGrace = 30

// refusedByShutdown is why a pod that is new to a node about to go down is not begun;
// nil: the node is not. accepted: an agent of before had taken it. The caller holds mu.
func (m *Manager) refusedByShutdown(accepted bool) *podstate.Verdict {
	switch {
	case !m.shutdown:
		return nil
	case accepted:
		return &podstate.Verdict{Reason: podstate.ReasonTerminated, Message: messageTerminated}
	}
	return &podstate.Verdict{Reason: reasonRefused, Message: messageRefused}
}

// afterShutdown lets a static pod that the shutdown ended be begun again, once the
// shutdown was cancelled and nothing of the pod is left; and tells who waits that
// nothing is.
func (w *worker) afterShutdown() {
	if !w.obs.TornDown {
		return
	}
	w.leftOnce.Do(func() { close(w.left) })
	if w.again {
		w.obs.Finished = true // the manager begins it
	}
}
