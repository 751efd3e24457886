package scheduler

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/sched/internal/volumes"
)

// reasonVolumeLimit is upstream's word.
const reasonVolumeLimit = "node(s) exceed max volume count"

// filterVolumeLimits refuses nodes on which a driver would have more volumes than
// it takes there, as it has said in the node's CSINode object.
func filterVolumeLimits(s *snapshot, p *podInfo) func(*nodeInfo) []string {
	w := s.storage
	if w == nil || p.storage == nil || w.csiNodes == nil {
		return nil
	}
	wants := w.driven(p.pod)
	if len(wants) == 0 {
		return nil
	}
	return func(n *nodeInfo) []string {
		most := w.limits(n.name, wants)
		if len(most) == 0 {
			return nil
		}
		have := map[drivenVolume]bool{}
		for _, other := range n.pods {
			if other.pod.UID == p.pod.UID {
				continue
			}
			for _, v := range w.driven(other.pod) {
				have[v] = true
			}
		}
		count := map[string]int32{}
		for v := range have {
			count[v.driver]++
		}
		for _, v := range wants {
			if have[v] {
				continue
			}
			have[v] = true
			count[v.driver]++
			if limit, ok := most[v.driver]; ok && count[v.driver] > limit {
				return []string{reasonVolumeLimit}
			}
		}
		return nil
	}
}

// drivenVolume is one that a CSI driver counts: by its handle, or, before it is
// made, by its claim.
type drivenVolume struct{ driver, id string }

// driven are the volumes of a pod's claims that CSI drivers mount, or will.
func (w *storageView) driven(pod *corev1.Pod) []drivenVolume {
	var out []drivenVolume
	for _, use := range volumes.UsesOf(pod) {
		claim, err := w.claims.PersistentVolumeClaims(pod.Namespace).Get(use.Claim)
		if err != nil {
			continue
		}
		if claim.Spec.VolumeName != "" {
			if v, err := w.volumes.Get(claim.Spec.VolumeName); err == nil && v.Spec.CSI != nil {
				out = append(out, drivenVolume{v.Spec.CSI.Driver, v.Spec.CSI.VolumeHandle})
			}
			continue
		}
		if name := claim.Spec.StorageClassName; name != nil {
			if class, err := w.classes.Get(*name); err == nil && volumes.Provisions(class) {
				out = append(out, drivenVolume{class.Provisioner, "claim/" + pod.Namespace + "/" + use.Claim})
			}
		}
	}
	return out
}

// limits are how many volumes drivers take on a node, of those that are asked
// about and say so.
func (w *storageView) limits(node string, wants []drivenVolume) map[string]int32 {
	object, err := w.csiNodes.Get(node)
	if err != nil {
		return nil
	}
	out := map[string]int32{}
	for _, d := range object.Spec.Drivers {
		if d.Allocatable == nil || d.Allocatable.Count == nil {
			continue
		}
		for _, v := range wants {
			if v.driver == d.Name {
				out[d.Name] = *d.Allocatable.Count
			}
		}
	}
	return out
}
