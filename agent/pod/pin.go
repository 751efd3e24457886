package pod

import (
	"context"
	"maps"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/cpuset"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podstate"
)

// CPUs knows which processors a container may run on: *cpu.Manager. Methods may
// be called concurrently; they write at most one small file.
type CPUs interface {
	// Assign gives the pod's containers so many processors of their own, all
	// or none; a pod that has some keeps them.
	Assign(podUID string, want map[string]int) error
	Release(podUID string) error
	// Pods are those that have some.
	Pods() []string
	// Of gives the container's processors; own: they are exclusive.
	Of(podUID, container string) (set cpuset.CPUSet, own bool)
}

// cpusOf gives the processors of one container of the pod. An init container
// runs on those that the pod's app containers will have, if they are as many as
// it asks for.
func (m *Manager) cpusOf(pod *v1.Pod, name string) (set cpuset.CPUSet, own bool) {
	uid := string(pod.UID)
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		if c.Name != name || podstate.InitKind(c) == podstate.KindSidecar {
			continue
		}
		apps := cpuset.New()
		for j := range pod.Spec.Containers {
			if set, own := m.cfg.CPUs.Of(uid, pod.Spec.Containers[j].Name); own {
				apps = apps.Union(set)
			}
		}
		if q := c.Resources.Limits[v1.ResourceCPU]; !q.IsZero() && q.MilliValue()%1000 == 0 && q.Value() <= int64(apps.Size()) {
			return apps, true
		}
	}
	return m.cfg.CPUs.Of(uid, name)
}

// assignCPUs is the part of a pod's admission that concerns processors. The
// caller holds mu.
func (m *Manager) assignCPUs(pod *v1.Pod) error {
	if m.cfg.CPUs == nil {
		return nil
	}
	return m.cfg.CPUs.Assign(string(pod.UID), podstate.ExclusiveCPUs(pod))
}

// releaseCPUs gives the pod's processors to those that share. It does not
// block but for a small file.
func (m *Manager) releaseCPUs(uid types.UID) {
	if m.cfg.CPUs == nil {
		return
	}
	if err := m.cfg.CPUs.Release(string(uid)); err != nil {
		klog.Background().Error(err, "Release of a pod's processors was not written", "uid", uid)
	}
	m.wantPin()
}

// releaseStaleCPUs gives back what pods had that are no more.
func (m *Manager) releaseStaleCPUs() {
	if m.cfg.CPUs == nil {
		return
	}
	m.mu.Lock()
	live := maps.Clone(m.admitted)
	m.mu.Unlock()
	for _, uid := range m.cfg.CPUs.Pods() {
		if live[types.UID(uid)] == nil {
			m.releaseCPUs(types.UID(uid))
		}
	}
	m.wantPin()
}

// wantPin asks for a look at where containers run.
func (m *Manager) wantPin() {
	select {
	case m.pins <- struct{}{}:
	default:
	}
}

// keepPinned moves containers whenever it was asked for, until ctx ends.
func (m *Manager) keepPinned(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.pins:
			m.pin(ctx)
		}
	}
}

// pin moves running containers to the processors that they are to be on. When
// it returns, no other container runs on exclusive processors, except one that is
// being started: that one is checked again when it runs.
func (m *Manager) pin(ctx context.Context) {
	m.pinning.Lock()
	defer m.pinning.Unlock()
	sandboxes, containers, err := m.cfg.Runtime.List(ctx)
	if err != nil {
		klog.FromContext(ctx).Info("Containers stay on their processors until podmon answers", "err", err)
		return
	}
	pods := map[string]*v1.Pod{}
	m.mu.Lock()
	for _, s := range sandboxes {
		pods[s.Sandbox.ID] = m.admitted[types.UID(s.Sandbox.PodUID)]
	}
	m.mu.Unlock()
	for _, c := range containers {
		pod := pods[c.Container.SandboxID]
		if pod == nil || c.State != api.StateRunning {
			continue
		}
		set, _ := m.cpusOf(pod, c.Container.Name)
		if set.String() == c.Container.Resources.CpusetCpus {
			continue
		}
		err := m.cfg.Runtime.Update(ctx, api.Update{ID: c.Container.ID, Resources: api.Resources{CpusetCpus: set.String()}})
		if err != nil && !isNotFound(err) && !api.IsCode(err, api.CodeNotRunning) {
			klog.FromContext(ctx).Error(err, "Container stays on its processors", "namespace", pod.Namespace, "pod", pod.Name, "container", c.Container.Name, "cpus", set)
		}
	}
}
