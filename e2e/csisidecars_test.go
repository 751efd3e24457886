package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Finalizers of the sidecars, by upstream's names.
const (
	volumeFinalizer = "external-provisioner.volume.kubernetes.io/finalizer"
	attachFinalizer = "external-attacher/disks-example-com"
)

// sidecars do what the external provisioner, attacher and resizer of a driver do:
// they act on claims, volumes and attachments, by the same fields.
type sidecars struct {
	e      *env
	dir    string
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

func newSidecars(e *env, dir string) *sidecars {
	ctx, cancel := context.WithCancel(e.t.Context())
	s := &sidecars{e: e, dir: dir, cancel: cancel}
	for name, do := range map[string]func(context.Context) error{"provisioner": s.provision, "attacher": s.attach, "resizer": s.resize} {
		s.wg.Go(func() {
			for ctx.Err() == nil {
				err := do(ctx)
				if err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) && !apierrors.IsAlreadyExists(err) {
					e.t.Logf("%s: %v", name, err) // clusterd may be down
				}
				select {
				case <-ctx.Done():
				case <-time.After(100 * time.Millisecond):
				}
			}
		})
	}
	return s
}

func (s *sidecars) end() {
	s.cancel()
	s.wg.Wait()
}

func (s *sidecars) disk(handle string) string { return filepath.Join(s.dir, handle) }

// provision makes volumes for claims whose node is chosen, and removes those
// that are released.
func (s *sidecars) provision(ctx context.Context) error {
	core := s.e.api.CoreV1()
	claims, err := core.PersistentVolumeClaims("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, c := range claims.Items {
		if c.Annotations["volume.kubernetes.io/storage-provisioner"] != diskDriver || c.Annotations["volume.kubernetes.io/selected-node"] == "" || c.Spec.VolumeName != "" || c.DeletionTimestamp != nil {
			continue
		}
		name := "disk-" + string(c.UID)
		if *c.Spec.VolumeMode == corev1.PersistentVolumeBlock {
			err = os.WriteFile(s.disk(name)+".img", make([]byte, 64<<10), 0o600)
		} else if err = os.MkdirAll(s.disk(name), 0o777); err == nil {
			err = os.Chmod(s.disk(name), 0o777)
		}
		if err != nil {
			return err
		}
		_, err := core.PersistentVolumes().Create(ctx, &corev1.PersistentVolume{
			ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{volumeFinalizer}, Annotations: map[string]string{"pv.kubernetes.io/provisioned-by": diskDriver}},
			Spec: corev1.PersistentVolumeSpec{
				AccessModes: c.Spec.AccessModes, StorageClassName: *c.Spec.StorageClassName, VolumeMode: c.Spec.VolumeMode, Capacity: c.Spec.Resources.Requests, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
				ClaimRef:               &corev1.ObjectReference{APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: c.Namespace, Name: c.Name, UID: c.UID},
				PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: diskDriver, VolumeHandle: name}},
			},
		}, metav1.CreateOptions{})
		if err != nil {
			return err
		}
	}
	volumes, err := core.PersistentVolumes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, v := range volumes.Items {
		if v.Spec.CSI == nil || v.Spec.CSI.Driver != diskDriver || v.Status.Phase != corev1.VolumeReleased || slices.Contains(v.Finalizers, attachFinalizer) {
			continue
		}
		if _, err := os.Stat(s.disk(v.Name) + ".at"); err == nil {
			continue // it is attached
		}
		for _, f := range []string{"", ".img", ".size"} {
			if err := os.RemoveAll(s.disk(v.Name) + f); err != nil {
				return err
			}
		}
		if v.DeletionTimestamp == nil {
			if err := core.PersistentVolumes().Delete(ctx, v.Name, metav1.DeleteOptions{}); err != nil {
				return err
			}
			continue
		}
		v.Finalizers = slices.DeleteFunc(v.Finalizers, func(f string) bool { return f == volumeFinalizer })
		if _, err := core.PersistentVolumes().Update(ctx, &v, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// attach attaches a volume to one node at a time: a second is an error of ours.
func (s *sidecars) attach(ctx context.Context) error {
	api := s.e.api.StorageV1().VolumeAttachments()
	list, err := api.List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	var errs []error
	for _, a := range list.Items {
		errs = append(errs, s.attachOne(ctx, &a))
	}
	return errors.Join(errs...)
}

func (s *sidecars) attachOne(ctx context.Context, a *storagev1.VolumeAttachment) error {
	api := s.e.api.StorageV1().VolumeAttachments()
	at := s.disk(*a.Spec.Source.PersistentVolumeName) + ".at"
	switch {
	case a.DeletionTimestamp != nil:
		mounted, err := mountedBelow(s.e, a.Spec.NodeName, *a.Spec.Source.PersistentVolumeName)
		if err != nil {
			return err
		}
		if mounted {
			s.e.t.Errorf("volume %s is to be detached from %s, where it is mounted", *a.Spec.Source.PersistentVolumeName, a.Spec.NodeName)
		}
		if err := os.RemoveAll(at); err != nil {
			return err
		}
		a.Finalizers = nil
		_, err = api.Update(ctx, a, metav1.UpdateOptions{})
		return err
	case !slices.Contains(a.Finalizers, attachFinalizer):
		a.Finalizers = append(a.Finalizers, attachFinalizer)
		_, err := api.Update(ctx, a, metav1.UpdateOptions{})
		return err
	case !a.Status.Attached:
		if on, err := os.ReadFile(at); err == nil && string(on) != a.Spec.NodeName {
			s.e.t.Errorf("volume %s is on %s and is to be attached to %s", at, on, a.Spec.NodeName)
			return nil
		}
		if err := os.WriteFile(at, []byte(a.Spec.NodeName), 0o600); err != nil {
			return err
		}
		a.Status.Attached = true
		_, err := api.UpdateStatus(ctx, a, metav1.UpdateOptions{})
		return err
	}
	return nil
}

// mountedBelow looks whether a node has a volume mounted.
func mountedBelow(e *env, node, volume string) (bool, error) {
	found, err := filepath.Glob(filepath.Join(e.data(node), "kubelet", "pods", "*", "volumes", "kubernetes.io~csi", volume, "mount"))
	return len(found) > 0, err
}

// resize makes a volume larger and leaves the rest to its node.
func (s *sidecars) resize(ctx context.Context) error {
	core := s.e.api.CoreV1()
	claims, err := core.PersistentVolumeClaims("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, c := range claims.Items {
		want, has := c.Spec.Resources.Requests[corev1.ResourceStorage], c.Status.Capacity[corev1.ResourceStorage]
		if c.Status.Phase != corev1.ClaimBound || want.Cmp(has) <= 0 || c.Annotations["volume.kubernetes.io/storage-resizer"] != diskDriver || len(c.Status.AllocatedResourceStatuses) > 0 {
			continue
		}
		v, err := core.PersistentVolumes().Get(ctx, c.Spec.VolumeName, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("volume of claim %s: %w", c.Name, err)
		}
		v.Spec.Capacity[corev1.ResourceStorage] = want
		if _, err := core.PersistentVolumes().Update(ctx, v, metav1.UpdateOptions{}); err != nil {
			return err
		}
		c.Status.AllocatedResources = corev1.ResourceList{corev1.ResourceStorage: want}
		c.Status.AllocatedResourceStatuses = map[corev1.ResourceName]corev1.ClaimResourceStatus{corev1.ResourceStorage: corev1.PersistentVolumeClaimNodeResizePending}
		c.Status.Conditions = append(c.Status.Conditions, corev1.PersistentVolumeClaimCondition{Type: corev1.PersistentVolumeClaimFileSystemResizePending, Status: corev1.ConditionTrue})
		if _, err := core.PersistentVolumeClaims(c.Namespace).UpdateStatus(ctx, &c, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	return nil
}
