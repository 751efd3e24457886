package scheduler

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	schedulinglisters "k8s.io/client-go/listers/scheduling/v1beta1"
	"k8s.io/client-go/tools/cache"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"

	"github.com/clusterd/clusterd/sched/loop"
)

// groups are the PodGroups, and the pods that name them.
type groups struct {
	lister   schedulinglisters.PodGroupLister
	informer cache.SharedIndexInformer
	reporter *loop.Controller // of groups, by their keys

	// The scheduler's mutex guards these.

	// members are the pods that name each group, as informers show them.
	members map[loop.Key]map[types.UID]*corev1.Pod
	// preparing are the groups that have places while something is written
	// before their pods can be bound: all of it may have been in vain.
	preparing map[loop.Key]bool
	// refused is why each group had no place at its last attempt.
	refused map[loop.Key]string
}

func newGroups() groups {
	return groups{members: map[loop.Key]map[types.UID]*corev1.Pod{}, preparing: map[loop.Key]bool{}, refused: map[loop.Key]string{}}
}

// groupOf names the group of a pod.
func groupOf(pod *corev1.Pod) (loop.Key, bool) {
	if pod.Spec.SchedulingGroup == nil || pod.Spec.SchedulingGroup.PodGroupName == nil {
		return loop.Key{}, false
	}
	return loop.Key{Namespace: pod.Namespace, Name: *pod.Spec.SchedulingGroup.PodGroupName}, true
}

// get returns the PodGroup; nil: there is none.
func (g *groups) get(key loop.Key) (*schedulingv1beta1.PodGroup, error) {
	group, err := g.lister.PodGroups(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return group, err
}

// priorityOf is the one by which a pod waits for its turn: its group's, which is
// one for all of them, or its own.
func (g *groups) priorityOf(pod *corev1.Pod) int32 {
	if pod.Spec.SchedulingGroup != nil {
		if key, ok := groupOf(pod); ok {
			if group, err := g.get(key); err == nil && group != nil && group.Spec.Priority != nil {
				return *group.Spec.Priority
			}
		}
	}
	return corev1helpers.PodPriority(pod)
}

// onGroupPod takes note of a pod that names a group, before the queue does.
func (s *scheduler) onGroupPod(old, pod *corev1.Pod) {
	key, ok := groupOf(pod)
	if !ok {
		return
	}
	s.mu.Lock()
	if s.groups.members[key] == nil {
		s.groups.members[key] = map[types.UID]*corev1.Pod{}
	}
	s.groups.members[key][pod.UID] = pod
	ours := s.snapshot.assumed[pod.UID]
	s.mu.Unlock()
	if old == nil || old.Spec.NodeName != pod.Spec.NodeName {
		s.groups.reporter.EnqueueAfter(key, groupPause)
		if pod.Spec.NodeName != "" && !ours {
			s.wakeGroup(key) // it was bound elsewhere: fewer are needed now
		}
	}
}

func (s *scheduler) groupPodGone(pod *corev1.Pod) {
	key, ok := groupOf(pod)
	if !ok {
		return
	}
	s.mu.Lock()
	delete(s.groups.members[key], pod.UID)
	if len(s.groups.members[key]) == 0 {
		delete(s.groups.members, key)
		delete(s.groups.refused, key)
	}
	s.mu.Unlock()
	s.groups.reporter.EnqueueAfter(key, groupPause)
}

func (s *scheduler) onGroup(old, group *schedulingv1beta1.PodGroup) {
	if old != nil && group != nil && old.UID == group.UID && apiequality.Semantic.DeepEqual(old.Spec, group.Spec) {
		return // its status: our own words
	}
	key := loop.KeyOf(loop.Latest(old, group))
	s.groups.reporter.EnqueueAfter(key, groupPause)
	s.wakeGroup(key)
}

// wakeGroup lets the waiting pods of a group be tried again: what it needs has changed.
func (s *scheduler) wakeGroup(key loop.Key) {
	s.mu.Lock()
	waiting := s.countGroup(key).waiting
	s.mu.Unlock()
	for _, pod := range waiting {
		s.queue.renew(pod)
	}
}

// headcount says where the pods of a group are.
type headcount struct {
	// waiting are those that this scheduler may place.
	waiting []*corev1.Pod
	// placed counts those that have a node, or are assumed on one. Pods that
	// have succeeded had theirs; those that have failed, or are on their way out,
	// are of no use to the others.
	placed int
	// bound counts those of placed of which informers say so.
	bound int
}

// countGroup counts the members of a group; s.mu is held.
func (s *scheduler) countGroup(key loop.Key) (n headcount) {
	for uid, pod := range s.groups.members[key] {
		_, placed := s.snapshot.placed[uid]
		switch {
		case pod.Status.Phase == corev1.PodSucceeded:
			n.placed++
			n.bound++
		case pod.DeletionTimestamp != nil, pod.Status.Phase == corev1.PodFailed:
		case pod.Spec.NodeName != "":
			n.placed++
			n.bound++
		case placed:
			n.placed++
		case s.ours(pod):
			n.waiting = append(n.waiting, pod)
		}
	}
	return n
}

// lack says what keeps a group from being tried at all; "": nothing does. need is
// how many of the waiting pods must get a node at once; 0: each is placed by itself.
func lack(key loop.Key, group *schedulingv1beta1.PodGroup, n headcount) (why string, need int) {
	if group == nil {
		return fmt.Sprintf("PodGroup %q is not there: create it, or the pod without spec.schedulingGroup", key.Name), 0
	}
	gang := group.Spec.SchedulingPolicy.Gang
	if gang == nil {
		return "", 0
	}
	need = max(0, int(gang.MinCount)-n.placed)
	if there := n.placed + len(n.waiting); need > len(n.waiting) {
		return fmt.Sprintf("%d of the %d pods that PodGroup %q needs at the same time are there", there, gang.MinCount, key.Name), need
	}
	return "", need
}
