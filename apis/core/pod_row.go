package core

import (
	"fmt"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/internal/cells"
)

// nodeLost is the pod's status reason when its node cannot be reached.
const nodeLost = "NodeLost"

var podColumns = []metav1.TableColumnDefinition{
	cells.Name,
	cells.Text("Ready", "Containers of the pod that are ready, of all that should run."),
	cells.Text("Status", "What the pod is doing, or what keeps it from running."),
	cells.Text("Restarts", "How often its containers were restarted, and when last."),
	cells.Age,
	cells.Wide(cells.Text("IP", corev1.PodStatus{}.SwaggerDoc()["podIP"])),
	cells.Wide(cells.Text("Node", corev1.PodSpec{}.SwaggerDoc()["nodeName"])),
	cells.Wide(cells.Text("Nominated Node", corev1.PodStatus{}.SwaggerDoc()["nominatedNodeName"])),
	cells.Wide(cells.Text("Readiness Gates", corev1.PodSpec{}.SwaggerDoc()["readinessGates"])),
}

func podRow(pod *corev1.Pod, now time.Time) []any {
	s := summarize(pod)
	restarts := strconv.Itoa(s.restarts)
	if s.restarts > 0 && !s.lastRestart.IsZero() {
		restarts = fmt.Sprintf("%d (%s ago)", s.restarts, cells.Since(s.lastRestart, now))
	}
	ip := pod.Status.PodIP
	if len(pod.Status.PodIPs) > 0 {
		ip = pod.Status.PodIPs[0].IP
	}
	return []any{
		pod.Name,
		fmt.Sprintf("%d/%d", s.ready, s.total),
		s.reason,
		restarts,
		cells.Since(pod.CreationTimestamp, now),
		cells.None(ip),
		cells.None(pod.Spec.NodeName),
		cells.None(pod.Status.NominatedNodeName),
		readinessGates(pod),
	}
}

// podSummary is a pod in the few words of a table.
type podSummary struct {
	reason       string
	ready, total int
	restarts     int
	lastRestart  metav1.Time
}

// count adds the restarts of one container.
func (s *podSummary) count(status *corev1.ContainerStatus) {
	s.restarts += int(status.RestartCount)
	if last := status.LastTerminationState.Terminated; last != nil && s.lastRestart.Before(&last.FinishedAt) {
		s.lastRestart = last.FinishedAt
	}
}

// summarize condenses a pod. The reason is, in rising order of precedence: the
// phase, the status reason, scheduling gates, what an init container or a main
// container waits for or ended with, and deletion.
func summarize(pod *corev1.Pod) podSummary {
	s := podSummary{reason: string(pod.Status.Phase), total: len(pod.Spec.Containers)}
	if pod.Status.Reason != "" {
		s.reason = pod.Status.Reason
	}
	if c := PodCondition(pod, corev1.PodScheduled); c != nil && c.Reason == corev1.PodReasonSchedulingGated {
		s.reason = corev1.PodReasonSchedulingGated
	}

	sidecars := map[string]bool{}
	for i := range pod.Spec.InitContainers {
		if c := &pod.Spec.InitContainers[i]; IsSidecar(c) {
			sidecars[c.Name] = true
			s.total++
		}
	}

	// While it initializes, restarts are those of init containers; afterwards
	// those of containers that keep running, sidecars included.
	running := podSummary{}
	initializing := false
	for i := range pod.Status.InitContainerStatuses {
		status := &pod.Status.InitContainerStatuses[i]
		s.count(status)
		if sidecars[status.Name] {
			running.count(status)
		}
		if done, ready := initialized(status, sidecars[status.Name]); done {
			if ready {
				s.ready++
			}
			continue
		}
		s.reason = initReason(status, i, len(pod.Spec.InitContainers))
		initializing = true
		break
	}
	initCondition := PodCondition(pod, corev1.PodInitialized)
	if !initializing || initCondition != nil && initCondition.Status == corev1.ConditionTrue {
		s.restarts, s.lastRestart = running.restarts, running.lastRestart
		s.summarizeMain(pod)
	}

	if pod.DeletionTimestamp != nil {
		if pod.Status.Reason == nodeLost {
			s.reason = "Unknown"
		} else if !Finished(pod) {
			s.reason = "Terminating"
		}
	}
	return s
}

// summarizeMain adds the main containers. The first of them in the list that
// has something to say gives the reason.
func (s *podSummary) summarizeMain(pod *corev1.Pod) {
	anyRunning := false
	for i := len(pod.Status.ContainerStatuses) - 1; i >= 0; i-- {
		status := &pod.Status.ContainerStatuses[i]
		s.count(status)
		switch state := status.State; {
		case state.Waiting != nil && state.Waiting.Reason != "":
			s.reason = state.Waiting.Reason
		case state.Terminated != nil:
			s.reason = endReason(state.Terminated)
		case status.Ready && state.Running != nil:
			anyRunning = true
			s.ready++
		}
	}
	// One container completed, another still runs: so does the pod.
	if s.reason == "Completed" && anyRunning {
		s.reason = "NotReady"
		if c := PodCondition(pod, corev1.PodReady); c != nil && c.Status == corev1.ConditionTrue {
			s.reason = string(corev1.PodRunning)
		}
	}
}

// initialized tells whether an init container no longer holds up the next one,
// and whether it counts as ready.
func initialized(status *corev1.ContainerStatus, sidecar bool) (done, ready bool) {
	if t := status.State.Terminated; t != nil && t.ExitCode == 0 {
		return true, false
	}
	if sidecar && status.Started != nil && *status.Started {
		return true, status.Ready
	}
	return false, false
}

func initReason(status *corev1.ContainerStatus, i, n int) string {
	switch state := status.State; {
	case state.Terminated != nil:
		return "Init:" + endReason(state.Terminated)
	case state.Waiting != nil && state.Waiting.Reason != "" && state.Waiting.Reason != "PodInitializing":
		return "Init:" + state.Waiting.Reason
	}
	return fmt.Sprintf("Init:%d/%d", i, n)
}

func endReason(t *corev1.ContainerStateTerminated) string {
	switch {
	case t.Reason != "":
		return t.Reason
	case t.Signal != 0:
		return fmt.Sprintf("Signal:%d", t.Signal)
	}
	return fmt.Sprintf("ExitCode:%d", t.ExitCode)
}

func readinessGates(pod *corev1.Pod) string {
	if len(pod.Spec.ReadinessGates) == 0 {
		return "<none>"
	}
	met := 0
	for _, gate := range pod.Spec.ReadinessGates {
		if c := PodCondition(pod, gate.ConditionType); c != nil && c.Status == corev1.ConditionTrue {
			met++
		}
	}
	return fmt.Sprintf("%d/%d", met, len(pod.Spec.ReadinessGates))
}
