package podresources

import podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

func devices(all []Devices) []*podresources.ContainerDevices {
	var out []*podresources.ContainerDevices
	for _, d := range all {
		m := &podresources.ContainerDevices{ResourceName: d.Resource, DeviceIds: d.IDs}
		for _, n := range d.Nodes {
			if m.Topology == nil {
				m.Topology = &podresources.TopologyInfo{}
			}
			m.Topology.Nodes = append(m.Topology.Nodes, &podresources.NUMANode{ID: n})
		}
		out = append(out, m)
	}
	return out
}

// claimed are devices under their claims, in the order in which they came.
func claimed(all []Claimed) []*podresources.DynamicResource {
	var out []*podresources.DynamicResource
	for _, d := range all {
		m := &podresources.ClaimResource{DriverName: d.Driver, PoolName: d.Pool, DeviceName: d.Device}
		if d.Share != "" {
			m.ShareId = &d.Share
		}
		for _, name := range d.CDI {
			m.CdiDevices = append(m.CdiDevices, &podresources.CDIDevice{Name: name})
		}
		claim := claimOf(&out, d)
		claim.ClaimResources = append(claim.ClaimResources, m)
	}
	return out
}

// claimOf finds the device's claim among those that were begun, or begins it.
func claimOf(all *[]*podresources.DynamicResource, d Claimed) *podresources.DynamicResource {
	for _, c := range *all {
		if c.ClaimNamespace == d.ClaimNamespace && c.ClaimName == d.ClaimName {
			return c
		}
	}
	c := &podresources.DynamicResource{ClaimNamespace: d.ClaimNamespace, ClaimName: d.ClaimName}
	*all = append(*all, c)
	return c
}
