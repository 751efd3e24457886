package scheduler

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	helper "k8s.io/component-helpers/storage/volume"

	"github.com/clusterd/clusterd/sched/internal/volumes"
)

// volumeTimeout is by default how long a pod waits on its node for volumes to be made,
// before a node is chosen again.
const volumeTimeout = 10 * time.Minute

var errVolumesLate = errors.New("timed out waiting for the pod's volumes to be bound")

// news wakes everybody who waits for a change.
type news struct {
	mu   sync.Mutex // guards next
	next chan struct{}
}

// wait returns a channel that is closed at the next change.
func (n *news) wait() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.next == nil {
		n.next = make(chan struct{})
	}
	return n.next
}

func (n *news) tell() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.next != nil {
		close(n.next)
		n.next = nil
	}
}

// bindVolumes asks for the volumes of the pod's waiting claims on the node and
// waits until they are bound. Each write names the version that was decided on.
func (s *scheduler) bindVolumes(ctx context.Context, place placement) error {
	api, pod, node, choices := s.client.CoreV1(), place.pod, place.node, place.volumes
	asked := map[string]string{} // by claim: the version with the node in it
	for _, choice := range choices {
		if choice.volume != nil {
			bound, dirty, err := helper.GetBindVolumeToClaim(choice.volume, choice.claim)
			if err != nil {
				return err
			}
			if dirty {
				if _, err := api.PersistentVolumes().Update(ctx, bound, metav1.UpdateOptions{}); err != nil {
					return fmt.Errorf("keep volume %s for claim %s: %w", bound.Name, choice.claim.Name, err)
				}
			}
			continue
		}
		if choice.claim.Annotations[volumes.SelectedNode] == node {
			continue
		}
		updated := choice.claim.DeepCopy()
		metav1.SetMetaDataAnnotation(&updated.ObjectMeta, volumes.SelectedNode, node)
		written, err := api.PersistentVolumeClaims(pod.Namespace).Update(ctx, updated, metav1.UpdateOptions{})
		if err != nil {
			return fmt.Errorf("choose node %s for claim %s: %w", node, choice.claim.Name, err)
		}
		asked[choice.claim.Name] = written.ResourceVersion
	}
	timeout := s.clock.NewTimer(s.snapshot.profiles.of(pod).args.volumeTimeout)
	defer timeout.Stop()
	for {
		changed := s.volumeNews.wait()
		if !s.stillWaiting(pod) {
			return errGone
		}
		missing := ""
		for _, choice := range choices {
			claim, err := s.storage.claims.PersistentVolumeClaims(pod.Namespace).Get(choice.claim.Name)
			if err != nil || claim.UID != choice.claim.UID {
				return fmt.Errorf("persistentvolumeclaim %q was deleted", choice.claim.Name)
			}
			if volumes.Bound(claim) {
				continue
			}
			missing = claim.Name
			if version, ok := asked[claim.Name]; ok && claim.Annotations[volumes.SelectedNode] != node && !older(claim.ResourceVersion, version) {
				return fmt.Errorf("%w: %q", errNotThere, claim.Name)
			}
		}
		if missing == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-place.off:
			return errCalledOff
		case <-timeout.C():
			return fmt.Errorf("%w: %q", errVolumesLate, missing)
		}
	}
}

// older reports whether version a comes before b.
func older(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err != nil || order < 0
}

// errNotThere is returned when the provisioner has given the node back: a
// volume cannot be made for it now.
var errNotThere = errors.New("the provisioner cannot make the volume for this node")

// errGone is returned for a pod that needs no node any more.
var errGone = errors.New("the pod is gone or has a node")
