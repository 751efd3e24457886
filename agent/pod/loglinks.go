package pod

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/podspec"
)

// LogLinks is a directory of links to logs: what ships logs reads from the name whose
// they are. It has either one to the log of each container that is there, named
// POD_NAMESPACE_CONTAINER-ID.log, or one to the log directory of each pod,
// NAMESPACE_NAME_UID. Empty: no links are made.
type LogLinks string

// set makes the link of a container. Its log need not be there yet.
func (dir LogLinks) set(namespace, pod, container, id, log string) error {
	if dir == "" {
		return nil
	}
	name, end := pod+"_"+namespace+"_"+container, "-"+id+".log"
	name = name[:min(len(name), 255-len(end))] // NAME_MAX
	if err := os.Symlink(log, filepath.Join(string(dir), name+end)); !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// setPod makes the link of a pod's log directory.
func (dir LogLinks) setPod(logs string) error {
	if dir == "" {
		return nil
	}
	if err := os.Symlink(logs, filepath.Join(string(dir), filepath.Base(logs))); !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// removePod takes the link of a pod's log directory away, if there is one.
func (dir LogLinks) removePod(logs string) error {
	return dir.removeIf(func(_, target string) bool { return target == logs })
}

// remove takes the link of a container away, if there is one.
func (dir LogLinks) remove(id string) error {
	return dir.removeIf(func(name, _ string) bool { return strings.HasSuffix(name, "-"+id+".log") })
}

// sweep removes links to logs of ours that are no more. Others may have links
// in the same directory.
func (dir LogLinks) sweep(logs string) error {
	return dir.removeIf(func(_, target string) bool {
		if !strings.HasPrefix(target, logs+"/") {
			return false
		}
		_, err := os.Stat(target)
		return errors.Is(err, fs.ErrNotExist)
	})
}

// RemoveAll removes the links to what lies in a directory.
func (dir LogLinks) RemoveAll(logs string) error {
	return dir.removeIf(func(_, target string) bool { return strings.HasPrefix(target, logs+"/") })
}

func (dir LogLinks) removeIf(unwanted func(name, target string) bool) error {
	if dir == "" {
		return nil
	}
	entries, err := os.ReadDir(string(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		path := filepath.Join(string(dir), e.Name())
		if target, err := os.Readlink(path); err == nil && unwanted(e.Name(), target) {
			if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// linkLog makes the link of a container that is about to start. A container
// does not wait for it: its log is where it is.
func (m *Manager) linkLog(ctx context.Context, in podspec.Input, log string) {
	if err := m.cfg.LogLinks.set(in.Pod.Namespace, in.Pod.Name, in.Container.Name, in.ID, log); err != nil {
		klog.FromContext(ctx).Error(err, "No link to a container's log", "id", in.ID)
	}
}
