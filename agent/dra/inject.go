package dra

import (
	"context"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/cdi"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podstate"
)

// Inject gives a container the devices that it asks for.
func (m *Manager) Inject(_ context.Context, pod *v1.Pod, container *v1.Container, c *api.Container) error {
	if !podstate.UsesClaims(pod) {
		return nil
	}
	devices, err := m.CDI(pod, container)
	if err != nil {
		return err
	}
	return cdi.Inject(m.cfg.CDIDirs, devices, c)
}
