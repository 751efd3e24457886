package scheduler

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
	storagelisters "k8s.io/client-go/listers/storage/v1"
	helper "k8s.io/component-helpers/storage/volume"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/internal/volumes"
)

// storageView is what there is of claims, volumes and classes.
type storageView struct {
	claims  corelisters.PersistentVolumeClaimLister
	volumes corelisters.PersistentVolumeLister
	classes storagelisters.StorageClassLister
	// Of drivers; nil: nothing is known of any.
	csiNodes   storagelisters.CSINodeLister
	csiDrivers storagelisters.CSIDriverLister
	capacities storagelisters.CSIStorageCapacityLister
}

// demand is what a pod asks of a node's storage.
type demand struct {
	bound []*corev1.PersistentVolume
	// waiting are claims that get their volume when the pod gets its node.
	waiting []waitingClaim
	free    []*corev1.PersistentVolume // all there are, if waiting is not empty
	// users are other pods with a node that use a claim which is for one pod.
	users []types.UID
}

type waitingClaim struct {
	claim *corev1.PersistentVolumeClaim
	class *storagev1.StorageClass
	// rooms say where its volume can be made, if bounded.
	rooms   []room
	bounded bool
}

// claimChoice is what is to be done for a claim on the node that was chosen:
// keep the volume for it, or, if that is nil, have one made.
type claimChoice struct {
	claim  *corev1.PersistentVolumeClaim
	volume *corev1.PersistentVolume
}

// need finds the pod's claims. why tells what no node can help with.
func (w *storageView) need(s *snapshot, pod *corev1.Pod) (d *demand, why string, wokenBy change) {
	uses := volumes.UsesOf(pod)
	if w == nil || len(uses) == 0 {
		return nil, "", 0
	}
	d = &demand{}
	for _, use := range uses {
		claim, err := w.claims.PersistentVolumeClaims(pod.Namespace).Get(use.Claim)
		switch {
		case err != nil && use.Ephemeral:
			return nil, fmt.Sprintf("waiting for ephemeral volume controller to create the persistentvolumeclaim %q", use.Claim), volumeChanged
		case err != nil:
			return nil, fmt.Sprintf("persistentvolumeclaim %q not found", use.Claim), volumeChanged
		case use.Ephemeral && !metav1.IsControlledBy(claim, pod):
			return nil, fmt.Sprintf("persistentvolumeclaim %q was not created for pod %q (pod is not owner)", use.Claim, pod.Name), volumeChanged
		case claim.DeletionTimestamp != nil:
			return nil, fmt.Sprintf("persistentvolumeclaim %q is being deleted", use.Claim), volumeChanged
		case claim.Status.Phase == corev1.ClaimLost:
			return nil, fmt.Sprintf("persistentvolumeclaim %q bound to non-existent persistentvolume %q", use.Claim, claim.Spec.VolumeName), volumeChanged
		}
		if slices.Contains(claim.Spec.AccessModes, corev1.ReadWriteOncePod) {
			d.users = append(d.users, s.usersOf(pod, use.Claim)...)
		}
		if volumes.Bound(claim) {
			v, err := w.volumes.Get(claim.Spec.VolumeName)
			if err != nil {
				return nil, fmt.Sprintf("persistentvolumeclaim %q bound to non-existent persistentvolume %q", use.Claim, claim.Spec.VolumeName), volumeChanged
			}
			d.bound = append(d.bound, v)
			continue
		}
		class, err := w.classes.Get(helper.GetPersistentVolumeClaimClass(claim))
		if err != nil || claim.Spec.VolumeName != "" || !volumes.Waits(class) {
			return nil, fmt.Sprintf("pod has unbound immediate PersistentVolumeClaims: %q has no volume yet", use.Claim), volumeChanged
		}
		rooms, bounded := w.rooms(class)
		d.waiting = append(d.waiting, waitingClaim{claim, class, rooms, bounded})
	}
	if len(d.waiting) > 0 {
		if d.free, _ = w.volumes.List(labels.Everything()); d.free == nil {
			d.free = []*corev1.PersistentVolume{}
		}
	}
	return d, "", 0
}

// usersOf are the other pods that have a node and use the claim.
func (s *snapshot) usersOf(pod *corev1.Pod, claim string) (out []types.UID) {
	for _, n := range s.list {
		for uid, other := range n.pods {
			if other.pod.Namespace != pod.Namespace || uid == pod.UID || pods.Finished(other.pod) {
				continue
			}
			if slices.ContainsFunc(volumes.UsesOf(other.pod), func(u volumes.Use) bool { return u.Claim == claim }) {
				out = append(out, uid)
			}
		}
	}
	return out
}

// volumeRestrictions is the name of the rule, as upstream has it.
const volumeRestrictions = "VolumeRestrictions"

var inUse = []string{"node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access mode"}

// filterVolumeUsers refuses all nodes while another pod uses a claim of the pod's that
// is for one pod. The loss of that pod helps, on its own node.
func filterVolumeUsers(s *snapshot, p *podInfo) func(*nodeInfo) []string {
	if p.storage == nil || len(p.storage.users) == 0 {
		return nil
	}
	if !slices.ContainsFunc(p.storage.users, func(uid types.UID) bool { return s.placed[uid] != "" }) {
		return nil
	}
	return func(*nodeInfo) []string { return inUse }
}

// filterVolumes refuses nodes from which the pod's volumes cannot be reached,
// and those on which none can be had for its waiting claims.
func filterVolumes(_ *snapshot, p *podInfo) func(*nodeInfo) []string {
	if p.storage == nil {
		return nil
	}
	return func(n *nodeInfo) []string {
		for _, v := range p.storage.bound {
			if !volumes.Reaches(v, n.node) {
				return []string{"node(s) didn't match PersistentVolume's node affinity"}
			}
			if !volumes.InZone(v, n.node) {
				return []string{"node(s) had no available volume zone"}
			}
		}
		if _, ok := p.storage.on(n.node); !ok {
			return []string{"node(s) didn't find available persistent volumes to bind"}
		}
		if p.storage.short(n.node) {
			return []string{"node(s) did not have enough free storage"}
		}
		return nil
	}
}

// on says which volumes the waiting claims get on the node; ok is false if one
// gets none there. A claim that a provisioner makes a volume for waits for
// that one.
func (d *demand) on(node *corev1.Node) (choices []claimChoice, ok bool) {
	if d == nil {
		return nil, true
	}
	taken := map[string]*corev1.PersistentVolume{}
	for _, w := range d.waiting {
		if selected := w.claim.Annotations[volumes.SelectedNode]; selected != "" && selected != node.Name {
			return nil, false
		}
		v := volumes.Best(w.claim, d.free, node, false, taken)
		if v == nil && (!volumes.Provisions(w.class) || !allowedBy(w.class, node)) {
			return nil, false
		}
		if v != nil {
			taken[v.Name] = v
		}
		choices = append(choices, claimChoice{w.claim, v})
	}
	return choices, true
}

// short reports whether a volume is to be made for the node and there is no room
// for it. One that was asked for already is not asked about again: its room is
// counted as taken.
func (d *demand) short(node *corev1.Node) bool {
	for _, w := range d.waiting {
		if w.bounded && w.claim.Annotations[volumes.SelectedNode] == "" && volumes.Best(w.claim, d.free, node, false, nil) == nil && !enough(w.rooms, w.claim, node) {
			return true
		}
	}
	return false
}

// allowedBy reports whether the class lets volumes be made for the node.
func allowedBy(class *storagev1.StorageClass, node *corev1.Node) bool {
	if len(class.AllowedTopologies) == 0 {
		return true
	}
	return slices.ContainsFunc(class.AllowedTopologies, func(term corev1.TopologySelectorTerm) bool {
		for _, r := range term.MatchLabelExpressions {
			if value, ok := node.Labels[r.Key]; !ok || !slices.Contains(r.Values, value) {
				return false
			}
		}
		return true
	})
}
