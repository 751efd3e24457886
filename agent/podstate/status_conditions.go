package podstate

import (
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/names"
)

// conditions sets the node's conditions and keeps all others.
func (b *builder) conditions(st *v1.PodStatus, initDone bool) {
	pod := b.d.Pod
	done := core.FinalPhase(st.Phase)
	doneReason := map[v1.PodPhase]string{v1.PodSucceeded: "PodCompleted", v1.PodFailed: "PodFailed"}[st.Phase]

	set := func(t v1.PodConditionType, ok bool, reason, message string) {
		c := v1.PodCondition{Type: t, Status: v1.ConditionTrue, ObservedGeneration: pod.Generation}
		if !ok {
			c.Status, c.Reason, c.Message = v1.ConditionFalse, reason, message
		}
		if done && ok && t == v1.PodInitialized && doneReason == "PodCompleted" {
			c.Reason = doneReason
		}
		st.Conditions = append(st.Conditions, core.TimedPodCondition(b.old.Conditions, c, b.now))
	}

	set(v1.PodReadyToStartContainers, b.o.Sandbox.State == SandboxReady && b.o.Volumes.Ready, "", "")

	var missing []string
	for _, c := range st.InitContainerStatuses {
		if c.Ready || c.Started != nil && *c.Started {
			continue
		}
		missing = append(missing, c.Name)
	}
	if done && st.Phase == v1.PodSucceeded {
		initDone = true
	}
	set(v1.PodInitialized, initDone, "ContainersNotInitialized", fmt.Sprintf("containers with incomplete status: %v", missing))

	ready, reason, message := true, "", ""
	var unready []string
	for i := range st.ContainerStatuses {
		if !st.ContainerStatuses[i].Ready {
			unready = append(unready, st.ContainerStatuses[i].Name)
		}
	}
	for i := range st.InitContainerStatuses {
		if InitKind(&pod.Spec.InitContainers[i]) == KindSidecar && !st.InitContainerStatuses[i].Ready {
			unready = append(unready, st.InitContainerStatuses[i].Name)
		}
	}
	switch {
	case done:
		ready, reason = false, doneReason
	case len(unready) > 0:
		ready, reason, message = false, "ContainersNotReady", fmt.Sprintf("containers with unready status: %v", unready)
	}
	set(v1.ContainersReady, ready, reason, message)

	if ready && b.o.Verdict != nil && b.o.Verdict.Reason == ReasonTerminated {
		// Services are not to lead to a machine that goes down, however long its
		// containers take to end.
		ready, reason, message = false, ReasonTerminated, b.o.Verdict.Message
	}
	if ready {
		var gates []string
		for _, g := range pod.Spec.ReadinessGates {
			if i := core.PodConditionIndex(b.old.Conditions, g.ConditionType); i < 0 {
				gates = append(gates, fmt.Sprintf("corresponding condition of pod readiness gate %q does not exist.", g.ConditionType))
			} else if b.old.Conditions[i].Status != v1.ConditionTrue {
				gates = append(gates, fmt.Sprintf("the status of pod readiness gate %q is not \"True\", but %s", g.ConditionType, b.old.Conditions[i].Status))
			}
		}
		if len(gates) > 0 {
			ready, reason, message = false, "ReadinessGatesNotReady", strings.Join(gates, ", ")
		}
	}
	set(v1.PodReady, ready, reason, message)
	set(v1.PodScheduled, true, "", "")
	if b.o.Disrupted {
		c := v1.PodCondition{Type: v1.DisruptionTarget, Status: v1.ConditionTrue, Reason: v1.PodReasonTerminationByKubelet,
			Message: b.o.Verdict.Message, ObservedGeneration: pod.Generation}
		st.Conditions = append(st.Conditions, core.TimedPodCondition(b.old.Conditions, c, b.now))
	}
	if b.o.SelfFencing {
		set(names.SelfFencingCondition, true, "", "")
	}
	b.resizeConditions(st)

	for _, c := range b.old.Conditions {
		if !IsTransient(c.Type) && core.PodConditionIndex(st.Conditions, c.Type) < 0 {
			st.Conditions = append(st.Conditions, c)
		}
	}
}

// resizeConditions tells of a resize that waits or is under way.
func (b *builder) resizeConditions(st *v1.PodStatus) {
	if core.FinalPhase(st.Phase) {
		return
	}
	set := func(t v1.PodConditionType, reason, message string) {
		c := v1.PodCondition{Type: t, Status: v1.ConditionTrue, Reason: reason, Message: message, ObservedGeneration: b.d.Pod.Generation}
		st.Conditions = append(st.Conditions, core.TimedPodCondition(b.old.Conditions, c, b.now))
	}
	spec := &b.d.Pod.Spec
	asked := b.o.wanted(spec)
	if f := b.o.ResizePending; f != nil && asked {
		set(v1.PodResizePending, f.Reason, f.Message)
		asked = false
	}
	// A generation is never observed without a condition until its resources are held.
	if asked || len(b.o.Unapplied(spec)) > 0 || b.o.podUnapplied(b.d.Pod) {
		if f := b.o.ResizeErr; f != nil {
			set(v1.PodResizeInProgress, f.Reason, f.Message)
		} else {
			set(v1.PodResizeInProgress, "", "")
		}
	}
}

// Owned are the condition types that only the agent writes once a pod is on its node.
// PodScheduled is the scheduler's and the binding's until then, and observes each
// generation from there on, as all of them do.
var Owned = []v1.PodConditionType{v1.PodReadyToStartContainers, v1.PodInitialized, v1.ContainersReady, v1.PodReady, v1.PodScheduled,
	v1.PodResizePending, v1.PodResizeInProgress}

// IsTransient tells of a condition type of the agent's that is there only
// while it is true.
func IsTransient(t v1.PodConditionType) bool {
	return t == v1.PodResizePending || t == v1.PodResizeInProgress
}
