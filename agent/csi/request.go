package csi

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strconv"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/clusterd/clusterd/agent/volume"
)

// Keys of a volume's context by which drivers learn of pods and tokens.
const (
	contextPod       = "csi.storage.k8s.io/pod.name"
	contextNamespace = "csi.storage.k8s.io/pod.namespace"
	contextUID       = "csi.storage.k8s.io/pod.uid"
	contextAccount   = "csi.storage.k8s.io/serviceAccount.name"
	contextEphemeral = "csi.storage.k8s.io/ephemeral"
	contextTokens    = "csi.storage.k8s.io/serviceAccount.tokens"
)

// mountRequest is what a pod wants of a driver, from the objects that say so.
type mountRequest struct {
	driver, handle string
	attributes     map[string]string
	modes          []v1.PersistentVolumeAccessMode
	fsType         string
	options        []string
	block          bool
	readOnly       bool
	stageSecret    *v1.SecretReference
	publishSecret  *v1.SecretReference
	expandSecret   *v1.SecretReference
}

// mountRequestOf reads a volume.
func mountRequestOf(pod *v1.Pod, d volume.Driven) (mountRequest, error) {
	if in := d.Inline; in != nil {
		w := mountRequest{driver: in.Driver, handle: inlineHandle(pod, d.Name), attributes: in.VolumeAttributes, readOnly: in.ReadOnly != nil && *in.ReadOnly}
		if in.FSType != nil {
			w.fsType = *in.FSType
		}
		if s := in.NodePublishSecretRef; s != nil {
			w.publishSecret = &v1.SecretReference{Namespace: pod.Namespace, Name: s.Name}
		}
		return w, nil
	}
	pv := d.PV
	if pv == nil || pv.Spec.CSI == nil {
		return mountRequest{}, errors.New("it is no volume of a CSI driver")
	}
	src := pv.Spec.CSI
	return mountRequest{
		driver: src.Driver, handle: src.VolumeHandle, attributes: src.VolumeAttributes, modes: pv.Spec.AccessModes, fsType: src.FSType,
		options: pv.Spec.MountOptions, block: pv.Spec.VolumeMode != nil && *pv.Spec.VolumeMode == v1.PersistentVolumeBlock,
		readOnly:    d.ReadOnly || src.ReadOnly,
		stageSecret: src.NodeStageSecretRef, publishSecret: src.NodePublishSecretRef, expandSecret: src.NodeExpandSecretRef,
	}, nil
}

// inlineHandle names a volume that is made for one pod.
func inlineHandle(pod *v1.Pod, name string) string {
	return fmt.Sprintf("csi-%x", sha256.Sum256([]byte(pod.Namespace+"\x00"+string(pod.UID)+"\x00"+name)))
}

// capability is how the volume is to be had.
func (w *mountRequest) capability(can caps, group *int64) *spec.VolumeCapability {
	out := &spec.VolumeCapability{AccessMode: &spec.VolumeCapability_AccessMode{Mode: accessMode(w.modes, can)}}
	if w.block {
		out.AccessType = &spec.VolumeCapability_Block{Block: &spec.VolumeCapability_BlockVolume{}}
		return out
	}
	mount := &spec.VolumeCapability_MountVolume{FsType: w.fsType, MountFlags: w.options}
	if can.mountGroup && group != nil {
		mount.VolumeMountGroup = strconv.FormatInt(*group, 10)
	}
	out.AccessType = &spec.VolumeCapability_Mount{Mount: mount}
	return out
}

// accessMode is the first of a volume's modes in CSI's words. Drivers that know
// the difference get whether one pod or the pods of one node write.
func accessMode(modes []v1.PersistentVolumeAccessMode, can caps) spec.VolumeCapability_AccessMode_Mode {
	mode := v1.ReadWriteOnce
	if len(modes) > 0 {
		mode = modes[0]
	}
	switch mode {
	case v1.ReadOnlyMany:
		return spec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	case v1.ReadWriteMany:
		return spec.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	case v1.ReadWriteOncePod:
		if can.multiWriter {
			return spec.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
		}
	default:
		if can.multiWriter {
			return spec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
		}
	}
	return spec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
}

// owns reports whether the node gives the volume's files to the pod's group, by
// the driver's policy.
func (w *mountRequest) owns(policy *storagev1.FSGroupPolicy, can caps, inline bool) bool {
	if w.block || w.readOnly || can.mountGroup {
		return false
	}
	switch {
	case policy == nil || *policy == storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy:
		once := slices.Contains(w.modes, v1.ReadWriteOnce) || slices.Contains(w.modes, v1.ReadWriteOncePod)
		return w.fsType != "" && (inline || once)
	case *policy == storagev1.FileFSGroupPolicy:
		return true
	}
	return false
}

// mayBe says whether the driver mounts volumes of the kind.
func mayBe(d *storagev1.CSIDriver, inline bool) error {
	mode := storagev1.VolumeLifecyclePersistent
	if inline {
		mode = storagev1.VolumeLifecycleEphemeral
	}
	modes := d.Spec.VolumeLifecycleModes
	if len(modes) == 0 {
		modes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}
	}
	if !slices.Contains(modes, mode) {
		return fmt.Errorf("CSI driver %s does not support volumes of lifecycle mode %s: its CSIDriver object lists %v in spec.volumeLifecycleModes", d.Name, mode, modes)
	}
	return nil
}

// podContext is what a driver that asks for it gets of the pod.
func podContext(d *storagev1.CSIDriver, pod *v1.Pod, inline bool) map[string]string {
	if !isTrue(d.Spec.PodInfoOnMount) {
		return nil
	}
	return map[string]string{
		contextPod: pod.Name, contextNamespace: pod.Namespace, contextUID: string(pod.UID), contextAccount: account(pod), contextEphemeral: strconv.FormatBool(inline),
	}
}

func account(pod *v1.Pod) string {
	if pod.Spec.ServiceAccountName != "" {
		return pod.Spec.ServiceAccountName
	}
	return "default"
}
