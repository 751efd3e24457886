package pod

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/durable"
)

// A static pod that has ended for good (its restart policy asks for no more)
// stays ended as long as its source has it unchanged, as a pod of the API does:
// its last status is kept in a file, because podmon's records go with its
// teardown and there may be no API to remember it. A new agent, also after a
// boot, goes on from there, so that nothing runs twice and the mirror tells the
// exit codes.

// endedVersion is that of endedFile.
const endedVersion = 1

// endedFile is EndedDir/UID.json.
type endedFile struct {
	Version int           `json:"version"`
	Status  *v1.PodStatus `json:"status"`
}

func (m *Manager) endedPath(uid types.UID) string {
	return filepath.Join(m.cfg.EndedDir, string(uid)+".json")
}

func (m *Manager) saveEnded(uid types.UID, st *v1.PodStatus) error {
	b, err := json.Marshal(endedFile{Version: endedVersion, Status: st})
	if err != nil {
		return err
	}
	return durable.ReplaceFile(m.endedPath(uid), b, 0o600)
}

// loadEnded gives the last status of a static pod that has ended, nil if it has
// not.
func (m *Manager) loadEnded(uid types.UID) (*v1.PodStatus, error) {
	b, err := os.ReadFile(m.endedPath(uid))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var f endedFile
	if err := json.Unmarshal(b, &f); err != nil {
		return nil, fmt.Errorf("%s: %w", m.endedPath(uid), err)
	}
	if f.Version != endedVersion || f.Status == nil || !core.FinalPhase(f.Status.Phase) {
		return nil, fmt.Errorf("%s: version %d is not known, or it tells of no end", m.endedPath(uid), f.Version)
	}
	return f.Status, nil
}

func (m *Manager) dropEnded(uid types.UID) {
	if err := os.Remove(m.endedPath(uid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		klog.FromContext(m.ctx).Error(err, "remove the record of a deleted static pod", "uid", uid)
	}
}

// sweepEnded drops the records of static pods that no source has any more.
func (m *Manager) sweepEnded() {
	files, err := os.ReadDir(m.cfg.EndedDir)
	if err != nil {
		klog.FromContext(m.ctx).Error(err, "Records of static pods that have ended could not be listed")
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range files {
		uid := types.UID(strings.TrimSuffix(f.Name(), ".json"))
		if m.workers[uid] == nil {
			m.dropEnded(uid)
		}
	}
}

// asEnded is a static pod as its sources have it, with its last status if it has
// ended before this agent came.
func (m *Manager) asEnded(pod *v1.Pod) *v1.Pod {
	st, err := m.loadEnded(pod.UID)
	if err != nil {
		klog.FromContext(m.ctx).Error(err, "A static pod may have ended before and runs again", "namespace", pod.Namespace, "pod", pod.Name)
	}
	if st == nil {
		return pod
	}
	out := *pod
	out.Status = *st
	return &out
}

// keepEnd writes the last status of a static pod that has ended, and reports
// whether that is done or not needed: its records in podmon may go then.
func (w *worker) keepEnd(st *v1.PodStatus) bool {
	if w.shutdown {
		return true // it runs again after the boot
	}
	if !core.FinalPhase(st.Phase) || w.obs.Final || w.pod.DeletionTimestamp != nil || len(st.ContainerStatuses) == 0 {
		return true // it runs, nothing of it ever ran, or it is to go
	}
	if w.end == endNew {
		w.end = endSaving
		w.background(apiDeadline, func(ctx context.Context) func() {
			err := w.m.saveEnded(w.uid, st)
			return func() {
				w.end = endSaved
				if err != nil { // it has ended all the same
					klog.FromContext(w.ctx).Error(err, "End of a static pod could not be written down: it runs again with the next agent")
				}
			}
		})
	}
	return w.end == endSaved
}

// endState is how far the record of a static pod's end is.
type endState int

const (
	endNew endState = iota
	endSaving
	endSaved
)
