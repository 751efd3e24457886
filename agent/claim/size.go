package claim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/claim/projectquota"
	"github.com/clusterd/clusterd/agent/stats"
	"github.com/clusterd/clusterd/apis/storage"
	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/slack"
)

const (
	// lookEvery is how often volumes are measured. Adding up a directory without a
	// project takes at most a fiftieth of the time.
	lookEvery = 20 * time.Second
	lookShare = 50
	lookLimit = 5 * time.Minute
	// sayEvery is how often a claim hears that its volume is full.
	sayEvery = 15 * time.Minute
)

// Use is what a directory of this node holds.
type Use struct {
	// In bytes: what is in the directory, what its claim has, and what can still be
	// written: less than the rest of the size where the disk has less.
	Used, Size, Available int64
	// Kept: the file system refuses more than Size.
	Kept bool
}

// measured is a Use, and when it is looked at again.
type measured struct {
	Use
	known      bool // Use is what the last look found
	next, said time.Time
}

// Use is what the claim's directory held when it was last measured; ok is false
// if it was not, or is no directory of this node.
func (k *Keeper) Use(claim types.NamespacedName) (u Use, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	m, ok := k.uses[claim]
	return m.Use, ok && m.known
}

// The project of a directory is on record beside it and not read from it: who owns
// the directory, a pod, may change that.
func projectFile(dir string) string {
	return filepath.Join(filepath.Dir(dir), ".project~"+filepath.Base(dir))
}

// projectOf is the project on record of the volume's directory dir; 0 if its size
// is not kept.
func projectOf(dir string) (uint32, error) {
	b, err := os.ReadFile(projectFile(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%s: %q is no project: write the number that `lsattr -pd` shows for the folder, or delete the file", projectFile(dir), b)
	}
	return uint32(n), nil
}

// keepTo keeps the new, empty directory made, which will be the volume's directory
// dir, to a size, if its file system can. What is on record is on disk when it
// returns.
func keepTo(made, dir string, size int64) error {
	f, err := projectquota.Open(made)
	if err != nil {
		return err
	}
	defer f.Close()
	if f.Supported() != nil || size <= 0 {
		return nil
	}
	project, err := f.Assign()
	if err != nil {
		return err
	}
	if err := f.SetLimit(project, size); err != nil {
		return err
	}
	return durable.ReplaceFile(projectFile(dir), []byte(strconv.FormatUint(uint64(project), 10)+"\n"), 0o600)
}

// keep makes the limit of the volume's directory the volume's size, after it has
// grown.
func (k *Keeper) keep(v *v1.PersistentVolume) error {
	dir, ok := storage.LocalPathOf(v, k.cfg.NodeName, k.cfg.Dir)
	if !ok {
		return nil
	}
	project, err := projectOf(dir)
	if err != nil || project == 0 {
		return err
	}
	return onDir(dir, func(f projectquota.Folder) error {
		if !holds(f, project) {
			return nil
		}
		use, err := f.Usage(project)
		if size := sizeOf(v); err == nil && use.Limit < size {
			err = f.SetLimit(project, size)
		}
		return err
	})
}

// holds reports whether the file system keeps the directory to the limit of the
// project on record. It does not if it is mounted without quotas now, or if the directory
// has another project: it was restored on another disk, or its owner changed it.
func holds(f projectquota.Folder, project uint32) bool {
	has, err := f.Project()
	return err == nil && has == project && f.Supported() == nil
}

// release takes the limit of a directory that is gone from its file system, and
// the record.
func release(dir string) error {
	project, err := projectOf(dir)
	if err != nil || project == 0 {
		return err
	}
	err = onDir(filepath.Dir(dir), func(f projectquota.Folder) error {
		if f.Supported() != nil { // it is mounted without quotas now
			return nil
		}
		return f.SetLimit(project, 0)
	})
	if err != nil {
		return err
	}
	return os.Remove(projectFile(dir))
}

func onDir(dir string, do func(projectquota.Folder) error) error {
	f, err := projectquota.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return do(f)
}

func sizeOf(v *v1.PersistentVolume) int64 { return v.Spec.Capacity.Storage().Value() }

// watchSizes measures the node's volumes until ctx ends, and says which are
// full.
func (k *Keeper) watchSizes(ctx context.Context, volumes corelisters.PersistentVolumeLister) {
	tick := slack.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		if list, err := volumes.List(labels.Everything()); err == nil {
			k.look(ctx, list, time.Now())
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// look measures those of the volumes whose time has come, one after the other.
func (k *Keeper) look(ctx context.Context, list []*v1.PersistentVolume, now time.Time) {
	seen := map[types.NamespacedName]bool{}
	for _, v := range list {
		dir, ok := storage.LocalPathOf(v, k.cfg.NodeName, k.cfg.Dir)
		if !ok || v.Spec.ClaimRef == nil || v.Status.Phase != v1.VolumeBound || ctx.Err() != nil {
			continue
		}
		claim := types.NamespacedName{Namespace: v.Spec.ClaimRef.Namespace, Name: v.Spec.ClaimRef.Name}
		seen[claim] = true
		k.mu.Lock()
		m := k.uses[claim]
		k.mu.Unlock()
		if now.Before(m.next) {
			continue
		}
		began := time.Now()
		use, err := measure(ctx, dir, sizeOf(v))
		if errors.Is(err, fs.ErrNotExist) { // it is not mounted yet
			seen[claim] = false
			continue
		}
		m.Use, m.known, m.next = use, err == nil, now.Add(lookShare*time.Since(began))
		if err != nil {
			klog.FromContext(ctx).Error(err, "A volume's size is not known", "volume", v.Name, "next", m.next)
		} else if full := fullness(v.Name, use); full != "" && now.Sub(m.said) >= sayEvery {
			m.said = now
			k.cfg.Recorder.Event(v.Spec.ClaimRef, v1.EventTypeWarning, "VolumeFull", full)
		}
		k.mu.Lock()
		k.uses[claim] = m
		k.mu.Unlock()
	}
	k.mu.Lock()
	maps.DeleteFunc(k.uses, func(c types.NamespacedName, _ measured) bool { return !seen[c] })
	k.mu.Unlock()
}

// measure asks the file system, or adds the directory up.
func measure(ctx context.Context, dir string, size int64) (Use, error) {
	u := Use{Size: size}
	if _, err := os.Lstat(dir); err != nil {
		return u, err
	}
	project, err := projectOf(dir)
	if err != nil {
		return u, err
	}
	if project != 0 {
		err := onDir(dir, func(f projectquota.Folder) error {
			use, err := f.Usage(project)
			u.Used, u.Kept = use.Used, use.Limit > 0 && holds(f, project)
			return err
		})
		u.Kept = u.Kept && err == nil
	}
	if !u.Kept {
		ctx, cancel := context.WithTimeout(ctx, lookLimit)
		defer cancel()
		d, err := stats.DiskUse(ctx, dir)
		if err != nil {
			return u, err
		}
		u.Used = d.Bytes
	}
	st, err := stats.FileSystem(filepath.Dir(dir))
	if err != nil {
		return u, err
	}
	u.Available = max(0, min(size-u.Used, int64(st.Bavail)*st.Bsize)) //nolint:unconvert // Bsize is no int64 everywhere
	return u, nil
}

// fullness says that the volume is full; "": it is not.
func fullness(volume string, u Use) string {
	const slack = 64 << 10 // a file system refuses what would pass the limit, so the last blocks stay free
	used, size := quantity(u.Used), quantity(u.Size)
	const cure = "delete files, or ask for more in the claim's spec.resources.requests.storage"
	switch {
	case u.Size <= 0:
		return ""
	case u.Kept && u.Used+slack >= u.Size:
		return fmt.Sprintf("volume %s is full: it holds %s of %s, and more is refused; %s", volume, used, size, cure)
	case !u.Kept && u.Used > u.Size:
		return fmt.Sprintf("volume %s holds %s, more than its %s: the node's file system keeps it to no size (it is not mounted with prjquota), so it takes the room of others; %s", volume, used, size, cure)
	}
	return ""
}

// quantity writes bytes as claims do, in whole Mi from 1 Mi on.
func quantity(bytes int64) string {
	if bytes > 1<<20 {
		bytes = (bytes + 1<<19) &^ (1<<20 - 1)
	}
	return resource.NewQuantity(bytes, resource.BinarySI).String()
}
