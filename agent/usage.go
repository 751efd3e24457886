package agent

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/image"
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
				c.Disk = d.Bytes
			}
		}
		out = append(out, c)
	}
	return out
}

// ImageGC says when images that nothing uses go.
type ImageGC struct {
	// High and Low are percentages of the images' file system: above High the
	// least recently used go until Low is reached. High 0: 85, Low 0: 80.
	High, Low int
	// MinAge spares images pulled or used less than that ago; default 2 min.
	MinAge time.Duration
}

const imageGCPeriod = 5 * time.Minute

// collectImages keeps the images' share of the disk below the high mark.
func (a *Agent) collectImages(ctx context.Context) error {
	tick := time.NewTicker(imageGCPeriod)
	defer tick.Stop()
	for {
		if st, err := stats.FileSystem(a.imageDir()); err == nil && st.Blocks > 0 {
			if excess := excessBytes(int64(st.Blocks), int64(st.Bavail), st.Bsize, a.cfg.ImageGC); excess > 0 {
				if err := a.removeImages(ctx, image.GCPolicy{MinAge: a.cfg.ImageGC.MinAge, Bytes: excess}); err != nil {
					klog.FromContext(ctx).Error(err, "Images that nothing uses stay")
				}
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// excessBytes is how much has to go: 0 below the high mark.
func excessBytes(blocks, free, size int64, gc ImageGC) int64 {
	used := blocks - free
	if used*100 < blocks*int64(gc.High) {
		return 0
	}
	return (used - blocks*int64(gc.Low)/100) * size
}

// reclaim frees what disk space it can without ending a pod.
func (a *Agent) reclaim(ctx context.Context) error {
	return a.removeImages(ctx, image.GCPolicy{})
}

// removeImages removes images but those of the node's pods.
func (a *Agent) removeImages(ctx context.Context, policy image.GCPolicy) error {
	for _, v := range a.pods.Views() {
		spec := &v.Pod.Spec
		for _, list := range [][]v1.Container{spec.InitContainers, spec.Containers} {
			for _, c := range list {
				policy.Keep = append(policy.Keep, c.Image)
			}
		}
		for _, c := range spec.EphemeralContainers {
			policy.Keep = append(policy.Keep, c.Image)
		}
		for _, v := range spec.Volumes {
			if v.Image != nil {
				policy.Keep = append(policy.Keep, v.Image.Reference)
			}
		}
	}
	removed, err := a.cfg.Images.GC(ctx, policy)
	for _, img := range removed {
		klog.FromContext(ctx).Info("Image removed to free disk space", "id", img.ID, "names", img.Refs, "bytes", img.Size)
	}
	if len(removed) > 0 {
		a.node.Poke()
	}
	return err
}

func (a *Agent) imageDir() string { return filepath.Join(a.cfg.DataDir, "images") }

// bootTime is when the machine was started (proc(5), stat).
func bootTime() time.Time {
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
