package pod

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podspec"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/agent/users"
)

// errNoUsers is why a node without Config.Users has no such pods.
var errNoUsers = errors.New("it is set up to have no ids for them")

// unsupported refuses a pod that wants what this node cannot do, rather than
// run it with less protection than it asks for.
func (m *Manager) unsupported(pod *v1.Pod) *podstate.Verdict {
	if !podspec.HasUsers(pod) {
		return nil
	}
	err := errNoUsers
	if m.cfg.Users != nil {
		err = m.cfg.Users.Supported()
	}
	if err == nil {
		return nil
	}
	return &podstate.Verdict{Reason: "UserNamespacesNotSupported", Message: "spec.hostUsers is false, and this node cannot give pods a user namespace: " + err.Error() + ". Remove the field, or let another node run the pod"}
}

// attach connects the pod; users is nil for one without a user namespace.
func (m *Manager) attach(ctx context.Context, pod *v1.Pod) (netns string, ips []netip.Addr, ids *api.IDRange, err error) {
	if !podspec.HasUsers(pod) {
		netns, ips, err = m.cfg.Network.Attach(ctx, string(pod.UID), pod.Spec.HostNetwork)
		return netns, ips, nil, err
	}
	have, err := m.takeUsers(ctx, string(pod.UID))
	if err != nil {
		return "", nil, nil, err
	}
	netns, ips, err = m.cfg.Network.AttachUsers(ctx, string(pod.UID), have)
	return netns, ips, &api.IDRange{First: have.First, Count: have.Count}, err
}

// limit bounds the pod's network as its annotations say.
func (m *Manager) limit(ctx context.Context, pod *v1.Pod) error {
	in, out, err := podstate.Bandwidth(pod)
	if err != nil || in == 0 && out == 0 {
		return err
	}
	if err := m.cfg.Network.Limit(ctx, string(pod.UID), in, out); err != nil {
		return fmt.Errorf("bandwidth: %w", err)
	}
	return nil
}

// takeUsers gives ids to a pod, or those that it has. If an agent
// was killed before podmon had the ids on record that it gave, image volumes
// may be mounted with them, and go.
func (m *Manager) takeUsers(ctx context.Context, uid string) (users.Range, error) {
	if m.cfg.Users == nil { // it was admitted by another configuration
		return users.Range{}, errNoUsers
	}
	m.taking.Lock() // two volumes of a pod may come at one time
	defer m.taking.Unlock()
	if !m.cfg.Users.Has(uid) {
		if err := m.cfg.Images.UnmountVolumes(ctx, uid); err != nil {
			return users.Range{}, err
		}
	}
	return m.cfg.Users.Take(uid)
}

// mountVolume mounts an image as a volume, for the pod's own users: overlayfs
// cannot be mounted with mapped ids afterwards, as other volumes are.
func (m *Manager) mountVolume(ctx context.Context, pod *v1.Pod, img image.Image, name string) error {
	uid := string(pod.UID)
	if !podspec.HasUsers(pod) {
		_, err := m.cfg.Images.MountVolume(ctx, img, uid, name)
		return err
	}
	ids, err := m.takeUsers(ctx, uid)
	if err != nil {
		return err
	}
	// The pod's own namespace may not be there yet; one of the same ids will do.
	return ids.Try(func(ns *os.File) error {
		_, err := m.cfg.Images.MountVolumeMapped(ctx, img, uid, name, ns)
		return err
	})
}

// mountRoot mounts a container's root file system, for the pod's own users.
func (m *Manager) mountRoot(ctx context.Context, pod *v1.Pod, img image.Image, id string) (string, error) {
	if !podspec.HasUsers(pod) {
		return m.cfg.Images.Mount(ctx, img, id)
	}
	ns, err := m.cfg.Network.Users(string(pod.UID))
	if err != nil {
		return "", err
	}
	defer ns.Close()
	return m.cfg.Images.MountMapped(ctx, img, id, ns)
}

// keepUsers notes the ids of the pods that podmon holds, before any pod may
// take some. The records are the only place where they are written down.
func (m *Manager) keepUsers() {
	if m.cfg.Users == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for uid, rec := range m.records {
		for _, s := range rec.Sandboxes {
			if u := s.Sandbox.Users; u != nil {
				m.cfg.Users.Keep(string(uid), users.Range{First: u.First, Count: u.Count})
			}
		}
	}
}

// freeUsers takes back the ids of a pod of which nothing is left.
func (m *Manager) freeUsers(podUID string) {
	if m.cfg.Users != nil {
		m.cfg.Users.Free(podUID)
	}
}
