package attachdetach

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// unmountTimeout is how long a node that is not healthy is waited for before a
// volume is taken from it that it may still have mounted.
const unmountTimeout = 6 * time.Minute

// outOfService is the taint by which an administrator says that a node is off
// and will not come back as it was.
const outOfService = corev1.TaintNodeOutOfService

// place is a node that a volume is attached to, or to be attached to.
type place struct {
	name string
	// node is its object, nil: there is none.
	node *corev1.Node
	// fenced: the node has lost its Lease, and with it all that it may mount.
	fenced bool
	// pods want the volume there.
	pods []*corev1.Pod
	// attachment is the volume's at this node, nil: there is none.
	attachment *storagev1.VolumeAttachment
	// unwanted is since when no pod wants it there, as far as this leader knows.
	unwanted time.Time
}

// input is all that is decided on.
type input struct {
	volume *corev1.PersistentVolume // nil: it is gone
	// attaches is false for a driver whose volumes need no attachment.
	attaches bool
	// driver names the volume's driver, also when it is gone.
	places []place
	now    time.Time
}

// plan is what to do at each node, by its name.
type plan struct {
	// attach is where an attachment is made.
	attach []string
	// tell is where the node is to learn that the volume is attached.
	tell []string
	// take is where the node is to learn that it is not attached any more, and
	// then the attachment is removed.
	take []string
	// blocked are pods that cannot have the volume where they are, by why.
	blocked []block
	// again is when to look again, 0: when something changes.
	again time.Duration
}

type block struct {
	pod     *corev1.Pod
	message string
}

// decide says what to do about one volume.
func decide(in input) plan {
	var out plan
	for _, p := range in.places {
		a := p.attachment
		switch {
		case len(p.pods) > 0 && in.volume != nil && in.attaches && p.node != nil:
			switch {
			case a == nil:
				if why := taken(in, p.name); why != "" {
					for _, pod := range p.pods {
						out.blocked = append(out.blocked, block{pod, why})
					}
					continue
				}
				out.attach = append(out.attach, p.name)
			case a.DeletionTimestamp != nil: // it is detached first, then attached again
			case a.Status.Attached && !reported(p.node, unique(in.volume)):
				out.tell = append(out.tell, p.name)
			}
		case a == nil || a.DeletionTimestamp != nil:
		default:
			name := uniqueOf(in.volume)
			may, after := mayTake(p, name, in.now)
			if may {
				out.take = append(out.take, p.name)
			} else if after > 0 && (out.again == 0 || after < out.again) {
				out.again = after
			}
		}
	}
	return out
}

// taken says which other node has a volume that one node alone may have, "":
// none.
func taken(in input, node string) string {
	if slices.ContainsFunc(in.volume.Spec.AccessModes, func(m corev1.PersistentVolumeAccessMode) bool {
		return m == corev1.ReadWriteMany || m == corev1.ReadOnlyMany
	}) {
		return ""
	}
	for _, other := range in.places {
		if other.name == node || other.attachment == nil {
			continue
		}
		if len(other.pods) > 0 {
			return fmt.Sprintf("Multi-Attach error for volume %q: it is attached to node %s, where pod %s/%s uses it, and may be used on one node only", in.volume.Name, other.name, other.pods[0].Namespace, other.pods[0].Name)
		}
		return fmt.Sprintf("Multi-Attach error for volume %q: it is still attached to node %s and is detached from there first", in.volume.Name, other.name)
	}
	// Of several nodes that want it at once, the first gets it.
	for _, other := range in.places {
		if other.name < node && len(other.pods) > 0 && other.node != nil {
			return fmt.Sprintf("Multi-Attach error for volume %q: pod %s/%s uses it on node %s, and it may be used on one node only", in.volume.Name, other.pods[0].Namespace, other.pods[0].Name, other.name)
		}
	}
	return ""
}

// mayTake says whether a volume that no pod wants on a node may be taken from
// it, or after what time it may.
func mayTake(p place, name corev1.UniqueVolumeName, now time.Time) (may bool, after time.Duration) {
	switch {
	case p.node == nil: // its deletion says that the machine is gone
		return true, 0
	case !slices.Contains(p.node.Status.VolumesInUse, name):
		return true, 0
	case slices.ContainsFunc(p.node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == outOfService }):
		return true, 0
	case healthy(p.node):
		return false, 0 // its next status tells
	case p.fenced:
		return true, 0
	}
	since := p.unwanted
	if t := readySince(p.node); t.After(since) {
		since = t
	}
	if left := unmountTimeout - now.Sub(since); left > 0 {
		return false, left
	}
	return true, 0
}

func healthy(node *corev1.Node) bool {
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// readySince is since when the node is as ready as it is.
func readySince(node *corev1.Node) time.Time {
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.LastTransitionTime.Time
		}
	}
	return time.Time{}
}

// reported reports whether the node's status lists the volume as attached.
func reported(node *corev1.Node, name corev1.UniqueVolumeName) bool {
	return slices.ContainsFunc(node.Status.VolumesAttached, func(a corev1.AttachedVolume) bool { return a.Name == name })
}

// unique names the volume in nodes' statuses.
func unique(v *corev1.PersistentVolume) corev1.UniqueVolumeName {
	return corev1.UniqueVolumeName("kubernetes.io/csi/" + v.Spec.CSI.Driver + "^" + v.Spec.CSI.VolumeHandle)
}

// uniqueOf is unique; a volume that is gone has no name by which a node could
// know it.
func uniqueOf(v *corev1.PersistentVolume) corev1.UniqueVolumeName {
	if v == nil || v.Spec.CSI == nil {
		return ""
	}
	return unique(v)
}

// attachmentPrefix begins the names of this loop's VolumeAttachments, as of
// upstream's; those of other names belong to their makers.
const attachmentPrefix = "csi-"

// attachmentOf is the attachment of a volume at a node.
func attachmentOf(v *corev1.PersistentVolume, node string) *storagev1.VolumeAttachment {
	name := v.Name
	return &storagev1.VolumeAttachment{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf(attachmentPrefix+"%x", sha256.Sum256([]byte(v.Spec.CSI.VolumeHandle+v.Spec.CSI.Driver+node)))},
		Spec: storagev1.VolumeAttachmentSpec{
			Attacher: v.Spec.CSI.Driver, NodeName: node, Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &name},
		},
	}
}
