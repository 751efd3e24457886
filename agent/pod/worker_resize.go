package pod

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podstate"
)

// grant asks the node for what the spec wants.
func (w *worker) grant() {
	w.send(func() {}) // plan with the answer
	reason, message := w.m.grant(w.uid, w.pod)
	if reason == "" {
		for _, c := range podstate.Resizable(&w.pod.Spec) {
			w.obs.Allocated[c.Name] = c.Resources
		}
		w.obs.ResizePending, w.obs.ResizeErr = nil, nil
		w.refresh() // files may tell of its size
		w.event(v1.EventTypeNormal, "ResizeStarted", "Pod resize started: %s", sizeWords(w.pod))
		return
	}
	now, before := time.Now(), w.obs.ResizePending
	w.obs.ResizePending = &podstate.Fault{Reason: reason, Message: message, At: now, RetryAt: now.Add(podstate.ResizeRetry)}
	if before == nil || before.Message != message {
		w.event(v1.EventTypeWarning, "Resize"+reason, "Pod resize is %s: %s", strings.ToLower(reason), message)
	}
}

// sizeWords says what the containers are to have.
func sizeWords(pod *v1.Pod) string {
	var all []string
	for _, c := range podstate.Resizable(&pod.Spec) {
		words := []string{c.Name + ":"}
		for _, name := range []v1.ResourceName{v1.ResourceCPU, v1.ResourceMemory} {
			if q, ok := c.Resources.Requests[name]; ok {
				words = append(words, fmt.Sprintf("%s request %s", name, q.String()))
			}
			if q, ok := c.Resources.Limits[name]; ok {
				words = append(words, fmt.Sprintf("%s limit %s", name, q.String()))
			}
		}
		all = append(all, strings.Join(words, " "))
	}
	return strings.Join(all, "; ")
}

// grant gives a pod the part of the node that its spec asks for, or says why
// it cannot. One that has to wait is woken when another pod frees resources.
func (m *Manager) grant(uid types.UID, pod *v1.Pod) (reason, message string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if had := m.admitted[uid]; m.cfg.CPUs != nil && had != nil && !maps.Equal(podstate.ExclusiveCPUs(had), podstate.ExclusiveCPUs(pod)) {
		return v1.PodReasonInfeasible, "containers have processors of their own (static CPU manager policy): how many cannot change while the pod runs"
	}
	var others []*v1.Pod
	for id, p := range m.admitted {
		if id != uid {
			others = append(others, p)
		}
	}
	reason, message = podstate.Grantable(pod, m.cfg.Node(), others)
	if reason != "" {
		m.deferred[uid] = true
		return reason, message
	}
	delete(m.deferred, uid)
	if _, ok := m.admitted[uid]; ok {
		m.admitted[uid] = pod
	}
	m.roomLocked() // it may have become smaller
	return "", ""
}

// roomLocked tells those who wait for a part of the node that there may be one.
// The caller holds mu.
func (m *Manager) roomLocked() {
	for uid := range m.deferred {
		if w := m.workers[uid]; w != nil {
			w.send(func() {
				if f := w.obs.ResizePending; f != nil {
					f.RetryAt = time.Time{}
				}
			})
		}
	}
	clear(m.deferred)
}

// sizing is a container's cgroup to be written.
type sizing struct {
	id string
	to api.Resources
}

// resize writes what is allocated into the cgroups of the pod and of its
// running containers.
func (w *worker) resize() {
	w.obs.Resizing = true
	sandbox, before := w.obs.Sandbox, w.obs.ResizeErr
	limits := podstate.PodLimits(w.pod, w.obs.Allocated)
	var list []sizing
	applied := map[*podstate.Instance]v1.ResourceRequirements{}
	for _, c := range w.obs.Unapplied(&w.pod.Spec) {
		oc, to := w.obs.Containers[c.Name], w.obs.Allocated.Of(c)
		if oc.Op == podstate.OpNone && !podstate.NeedsRestart(c, oc.Now.Applied, to) {
			list = append(list, sizing{oc.Now.ID, podstate.ContainerResources(w.pod, to)})
			applied[oc.Now] = to
		}
	}
	w.background(createDeadline, func(ctx context.Context) func() {
		held, err := w.m.resize(ctx, sandbox, limits, list)
		w.m.weigh(ctx)
		return func() {
			w.obs.Resizing = false
			if w.obs.Sandbox.ID == sandbox.ID {
				w.obs.Sandbox.Limits = held
			}
			if err != nil {
				w.obs.ResizeErr = faulted(before, v1.PodReasonError, err)
				if w.obs.ResizeErr.News() {
					w.event(v1.EventTypeWarning, "ResizeError", "Pod resize failed, will be tried again: %v", err)
				}
				return
			}
			w.obs.ResizeErr = nil
			for i, r := range applied {
				i.Applied = r
			}
			if len(applied) > 0 && len(w.obs.Unapplied(&w.pod.Spec)) == 0 {
				w.event(v1.EventTypeNormal, "ResizeCompleted", "Pod resize completed: %s", sizeWords(podstate.Granted(w.pod, w.obs.Allocated)))
			}
		}
	})
}

// resize writes cgroups so that a container's limit is never above its pod's:
// the pod's are raised first and lowered last. held is what the pod's own
// cgroup has now.
func (m *Manager) resize(ctx context.Context, s podstate.Sandbox, limits api.Resources, list []sizing) (held api.Resources, err error) {
	held = s.Limits
	set := func(to api.Resources) error {
		to.CPUShares, to.CPUPeriod = limits.CPUShares, limits.CPUPeriod
		if err := m.cfg.Runtime.Update(ctx, api.Update{ID: s.ID, Resources: to}); err != nil {
			return fmt.Errorf("limits of the pod: %w", err)
		}
		held.CPUShares = to.CPUShares
		if to.CPUQuota != 0 {
			held.CPUQuota, held.CPUPeriod = to.CPUQuota, to.CPUPeriod
		}
		if to.MemoryLimit != 0 {
			held.MemoryLimit = to.MemoryLimit
		}
		return nil
	}
	raised := api.Resources{}
	if held.CPUQuota != 0 && limits.CPUQuota > held.CPUQuota {
		raised.CPUQuota = limits.CPUQuota
	}
	if held.MemoryLimit != 0 && limits.MemoryLimit > held.MemoryLimit {
		raised.MemoryLimit = limits.MemoryLimit
	}
	if raised.CPUQuota != 0 || raised.MemoryLimit != 0 {
		if err := set(raised); err != nil {
			return held, err
		}
	}
	for _, l := range list {
		err := m.cfg.Runtime.Update(ctx, api.Update{ID: l.id, Resources: l.to})
		if err != nil && !isNotFound(err) && !api.IsCode(err, api.CodeNotRunning) {
			return held, fmt.Errorf("limits of a container: %w", err)
		}
	}
	return held, set(limits)
}
