// Package volumes answers questions about claims and persistent volumes that
// several loops must answer alike: what binds to what, and from which nodes a
// volume can be reached.
package volumes

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/component-helpers/storage/ephemeral"
	helper "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"
)

// Annotations of claims and volumes, as provisioners and kubectl know them.
const (
	BindCompleted     = helper.AnnBindCompleted
	BoundByController = helper.AnnBoundByController
	SelectedNode      = helper.AnnSelectedNode
	Provisioner       = helper.AnnStorageProvisioner
	BetaProvisioner   = helper.AnnBetaStorageProvisioner
	ProvisionedBy     = helper.AnnDynamicallyProvisioned
)

// Resizer is the annotation of claims that names the resizer of their volume.
const Resizer = "volume.kubernetes.io/storage-resizer"

// NoProvisioner is the provisioner of classes whose volumes people make.
const NoProvisioner = "kubernetes.io/no-provisioner"

// Waits reports whether claims of the class are bound only when a pod that
// uses them has got a node.
func Waits(class *storagev1.StorageClass) bool {
	return class != nil && ptr.Deref(class.VolumeBindingMode, storagev1.VolumeBindingImmediate) == storagev1.VolumeBindingWaitForFirstConsumer
}

// Provisions reports whether a provisioner makes volumes for claims of the class.
func Provisions(class *storagev1.StorageClass) bool {
	return class != nil && class.Provisioner != "" && class.Provisioner != NoProvisioner
}

// Bound reports whether the claim is permanently bound to its volume.
func Bound(claim *corev1.PersistentVolumeClaim) bool {
	_, done := claim.Annotations[BindCompleted]
	return done && claim.Spec.VolumeName != "" && claim.Status.Phase == corev1.ClaimBound
}

// Satisfies says what of the volume does not suit the claim, nil: nothing.
func Satisfies(v *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) error {
	want, have := claim.Spec.Resources.Requests[corev1.ResourceStorage], v.Spec.Capacity[corev1.ResourceStorage]
	switch {
	case want.Cmp(have) > 0:
		return fmt.Errorf("requested PV is too small: it has %s, the claim asks for %s", have.String(), want.String())
	case helper.GetPersistentVolumeClass(v) != helper.GetPersistentVolumeClaimClass(claim):
		return fmt.Errorf("storageClassName does not match: the volume's is %q, the claim's %q", helper.GetPersistentVolumeClass(v), helper.GetPersistentVolumeClaimClass(claim))
	case helper.CheckVolumeModeMismatches(&claim.Spec, &v.Spec):
		return errors.New("incompatible volumeMode")
	case !helper.CheckAccessModes(claim, v):
		return fmt.Errorf("incompatible accessMode: the claim asks for %v, the volume has %v", claim.Spec.AccessModes, v.Spec.AccessModes)
	}
	return nil
}

// Best is the volume to bind the claim to, nil: there is none. One that was
// kept for it comes first, then the smallest that suits. node is where the
// claim is to be used, nil: not known. With onlyKept, other volumes than those
// that were kept for it don't count. taken are volumes that the caller has
// promised already.
func Best(claim *corev1.PersistentVolumeClaim, all []*corev1.PersistentVolume, node *corev1.Node, onlyKept bool, taken map[string]*corev1.PersistentVolume) *corev1.PersistentVolume {
	var candidates []*corev1.PersistentVolume
	for _, v := range all {
		if helper.CheckAccessModes(claim, v) {
			candidates = append(candidates, v)
		}
	}
	best, err := helper.FindMatchingVolume(claim, candidates, node, taken, onlyKept, true)
	if err != nil {
		return nil // a selector that validation let pass has none
	}
	return best
}

// Reaches reports whether the volume can be mounted on the node.
func Reaches(v *corev1.PersistentVolume, node *corev1.Node) bool {
	return helper.CheckNodeAffinity(v, node.Labels) == nil
}

// zoneLabels are those by which a volume without node affinity says where it is, with
// what a label was called before.
var zoneLabels = map[string]string{
	corev1.LabelTopologyZone: corev1.LabelFailureDomainBetaZone, corev1.LabelTopologyRegion: corev1.LabelFailureDomainBetaRegion,
	corev1.LabelFailureDomainBetaZone: corev1.LabelTopologyZone, corev1.LabelFailureDomainBetaRegion: corev1.LabelTopologyRegion,
}

// InZone reports whether the node is in a zone and a region that the volume's labels
// name, if they name some. A volume may be in several, and a node that names neither is
// of a cluster without.
func InZone(v *corev1.PersistentVolume, node *corev1.Node) bool {
	for key, other := range zoneLabels {
		zones, ok := v.Labels[key]
		if !ok || !labelled(node) {
			continue
		}
		value, ok := node.Labels[key]
		if !ok {
			value, ok = node.Labels[other]
		}
		if !ok || !slices.Contains(strings.Split(zones, "__"), value) {
			return false
		}
	}
	return true
}

// labelled reports whether the node says in which zone or region it is.
func labelled(node *corev1.Node) bool {
	for key := range zoneLabels {
		if _, ok := node.Labels[key]; ok {
			return true
		}
	}
	return false
}

// Use is a claim that a pod mounts.
type Use struct {
	// Claim is its name in the pod's namespace.
	Claim string
	// Ephemeral: it is made for this pod and goes with it.
	Ephemeral bool
}

// UsesOf lists the claims that the pod mounts.
func UsesOf(pod *corev1.Pod) []Use {
	var out []Use
	for i := range pod.Spec.Volumes {
		switch v := &pod.Spec.Volumes[i]; {
		case v.PersistentVolumeClaim != nil:
			out = append(out, Use{Claim: v.PersistentVolumeClaim.ClaimName})
		case v.Ephemeral != nil:
			out = append(out, Use{Claim: ephemeral.VolumeClaimName(pod, v), Ephemeral: true})
		}
	}
	return out
}
