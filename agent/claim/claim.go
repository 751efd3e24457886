// Package claim finds the volumes of the claims that this node's pods mount, and
// keeps the directories of those that are directories of this node: each is made when
// its volume is first mounted, kept to its size or measured, and removed when the
// volume is deleted. It mounts nothing.
package claim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/component-helpers/storage/ephemeral"
	helper "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/apis/storage"
	"github.com/clusterd/clusterd/durable"
)

// Config of a Keeper. All fields are required but Found.
type Config struct {
	Client   kubernetes.Interface
	NodeName string
	// Dir holds one directory per volume.
	Dir      string
	Recorder record.EventRecorder
	// Node is the Node object as last known.
	Node func() *v1.Node
	// Found is called with each claim whose volume may be mounted for the pod. Optional.
	Found func(pod *v1.Pod, claim *v1.PersistentVolumeClaim, v *v1.PersistentVolume)
}

// Keeper finds volumes and keeps directories. Its methods may be called
// concurrently.
type Keeper struct {
	cfg Config

	making sync.Mutex // one directory at a time: each gets a project that no other has

	mu   sync.Mutex
	uses map[types.NamespacedName]measured // of claims
}

// New returns a Keeper; it starts nothing.
func New(cfg Config) *Keeper {
	return &Keeper{cfg: cfg, uses: map[types.NamespacedName]measured{}}
}

// NameOf is the name of the claim, in the pod's namespace, that a volume of the
// pod stands for; "": it stands for none.
func NameOf(pod *v1.Pod, v *v1.Volume) string {
	switch {
	case v.PersistentVolumeClaim != nil:
		return v.PersistentVolumeClaim.ClaimName
	case v.Ephemeral != nil:
		return ephemeral.VolumeClaimName(pod, v)
	}
	return ""
}

// Volume is the volume that the pod's claim is bound to, if it may be mounted
// here. A directory of this node exists when it is returned.
func (k *Keeper) Volume(ctx context.Context, pod *v1.Pod, name string) (*v1.PersistentVolume, error) {
	claim, err := k.cfg.Client.CoreV1().PersistentVolumeClaims(pod.Namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	if claim.Spec.VolumeName == "" || claim.Status.Phase != v1.ClaimBound {
		return nil, fmt.Errorf("persistentvolumeclaim %q is not bound", name)
	}
	v, err := k.cfg.Client.CoreV1().PersistentVolumes().Get(ctx, claim.Spec.VolumeName, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	switch {
	case v.Spec.ClaimRef == nil || v.Spec.ClaimRef.UID != claim.UID:
		return nil, fmt.Errorf("persistentvolume %q is not bound to persistentvolumeclaim %q", v.Name, name)
	case helper.CheckNodeAffinity(v, k.cfg.Node().Labels) != nil:
		return nil, fmt.Errorf("persistentvolume %q cannot be reached from node %q: its node affinity says so", v.Name, k.cfg.NodeName)
	}
	if v.Labels[names.LocalPathNode] != "" {
		if err := k.make(ctx, v); err != nil {
			return nil, err
		}
		if v.Annotations[names.LocalPathMade] == "" { // it is written by now
			v = v.DeepCopy()
			metav1.SetMetaDataAnnotation(&v.ObjectMeta, names.LocalPathMade, time.Now().UTC().Format(time.RFC3339))
		}
	}
	if k.cfg.Found != nil {
		k.cfg.Found(pod, claim, v)
	}
	return v, nil
}

// make makes the volume's directory and says so. One that was made and is missing
// is not made again: its data is lost, and a pod that found an empty directory in
// its place would not know.
func (k *Keeper) make(ctx context.Context, v *v1.PersistentVolume) error {
	dir, ok := storage.LocalPathOf(v, k.cfg.NodeName, k.cfg.Dir)
	if !ok {
		return fmt.Errorf("persistentvolume %q is no folder below %s of node %q", v.Name, k.cfg.Dir, k.cfg.NodeName)
	}
	_, err := os.Lstat(dir)
	made := v.Annotations[names.LocalPathMade] != ""
	switch {
	case err == nil && made:
		return nil
	case errors.Is(err, fs.ErrNotExist) && made:
		return fmt.Errorf("the folder %s of persistentvolume %q is gone, and its data with it: restore it, or delete the claim", dir, v.Name)
	case errors.Is(err, fs.ErrNotExist):
		k.making.Lock()
		err := makeDir(dir, sizeOf(v))
		k.making.Unlock()
		if err != nil {
			return err
		}
	case err != nil:
		return err
	}
	return k.patch(ctx, v, map[string]any{"annotations": map[string]any{names.LocalPathMade: time.Now().UTC().Format(time.RFC3339)}})
}

// makeDir makes a directory that everybody may write to, and that its file
// system keeps to size bytes if it can. It is on disk when it returns, and
// appears ready or not at all.
func makeDir(dir string, size int64) error {
	parent := filepath.Dir(dir)
	if err := os.MkdirAll(parent, 0o711); err != nil {
		return err
	}
	tmp := filepath.Join(parent, ".new~"+filepath.Base(dir))
	if err := os.Mkdir(tmp, 0o777); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := os.Chmod(tmp, 0o777); err != nil { // Mkdir is subject to the umask
		return err
	}
	if err := keepTo(tmp, dir, size); err != nil {
		return err
	}
	return durable.Rename(tmp, dir)
}

func (k *Keeper) patch(ctx context.Context, v *v1.PersistentVolume, meta map[string]any) error {
	meta["uid"], meta["resourceVersion"] = v.UID, v.ResourceVersion
	patch, err := json.Marshal(map[string]any{"metadata": meta})
	if err != nil {
		return err
	}
	_, err = k.cfg.Client.CoreV1().PersistentVolumes().Patch(ctx, v.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// Run removes the directories of deleted volumes, keeps the others to their size
// and measures them, until ctx ends.
func (k *Keeper) Run(ctx context.Context) error {
	factory := informers.NewSharedInformerFactoryWithOptions(k.cfg.Client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.LabelSelector = labels.Set{names.LocalPathNode: k.cfg.NodeName}.String()
	}))
	volumes := factory.Core().V1().PersistentVolumes()
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[string]())
	add := func(obj any) {
		if v, ok := obj.(*v1.PersistentVolume); ok {
			queue.Add(v.Name)
		}
	}
	if _, err := volumes.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: add, UpdateFunc: func(_, obj any) { add(obj) }}); err != nil {
		return err
	}
	factory.StartWithContext(ctx)
	defer factory.Shutdown()
	var sizes sync.WaitGroup
	sizes.Go(func() {
		if cache.WaitForCacheSync(ctx.Done(), volumes.Informer().HasSynced) {
			k.watchSizes(ctx, volumes.Lister())
		}
	})
	defer sizes.Wait()
	stop := context.AfterFunc(ctx, queue.ShutDown)
	defer stop()
	for {
		name, shutdown := queue.Get()
		if shutdown {
			return nil
		}
		v, err := volumes.Lister().Get(name)
		reason := "VolumeFailedDelete"
		switch {
		case err != nil:
		case removable(v):
			err = k.remove(ctx, v)
		default:
			reason, err = "VolumeResizeFailed", k.keep(v)
		}
		switch {
		case err == nil, apierrors.IsNotFound(err):
			queue.Forget(name)
		default:
			if ctx.Err() == nil && !apierrors.IsConflict(err) {
				klog.FromContext(ctx).Error(err, "A volume's folder is not as it should be yet", "volume", name, "reason", reason)
				k.cfg.Recorder.Eventf(v, v1.EventTypeWarning, reason, "%s", err)
			}
			queue.AddRateLimited(name)
		}
		queue.Done(name)
	}
}

// removable reports whether the volume's directory is to go: its object is
// deleted, and no claim is bound to it.
func removable(v *v1.PersistentVolume) bool {
	return v.DeletionTimestamp != nil && v.Status.Phase != v1.VolumeBound && slices.Contains(v.Finalizers, names.LocalPathFinalizer)
}

// remove removes the directory, then lets the object go. A volume whose path is
// not the node's own is let go without touching anything.
func (k *Keeper) remove(ctx context.Context, v *v1.PersistentVolume) error {
	if dir, ok := storage.LocalPathOf(v, k.cfg.NodeName, k.cfg.Dir); ok && v.Spec.PersistentVolumeReclaimPolicy == v1.PersistentVolumeReclaimDelete {
		gone := filepath.Join(k.cfg.Dir, ".gone~"+v.Name)
		if err := os.RemoveAll(gone); err != nil {
			return err
		}
		if err := durable.Rename(dir, gone); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := os.RemoveAll(gone); err != nil {
			return err
		}
		if err := release(dir); err != nil {
			return err
		}
	}
	left := slices.DeleteFunc(slices.Clone(v.Finalizers), func(f string) bool { return f == names.LocalPathFinalizer })
	return k.patch(ctx, v, map[string]any{"finalizers": left})
}
