package agent

import (
	"context"
	"path/filepath"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/podspec"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/agent/pressure"
	"github.com/clusterd/clusterd/agent/stats"
	"github.com/clusterd/clusterd/apis/core"
)

// localPods are the node's pods and what they may take of its disks. Pods that
// the node never evicts are left out.
func (a *Agent) localPods() []pressure.LocalPod {
	var out []pressure.LocalPod
	for _, v := range a.pods.Views() {
		if !pressure.Critical(v.Pod) {
			out = append(out, a.localPod(v))
		}
	}
	return out
}

func (a *Agent) localPod(view *pod.View) pressure.LocalPod {
	p := view.Pod
	dir := filepath.Join(a.cfg.DataDir, "pods", string(p.UID))
	// Rendered volumes lie on disk if they hold nothing secret; what is mounted
	// below these directories is not counted.
	out := pressure.LocalPod{UID: p.UID, Namespace: p.Namespace, Name: p.Name, Others: []string{
		filepath.Join(dir, "containers"), filepath.Join(dir, "etc-hosts"), filepath.Join(dir, "resolv.conf"),
	}}
	for i := range p.Spec.Volumes {
		vol := &p.Spec.Volumes[i]
		path, _, err := a.volumes.Source(p, vol.Name)
		switch {
		case err != nil || vol.HostPath != nil || vol.Image != nil || vol.PersistentVolumeClaim != nil || vol.Ephemeral != nil || vol.CSI != nil:
		case vol.EmptyDir == nil:
			if kind := filepath.Dir(path); !slices.Contains(out.Others, kind) {
				out.Others = append(out.Others, kind)
			}
		case vol.EmptyDir.Medium == v1.StorageMediumDefault:
			lv := pressure.LocalVolume{Name: vol.Name, Dir: path}
			if l := vol.EmptyDir.SizeLimit; l != nil {
				lv.Limit = *l
			}
			out.Volumes = append(out.Volumes, lv)
		}
	}
	out.Limit = core.ContainerLimits(p)[v1.ResourceEphemeralStorage]
	logs := filepath.Join(a.cfg.PodLogDir, podspec.LogFolder(p))
	for _, list := range [][]v1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for i := range list {
			c := &list[i]
			if now := view.Containers[c.Name]; now.Running {
				out.Containers = append(out.Containers, pressure.LocalContainer{
					Name: c.Name, Dirs: []string{a.cfg.Images.Written(now.ID), filepath.Join(logs, c.Name)}, Limit: c.Resources.Limits[v1.ResourceEphemeralStorage],
				})
			}
		}
	}
	return out
}

// memoryFor is the most that volumes in memory of the pod can hold, in bytes:
// what its containers may use together, or all pods of the node.
func (a *Agent) memoryFor(p *v1.Pod) int64 {
	all := a.allocatable()[v1.ResourceMemory]
	if own := podstate.MemoryLimit(p); own > 0 && (all.IsZero() || own < all.Value()) {
		return own
	}
	return all.Value()
}

// localUse adds up directories, in bytes.
func (a *Agent) localUse(ctx context.Context, dirs ...string) (int64, error) {
	d, err := stats.DiskUse(ctx, dirs...)
	return d.Bytes, err
}

// configz is what /configz shows: the settings, no secrets and no clients.
func (a *Agent) configz() any {
	c := a.cfg
	return map[string]any{"agent": map[string]any{
		"nodeName": c.NodeName, "nodeIPs": c.NodeIPs, "dataDir": c.DataDir, "cgroupRoot": c.CgroupRoot, "version": c.Version,
		"maxPods": c.MaxPods, "driverDir": c.DriverDir, "podLogDir": c.PodLogDir, "logLinks": c.LogLinks, "podLogLinks": c.PodLogLinks, "resolvConf": c.ResolvConf, "clusterDNS": c.ClusterDNS,
		"clusterDomain": c.ClusterDomain, "pidsLimit": c.PidsLimit, "parallel": c.Parallel,
		"staticDir": c.StaticDir, "staticURL": c.StaticURL,
		"eviction": c.Eviction, "imageGC": c.ImageGC, "imageVerification": c.ImageVerification, "reserved": c.Reserved, "staticCPUs": c.CPUs != nil,
	}}
}
