package pod

import (
	"context"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/podspec"
)

// sweepLogs removes log directories of pods that are no more.
func (m *Manager) sweepLogs(ctx context.Context) {
	if !m.cfg.SweepLogs {
		return
	}
	entries, err := os.ReadDir(m.cfg.LogDir)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Log folders could not be listed")
		return
	}
	used := map[string]bool{}
	for _, v := range m.Views() {
		used[podspec.LogFolder(v.Pod)] = true
	}
	m.mu.Lock()
	for _, w := range m.workers {
		if w.view.Load() == nil {
			used[""] = true // a worker that has not shown itself yet: sweep nothing
		}
	}
	m.mu.Unlock()
	if used[""] {
		return
	}
	for _, e := range entries {
		if !e.IsDir() || used[e.Name()] {
			continue
		}
		if err := os.RemoveAll(filepath.Join(m.cfg.LogDir, e.Name())); err != nil {
			klog.FromContext(ctx).Error(err, "remove the log directory of a deleted pod", "folder", e.Name())
		}
	}
	for _, links := range []LogLinks{m.cfg.LogLinks, m.cfg.PodLogLinks} {
		if err := links.sweep(m.cfg.LogDir); err != nil {
			klog.FromContext(ctx).Error(err, "Links to logs that are no more stay", "folder", links)
		}
	}
	// Pods that ran before the directory was asked for have theirs now, too.
	for _, e := range entries {
		if used[e.Name()] {
			if err := m.cfg.PodLogLinks.setPod(filepath.Join(m.cfg.LogDir, e.Name())); err != nil {
				klog.FromContext(ctx).Error(err, "No link to a pod's log folder", "folder", e.Name())
			}
		}
	}
}
