package pod

import (
	"context"
	"strconv"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/apis/core"
)

// lazyWrite is how long a status that is not urgent may be held back: it
// is usually overtaken by the next one within that time.
const lazyWrite = 100 * time.Millisecond

// statusState is the worker's account of what the API knows.
type statusState struct {
	built   *v1.PodStatus // as of the last turn
	stored  *v1.PodStatus // last acknowledged or seen
	writing bool
	dirty   time.Time // since when built differs from stored
	retryAt time.Time
	delay   time.Duration
}

// publish builds the status and sees to it that the API gets it: one write
// under way at a time, always of the newest. It returns when it has to be
// called again.
func (w *worker) publish(now time.Time) (wake time.Time) {
	old := w.status.built
	if old == nil {
		old = w.status.stored
	}
	old = withForeign(old, &w.pod.Status)
	st := podstate.BuildStatus(podstate.Desired{Pod: w.pod, Gone: w.gone}, w.obs, old, w.m.cfg.NodeIPs, now)
	w.status.built = st
	w.setView(st)
	w.startMetric(st, now)
	if core.FinalPhase(st.Phase) && !w.obs.Alive() {
		// Nothing of it runs any more. The scheduler gives its place away as
		// soon as it reads this: the next pod must not be refused here.
		w.m.release(w.uid)
	}
	if w.static {
		w.obs.StatusStored = w.keepEnd(st) // its end waits for no API
		return w.reflect(st, now)
	}
	same := podstate.SameStatus(st, w.status.stored)
	w.obs.StatusStored = same
	if same || w.gone {
		w.status.dirty = time.Time{}
		return wake
	}
	if w.status.dirty.IsZero() {
		w.status.dirty = now
	}
	if w.status.writing {
		return wake
	}
	at := w.status.retryAt
	if !w.urgent(st) {
		if lazy := w.status.dirty.Add(lazyWrite); lazy.After(at) {
			at = lazy
		}
	}
	if at.After(now) {
		return at
	}
	w.write(st)
	return wake
}

// urgent: a client waits for this status.
func (w *worker) urgent(st *v1.PodStatus) bool {
	if w.pod.DeletionTimestamp != nil || st.Phase != v1.PodPending || st.Phase != w.status.stored.Phase {
		return true
	}
	for _, t := range []v1.PodConditionType{v1.PodReady, v1.ContainersReady} {
		i, j := core.PodConditionIndex(st.Conditions, t), core.PodConditionIndex(w.status.stored.Conditions, t)
		if i >= 0 && j >= 0 && st.Conditions[i].Status != w.status.stored.Conditions[j].Status {
			return true
		}
	}
	return false
}

// write sends one status; the answer comes back into the loop.
func (w *worker) write(st *v1.PodStatus) {
	w.status.writing = true
	pod := w.pod
	w.background(apiDeadline, func(ctx context.Context) func() {
		if w.m.cfg.Ended != nil && core.FinalPhase(st.Phase) {
			if err := w.m.cfg.Ended(pod.UID); err != nil {
				klog.FromContext(ctx).Error(err, "A pod that has ended may be started again if the node boots without an API", "pod", klog.KObj(pod))
			}
		}
		got, err := w.m.writeStatus(ctx, pod, st)
		return func() {
			w.status.writing = false
			switch {
			case apierrors.IsNotFound(err):
				// The pod is gone; the watch will say so.
				w.status.stored, w.status.delay = st, 0
			case err != nil:
				w.status.delay = podstate.QuickBackOff(w.status.delay)
				w.status.retryAt = time.Now().Add(w.status.delay)
				klog.FromContext(w.ctx).Info("Status was not written, will retry", "err", err, "after", w.status.delay)
			default:
				w.status.stored, w.status.delay, w.status.retryAt = st, 0, time.Time{}
				w.status.dirty = time.Time{}
				if newer(got, w.pod) {
					w.setPod(got)
					w.status.stored = st
				}
			}
		}
	})
}

// writeStatus updates the status subresource. An update with the whole object
// costs the server far less than a patch; on a conflict the others' words are
// taken over and it is tried again.
func (m *Manager) writeStatus(ctx context.Context, pod *v1.Pod, st *v1.PodStatus) (*v1.Pod, error) {
	select {
	case m.writes <- struct{}{}:
		defer func() { <-m.writes }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	began := time.Now()
	defer func() { statusSeconds.Observe(time.Since(began).Seconds()) }()
	pods := m.cfg.Client.CoreV1().Pods(pod.Namespace)
	obj := *pod
	obj.Status = *st
	for try := 0; ; try++ {
		got, err := pods.UpdateStatus(ctx, &obj, metav1.UpdateOptions{})
		if err == nil || !apierrors.IsConflict(err) || try == 4 {
			return got, err
		}
		live, err := pods.Get(ctx, pod.Name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		if live.UID != pod.UID {
			return nil, apierrors.NewNotFound(v1.Resource("pods"), pod.Name)
		}
		obj = *live
		obj.Status = *withForeign(st, &live.Status)
	}
}

// withForeign is st with the conditions that others write taken from live.
func withForeign(st, live *v1.PodStatus) *v1.PodStatus {
	out := st.DeepCopy()
	out.Conditions = nil
	for _, c := range st.Conditions {
		if isOwned(c.Type) {
			out.Conditions = append(out.Conditions, c)
		}
	}
	for _, c := range live.Conditions {
		if !isOwned(c.Type) || !podstate.IsTransient(c.Type) && core.PodConditionIndex(out.Conditions, c.Type) < 0 {
			out.Conditions = append(out.Conditions, c)
		}
	}
	out.NominatedNodeName = live.NominatedNodeName
	out.Resize = live.Resize
	out.ResourceClaimStatuses, out.ExtendedResourceClaimStatus = live.ResourceClaimStatuses, live.ExtendedResourceClaimStatus
	out.NodeAllocatableResourceClaimStatuses = live.NodeAllocatableResourceClaimStatuses
	if core.FinalPhase(live.Phase) && !core.FinalPhase(out.Phase) {
		// Another writer failed the pod (eviction, garbage collection): that stands.
		out.Phase, out.Reason, out.Message = live.Phase, live.Reason, live.Message
	}
	return out
}

func isOwned(t v1.PodConditionType) bool {
	for _, o := range podstate.Owned {
		if o == t {
			return true
		}
	}
	return false
}

// newer reports whether a is a later version of the object than b.
func newer(a, b *v1.Pod) bool {
	x, err1 := strconv.ParseUint(a.ResourceVersion, 10, 64)
	y, err2 := strconv.ParseUint(b.ResourceVersion, 10, 64)
	if err1 != nil || err2 != nil {
		return a.ResourceVersion != b.ResourceVersion || a != b
	}
	return x > y
}

func (w *worker) mirrorUID() types.UID {
	if w.mirror.pod == nil {
		return ""
	}
	return w.mirror.pod.UID
}

func (w *worker) setView(st *v1.PodStatus) {
	v := &View{Pod: w.pod, Status: st, MirrorUID: w.mirrorUID(), SandboxID: w.obs.Sandbox.ID, Containers: make(map[string]ContainerView, len(w.obs.Containers))}
	for name, c := range w.obs.Containers {
		if c.Now == nil {
			v.Containers[name] = ContainerView{}
			continue
		}
		cv := ContainerView{ID: c.Now.ID, Running: c.Now.Running, Made: c.Now.ID != "", Attempt: c.Now.Attempt}
		if c.Now.Running {
			cv.Exited = w.exits[c.Now.ID]
		}
		if c.Last != nil {
			a := c.Last.Attempt
			cv.Previous = &a
		}
		v.Containers[name] = cv
	}
	if old := w.view.Swap(v); old == nil || old.Pod != v.Pod || old.SandboxID != v.SandboxID || !podstate.SameStatus(old.Status, v.Status) {
		w.m.changed(w.uid)
	}
}

// startMetric takes the time from first sight to Running, once.
func (w *worker) startMetric(st *v1.PodStatus, now time.Time) {
	if !w.ran && st.Phase == v1.PodRunning {
		w.ran = true
		podStartSeconds.Observe(now.Sub(w.since).Seconds())
	}
}
