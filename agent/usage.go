package agent

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/claim"
	"github.com/clusterd/clusterd/agent/podspec"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/agent/pressure"
	"github.com/clusterd/clusterd/agent/stats"
	"github.com/clusterd/clusterd/apis/core"
)

// measured lists the node's pods as stats wants them.
func (a *Agent) measured(ctx context.Context) ([]stats.Pod, error) {
	sandboxes, _, err := a.cfg.Runtime.List(ctx)
	if err != nil {
		return nil, err
	}
	pids := map[string]int{}
	for _, s := range sandboxes {
		pids[s.Sandbox.ID] = s.Pid
	}
	var out []stats.Pod
	for _, v := range a.pods.Views() {
		p := v.Pod
		logs := filepath.Join(a.cfg.PodLogDir, podspec.LogFolder(p))
		one := stats.Pod{
			Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), Cgroup: podstate.CgroupParent(a.cfg.CgroupRoot, p), Pid: pids[v.SandboxID],
			HostNetwork: p.Spec.HostNetwork, LogDir: logs, Dir: filepath.Join(a.cfg.DataDir, "pods", string(p.UID)),
		}
		started, images := map[string]time.Time{}, map[string]string{}
		if v.Status != nil {
			if v.Status.StartTime != nil {
				one.Started = v.Status.StartTime.Time
			}
			for _, list := range [][]v1.ContainerStatus{v.Status.InitContainerStatuses, v.Status.ContainerStatuses, v.Status.EphemeralContainerStatuses} {
				for _, c := range list {
					if c.State.Running != nil {
						started[c.Name], images[c.Name] = c.State.Running.StartedAt.Time, c.Image
					}
				}
			}
		}
		for name, c := range v.Containers {
			if c.Running {
				one.Containers = append(one.Containers, stats.Container{Name: name, ID: c.ID, Started: started[name], Image: images[name],
					Written: a.cfg.Images.Written(c.ID), LogDir: filepath.Join(logs, name)})
			}
		}
		out = append(out, one)
	}
	return out, nil
}

// candidates are the pods that could be evicted.
func (a *Agent) candidates(ctx context.Context, of pressure.Signal) []pressure.Candidate {
	pods, err := a.measured(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "No pod can be evicted until podmon answers")
		return nil
	}
	byUID := map[string]stats.Pod{}
	for _, p := range pods {
		byUID[p.UID] = p
	}
	var out []pressure.Candidate
	for _, v := range a.pods.Views() {
		m, ok := byUID[string(v.Pod.UID)]
		if !ok || len(m.Containers) == 0 {
			continue
		}
		c := pressure.Candidate{Pod: v.Pod, QOS: core.QOSClass(v.Pod), Requests: core.Requests(v.Pod)}
		if use, err := a.cgroups.Read(m.Cgroup); err == nil {
			c.Memory, c.Pids = int64(use.WorkingSet), int64(use.Pids)
		}
		if of.Disk() {
			dirs := []string{m.LogDir, m.Dir}
			for _, ct := range m.Containers {
				dirs = append(dirs, ct.Written)
			}
			if d, err := stats.DiskUse(ctx, dirs...); err == nil {
				c.Disk, c.Inodes = d.Bytes, d.Inodes
			}
		}
		out = append(out, c)
	}
	return out
}

func (a *Agent) imageDir() string { return filepath.Join(a.cfg.DataDir, "images") }

// machineStarted is when the machine was started (proc(5), stat).
func machineStarted() time.Time {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return time.Time{}
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "btime "); ok {
			if sec, err := strconv.ParseInt(strings.TrimSpace(v), 10, 64); err == nil {
				return time.Unix(sec, 0)
			}
		}
	}
	return time.Time{}
}

// volumesInUse are the attached volumes that drivers mount here.
func (a *Agent) volumesInUse() []v1.UniqueVolumeName {
	if a.drivers == nil {
		return nil
	}
	return a.drivers.InUse()
}

// volumesOf is volumeUse of the pod with the UID.
func (a *Agent) volumesOf(ctx context.Context, uid string) []stats.Volume {
	for _, v := range a.pods.Views() {
		if string(v.Pod.UID) == uid {
			return a.volumeUse(ctx, v.Pod)
		}
	}
	return nil
}

// volumeUse is what drivers say of a pod's volumes, and what those hold that are
// folders of this node.
func (a *Agent) volumeUse(ctx context.Context, p *v1.Pod) []stats.Volume {
	var out []stats.Volume
	if a.drivers != nil {
		for _, u := range a.drivers.Usage(ctx, p.UID) {
			out = append(out, stats.Volume{
				Name: u.Name, Claim: u.Claim, Total: u.Bytes.Total, Available: u.Bytes.Available, Used: u.Bytes.Used,
				InodesTotal: u.Inodes.Total, InodesAvailable: u.Inodes.Available, InodesUsed: u.Inodes.Used,
			})
		}
	}
	if a.claims == nil {
		return out
	}
	for i := range p.Spec.Volumes {
		name := claim.NameOf(p, &p.Spec.Volumes[i])
		if u, ok := a.claims.Use(types.NamespacedName{Namespace: p.Namespace, Name: name}); ok {
			out = append(out, stats.Volume{Name: p.Spec.Volumes[i].Name, Claim: name, Total: u.Size, Available: u.Available, Used: u.Used})
		}
	}
	return out
}
