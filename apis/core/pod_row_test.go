package core

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestPodRow(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	ago := func(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }
	waiting := func(reason string) corev1.ContainerState {
		return corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}}
	}
	ended := func(code int32, reason string) corev1.ContainerState {
		return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Reason: reason}}
	}
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	containers := func(states ...corev1.ContainerState) []corev1.ContainerStatus {
		statuses := make([]corev1.ContainerStatus, len(states))
		for i, state := range states {
			statuses[i] = corev1.ContainerStatus{Name: fmt.Sprint("c", i), State: state, Ready: state.Running != nil}
		}
		return statuses
	}
	always := ptr.To(corev1.ContainerRestartPolicyAlways)
	tests := []struct {
		name     string
		n, nInit int // containers
		edit     func(*corev1.Pod)
		want     string // ready, status, restarts
	}{
		{"new", 1, 0, func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }, "0/1 Pending 0"},
		{"gated", 1, 0, func(p *corev1.Pod) {
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "a"}}
			preparePodCreate(p)
		}, "0/1 SchedulingGated 0"},
		{"evicted", 1, 0, func(p *corev1.Pod) { p.Status.Phase, p.Status.Reason = corev1.PodFailed, "Evicted" }, "0/1 Evicted 0"},
		{"creating", 2, 0, func(p *corev1.Pod) {
			p.Status.ContainerStatuses = containers(waiting("ContainerCreating"), waiting("ContainerCreating"))
		}, "0/2 ContainerCreating 0"},
		{"running", 2, 0, func(p *corev1.Pod) {
			p.Status.Phase = corev1.PodRunning
			p.Status.ContainerStatuses = containers(running, running)
		}, "2/2 Running 0"},
		{"crashing", 1, 0, func(p *corev1.Pod) {
			p.Status.ContainerStatuses = containers(waiting("CrashLoopBackOff"))
			p.Status.ContainerStatuses[0].RestartCount = 3
			p.Status.ContainerStatuses[0].LastTerminationState.Terminated = &corev1.ContainerStateTerminated{FinishedAt: ago(5 * time.Minute)}
		}, "0/1 CrashLoopBackOff 3 (5m ago)"},
		{"restarts without a date", 1, 0, func(p *corev1.Pod) {
			p.Status.Phase = corev1.PodRunning
			p.Status.ContainerStatuses = containers(running)
			p.Status.ContainerStatuses[0].RestartCount = 2
		}, "1/1 Running 2"},
		{"the first container speaks", 2, 0, func(p *corev1.Pod) {
			p.Status.ContainerStatuses = containers(waiting("ErrImagePull"), waiting("CrashLoopBackOff"))
		}, "0/2 ErrImagePull 0"},
		{"completed", 1, 0, func(p *corev1.Pod) {
			p.Status.Phase = corev1.PodSucceeded
			p.Status.ContainerStatuses = containers(ended(0, "Completed"))
		}, "0/1 Completed 0"},
		{"exit code", 1, 0, func(p *corev1.Pod) { p.Status.ContainerStatuses = containers(ended(3, "")) }, "0/1 ExitCode:3 0"},
		{"signal", 1, 0, func(p *corev1.Pod) {
			p.Status.ContainerStatuses = containers(ended(137, ""))
			p.Status.ContainerStatuses[0].State.Terminated.Signal = 9
		}, "0/1 Signal:9 0"},
		{"one completed, one runs", 2, 0, func(p *corev1.Pod) { p.Status.ContainerStatuses = containers(ended(0, "Completed"), running) }, "1/2 NotReady 0"},
		{"one completed, ready", 2, 0, func(p *corev1.Pod) {
			p.Status.ContainerStatuses = containers(ended(0, "Completed"), running)
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		}, "1/2 Running 0"},

		{"initializing", 1, 2, func(p *corev1.Pod) {
			p.Status.InitContainerStatuses = containers(ended(0, "Completed"), waiting("PodInitializing"))
			p.Status.ContainerStatuses = containers(waiting("PodInitializing"))
		}, "0/1 Init:1/2 0"},
		{"first init container runs", 1, 2, func(p *corev1.Pod) {
			p.Status.InitContainerStatuses = containers(running, waiting("PodInitializing"))
		}, "0/1 Init:0/2 0"},
		{"init container fails", 1, 1, func(p *corev1.Pod) {
			p.Status.InitContainerStatuses = containers(ended(1, "Error"))
		}, "0/1 Init:Error 0"},
		{"init container exits", 1, 1, func(p *corev1.Pod) { p.Status.InitContainerStatuses = containers(ended(1, "")) }, "0/1 Init:ExitCode:1 0"},
		{"init container crashes", 1, 1, func(p *corev1.Pod) {
			p.Status.InitContainerStatuses = containers(waiting("CrashLoopBackOff"))
			p.Status.InitContainerStatuses[0].RestartCount = 4
		}, "0/1 Init:CrashLoopBackOff 4"},
		{"init restarts are forgotten", 1, 1, func(p *corev1.Pod) {
			p.Status.Phase = corev1.PodRunning
			p.Status.InitContainerStatuses = containers(ended(0, "Completed"))
			p.Status.InitContainerStatuses[0].RestartCount = 4
			p.Status.ContainerStatuses = containers(running)
		}, "1/1 Running 0"},
		{"sidecar", 1, 1, func(p *corev1.Pod) {
			p.Status.Phase = corev1.PodRunning
			p.Spec.InitContainers[0].RestartPolicy = always
			p.Status.InitContainerStatuses = containers(running)
			p.Status.InitContainerStatuses[0].Started = ptr.To(true)
			p.Status.InitContainerStatuses[0].RestartCount = 1
			p.Status.ContainerStatuses = containers(running)
		}, "2/2 Running 1"},
		{"sidecar not started", 1, 1, func(p *corev1.Pod) {
			p.Spec.InitContainers[0].RestartPolicy = always
			p.Status.InitContainerStatuses = containers(running)
		}, "0/2 Init:0/1 0"},

		{"terminating", 1, 0, func(p *corev1.Pod) {
			p.DeletionTimestamp = &metav1.Time{Time: now}
			p.Status.Phase = corev1.PodRunning
			p.Status.ContainerStatuses = containers(running)
		}, "1/1 Terminating 0"},
		{"finished and deleted", 1, 0, func(p *corev1.Pod) {
			p.DeletionTimestamp = &metav1.Time{Time: now}
			p.Status.Phase = corev1.PodSucceeded
			p.Status.ContainerStatuses = containers(ended(0, "Completed"))
		}, "0/1 Completed 0"},
		{"node lost", 1, 0, func(p *corev1.Pod) {
			p.DeletionTimestamp = &metav1.Time{Time: now}
			p.Status.Phase, p.Status.Reason = corev1.PodRunning, nodeLost
		}, "0/1 Unknown 0"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web", CreationTimestamp: ago(90 * time.Second)}}
			for i := range test.n {
				pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Name: fmt.Sprint("c", i)})
			}
			for i := range test.nInit {
				pod.Spec.InitContainers = append(pod.Spec.InitContainers, corev1.Container{Name: fmt.Sprint("c", i)})
			}
			test.edit(pod)
			row := podRow(pod, now)
			if got := fmt.Sprint(row[1], " ", row[2], " ", row[3]); got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
			if row[4] != "90s" {
				t.Errorf("age %v, want 90s", row[4])
			}
		})
	}
}

func TestPodRowWide(t *testing.T) {
	pod := &corev1.Pod{
		Spec: corev1.PodSpec{NodeName: "n1", ReadinessGates: []corev1.PodReadinessGate{{ConditionType: "a/a"}, {ConditionType: "a/b"}}},
		Status: corev1.PodStatus{
			PodIPs:            []corev1.PodIP{{IP: "10.0.0.1"}},
			NominatedNodeName: "n2",
			Conditions:        []corev1.PodCondition{{Type: "a/a", Status: corev1.ConditionTrue}},
		},
	}
	if got := fmt.Sprint(podRow(pod, time.Now())[5:]); got != "[10.0.0.1 n1 n2 1/2]" {
		t.Errorf("got %s", got)
	}
}
