package deviceplugin

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/clusterd/clusterd/agent/cdi"
	podmon "github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podstate"
)

// asked is what a container asks for of a resource.
type asked struct {
	container, resource string
	count               int
	// ends: it is an init container that has ended before the next one starts, so
	// that what it has is theirs.
	ends bool
}

// askedBy are what the containers of a pod ask for of plugins, in the order in
// which they start.
func (m *Manager) askedBy(pod *v1.Pod) []asked {
	m.mu.Lock()
	known := slices.Clone(m.state.Resources)
	m.mu.Unlock()
	var out []asked
	of := func(c *v1.Container, ends bool) {
		for _, name := range known {
			if q := c.Resources.Limits[v1.ResourceName(name)]; q.Value() > 0 && !claimed(pod, c.Name, name) {
				out = append(out, asked{c.Name, name, int(q.Value()), ends})
			}
		}
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		of(c, podstate.InitKind(c) == podstate.KindInit)
	}
	for i := range pod.Spec.Containers {
		of(&pod.Spec.Containers[i], false)
	}
	return out
}

// claimed reports whether a claim gives a container what it asks for of a resource.
func claimed(pod *v1.Pod, container, name string) bool {
	e := pod.Status.ExtendedResourceClaimStatus
	return e != nil && slices.ContainsFunc(e.RequestMappings, func(r v1.ContainerExtendedResourceRequest) bool {
		return r.ContainerName == container && r.ResourceName == name
	})
}

// Prepare gives the pod's containers the devices that they ask for of plugins.
// What they have already needs no plugin. It can be called again after whatever
// went wrong.
func (m *Manager) Prepare(ctx context.Context, pod *v1.Pod) error {
	if err := m.load(); err != nil {
		return err
	}
	spare := map[string][]string{} // by resource: what init containers leave
	for _, a := range m.askedBy(pod) {
		got, err := m.allocate(ctx, pod.UID, a, spare[a.resource])
		if err != nil {
			return fmt.Errorf("container %s: %w", a.container, err)
		}
		spare[a.resource] = slices.DeleteFunc(spare[a.resource], func(id string) bool { return slices.Contains(got, id) })
		if a.ends {
			spare[a.resource] = append(spare[a.resource], got...)
		}
	}
	return nil
}

// allocate gives one container what it asks for, of spare first, and returns
// what it has.
func (m *Manager) allocate(ctx context.Context, pod types.UID, a asked, spare []string) ([]string, error) {
	unlock, err := m.busy.Lock(ctx, a.resource)
	if err != nil {
		return nil, fmt.Errorf("%s: its device plugin is busy with another pod: %w", a.resource, err)
	}
	defer unlock()
	have, ok := m.get(pod, a.container, a.resource)
	if ok && have.Done {
		return have.IDs, nil
	}
	if ok {
		// The agent was killed before the plugin had answered, or its answer could not
		// be noted: the devices are free, for this container too.
		if err := m.put(pod, a.container, a.resource, nil); err != nil {
			return nil, err
		}
	}
	m.mu.Lock()
	p := m.plugins[a.resource]
	here := p != nil && p.stopped.IsZero()
	m.mu.Unlock()
	if !here {
		return nil, notRegistered(a.resource)
	}
	ids, err := m.choose(ctx, p, a, spare)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	have = allocation{IDs: ids, Nodes: p.nodesOf(ids), Before: p.options.GetPreStartRequired()}
	m.mu.Unlock()
	if err := m.put(pod, a.container, a.resource, &have); err != nil {
		return nil, err
	}
	answer, err := p.client.Allocate(ctx, &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: ids}}})
	if err == nil && len(answer.GetContainerResponses()) != 1 {
		err = fmt.Errorf("it has answered for %d containers instead of 1", len(answer.GetContainerResponses()))
	}
	if err != nil {
		if perr := m.put(pod, a.container, a.resource, nil); perr != nil {
			return nil, perr
		}
		return nil, fmt.Errorf("%s: its device plugin: Allocate %q: %w", a.resource, ids, err)
	}
	have.take(answer.GetContainerResponses()[0])
	return ids, m.put(pod, a.container, a.resource, &have)
}

// take notes what a plugin says that the container needs.
func (a *allocation) take(r *api.ContainerAllocateResponse) {
	a.Done, a.Env = true, r.GetEnvs()
	for _, v := range r.GetMounts() {
		a.Mounts = append(a.Mounts, mount{v.GetHostPath(), v.GetContainerPath(), v.GetReadOnly()})
	}
	for _, d := range r.GetDevices() {
		a.Devices = append(a.Devices, node{d.GetHostPath(), d.GetContainerPath(), d.GetPermissions()})
	}
	for _, d := range r.GetCdiDevices() {
		a.CDI = append(a.CDI, d.GetName())
	}
}

// choose picks free devices, of spare first and by the plugin's own preference.
func (m *Manager) choose(ctx context.Context, p *endpoint, a asked, spare []string) ([]string, error) {
	m.mu.Lock()
	taken := map[string]bool{}
	for _, containers := range m.state.Pods {
		for _, resources := range containers {
			for _, id := range resources[a.resource].IDs {
				taken[id] = true
			}
		}
	}
	healthy, reported, options := p.healthy(), p.reported, p.options
	m.mu.Unlock()
	if !reported {
		return nil, fmt.Errorf("%s: its device plugin has registered and has not reported its devices yet", a.resource)
	}
	spare = slices.DeleteFunc(slices.Clone(spare), func(id string) bool { return !slices.Contains(healthy, id) })
	spare = spare[:min(len(spare), a.count)]
	free := slices.DeleteFunc(healthy, func(id string) bool { return taken[id] && !slices.Contains(spare, id) })
	if len(free) < a.count {
		return nil, fmt.Errorf("%s: %d devices are asked for, %d healthy ones are free", a.resource, a.count, len(free))
	}
	if options.GetGetPreferredAllocationAvailable() {
		if ids := preferred(ctx, p, a, free, spare); ids != nil {
			return ids, nil
		}
	}
	rest := slices.DeleteFunc(slices.Clone(free), func(id string) bool { return slices.Contains(spare, id) })
	return append(spare, rest[:a.count-len(spare)]...), nil
}

// preferred is what the plugin would choose; nil: it says nothing that could be
// given.
func preferred(ctx context.Context, p *endpoint, a asked, free, must []string) []string {
	answer, err := p.client.GetPreferredAllocation(ctx, &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{{
		AvailableDeviceIDs: free, MustIncludeDeviceIDs: must, AllocationSize: int32(a.count),
	}}})
	if err != nil || len(answer.GetContainerResponses()) != 1 {
		return nil
	}
	ids := slices.Compact(slices.Sorted(slices.Values(answer.GetContainerResponses()[0].GetDeviceIDs())))
	for _, id := range must {
		if !slices.Contains(ids, id) {
			return nil
		}
	}
	for _, id := range ids {
		if !slices.Contains(free, id) {
			return nil
		}
	}
	if len(ids) != a.count {
		return nil
	}
	return ids
}

// Inject gives a container what its devices need. A plugin that asks for it is
// called before.
func (m *Manager) Inject(ctx context.Context, pod *v1.Pod, container *v1.Container, c *podmon.Container) error {
	if err := m.load(); err != nil {
		return err
	}
	m.mu.Lock()
	got := maps.Clone(m.state.Pods[pod.UID][container.Name])
	m.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if err := m.beforeStart(ctx, name, got[name]); err != nil {
			return err
		}
		if err := got[name].inject(m.cfg.CDIDirs, c); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// beforeStart tells a plugin that wants to know it that a container starts.
func (m *Manager) beforeStart(ctx context.Context, name string, a allocation) error {
	m.mu.Lock()
	p := m.plugins[name]
	wanted := a.Before || p != nil && p.options.GetPreStartRequired()
	gone := p == nil || !p.stopped.IsZero()
	m.mu.Unlock()
	if !wanted {
		return nil
	}
	if gone {
		return notRegistered(name)
	}
	if _, err := p.client.PreStartContainer(ctx, &api.PreStartContainerRequest{DevicesIds: a.IDs}); err != nil {
		return fmt.Errorf("%s: its device plugin: PreStartContainer %q: %w", name, a.IDs, err)
	}
	return nil
}

// nodes are the device nodes below a directory; whatever is no directory is one itself.
func (n node) nodes() []node {
	dir, err := filepath.EvalSymlinks(n.Source)
	if err != nil {
		return []node{n}
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return []node{n}
	}
	var out []node
	_ = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type()&fs.ModeDevice != 0 {
			out = append(out, node{path, filepath.Join(n.Destination, strings.TrimPrefix(path, dir)), n.Access})
		}
		return nil
	})
	return out
}

// inject adds to what podmon is asked for. A variable that the pod sets itself
// stays.
func (a allocation) inject(cdiDirs []string, c *podmon.Container) error {
	for _, name := range slices.Sorted(maps.Keys(a.Env)) {
		if !slices.ContainsFunc(c.Env, func(kv string) bool { return len(kv) > len(name) && kv[:len(name)+1] == name+"=" }) {
			c.Env = append(c.Env, name+"="+a.Env[name])
		}
	}
	for _, v := range a.Mounts {
		c.Mounts = slices.DeleteFunc(c.Mounts, func(old podmon.Mount) bool { return old.Destination == v.Destination })
		c.Mounts = append(c.Mounts, podmon.Mount{Source: v.Source, Destination: v.Destination, ReadOnly: v.ReadOnly})
	}
	for _, d := range a.Devices {
		for _, n := range d.nodes() {
			c.Volumes = slices.DeleteFunc(c.Volumes, func(old podmon.DeviceVolume) bool { return old.Destination == n.Destination })
			c.Volumes = append(c.Volumes, podmon.DeviceVolume{Source: n.Source, Destination: n.Destination, Access: n.Access})
		}
	}
	return cdi.Inject(cdiDirs, a.CDI, c)
}
