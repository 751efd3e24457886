package agent

import (
	"context"
	"errors"
	"path/filepath"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/clusterd/clusterd/agent/deviceplugin"
	"github.com/clusterd/clusterd/agent/dra"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podresources"
	"github.com/clusterd/clusterd/agent/podstate"
)

// devices are those of claims and those of device plugins: a pod.Devices.
type devices struct {
	claims  *dra.Manager
	plugins *deviceplugin.Manager
}

// newDevices puts the node's devices together; a.plugins and a.node are there.
func (a *Agent) newDevices() (*devices, error) {
	dir := filepath.Join(a.cfg.DataDir, "devices")
	plugins, err := deviceplugin.New(deviceplugin.Config{
		Dir: filepath.Join(a.cfg.DriverDir, "device-plugins"), File: filepath.Join(dir, "plugins.json"), CDIDirs: a.cfg.CDIDirs,
		Changed: func() { a.node.Poke(); a.pods.DevicesChanged() },
	})
	if err != nil {
		return nil, err
	}
	a.plugins.Handle(registration.DevicePlugin, plugins)
	return &devices{plugins: plugins, claims: dra.New(dra.Config{
		Client: a.cfg.Client, NodeName: a.cfg.NodeName, Node: a.node.Object, Plugins: a.plugins, Dir: filepath.Join(dir, "claims"), CDIDirs: a.cfg.CDIDirs,
		Changed: func() { a.pods.DevicesChanged() },
	})}, nil
}

// deviceCounts are what the node has, and what pods may have, of device plugins.
func (a *Agent) deviceCounts() (capacity, allocatable v1.ResourceList) {
	if a.devices == nil {
		return nil, nil
	}
	return a.devices.plugins.Resources()
}

// Prepare implements pod.Devices.
func (d devices) Prepare(ctx context.Context, pod *v1.Pod) error {
	if err := d.plugins.Prepare(ctx, pod); err != nil {
		return err
	}
	return d.claims.Prepare(ctx, pod)
}

// Unprepare implements pod.Devices.
func (d devices) Unprepare(ctx context.Context, uid types.UID) error {
	return errors.Join(d.claims.Unprepare(ctx, uid), d.plugins.Unprepare(ctx, uid))
}

// Held implements pod.Devices.
func (d devices) Held(uid types.UID) bool { return d.claims.Held(uid) || d.plugins.Held(uid) }

// Pods implements pod.Devices.
func (d devices) Pods() ([]types.UID, error) {
	claiming, err := d.claims.Pods()
	if err != nil {
		return nil, err
	}
	asking, err := d.plugins.Pods()
	all := slices.Sorted(slices.Values(append(claiming, asking...)))
	return slices.Compact(all), err
}

// Inject implements pod.Devices.
func (d devices) Inject(ctx context.Context, pod *v1.Pod, container *v1.Container, c *api.Container) error {
	if err := d.plugins.Inject(ctx, pod, container, c); err != nil {
		return err
	}
	return d.claims.Inject(ctx, pod, container, c)
}

// has are the devices that a container has. Those of a claim that its pod waits
// for are left out.
func (d *devices) has(p *v1.Pod, c *v1.Container) (own []podresources.Devices, claimed []podresources.Claimed) {
	if d == nil {
		return nil, nil
	}
	for _, some := range d.plugins.Of(p.UID, c.Name) {
		own = append(own, podresources.Devices(some))
	}
	if !podstate.UsesClaims(p) {
		return own, nil
	}
	all, err := d.claims.Resources(p, c)
	if err != nil {
		return own, nil
	}
	for _, r := range all {
		claimed = append(claimed, podresources.Claimed(r))
	}
	return own, claimed
}

// allocatable are the devices of plugins that containers can have.
func (d *devices) allocatable() []podresources.Devices {
	if d == nil {
		return nil
	}
	var out []podresources.Devices
	for _, some := range d.plugins.Allocatable() {
		out = append(out, podresources.Devices(some))
	}
	return out
}
