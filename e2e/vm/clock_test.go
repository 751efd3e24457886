package vm

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestVMClock sets the machine's clock forward by two hours and back again:
// what runs goes on, what crashes is restarted after its back-off and not hours
// later, and new pods, exec and the node's state are as before.
func TestVMClock(t *testing.T) {
	e := newEnv(t)
	steady := e.pod("steady")
	steady.Spec.Containers[0].LivenessProbe = &corev1.Probe{PeriodSeconds: 1, TimeoutSeconds: 30, ProbeHandler: corev1.ProbeHandler{
		Exec: &corev1.ExecAction{Command: []string{"/hello", "echo", "alive"}}}}
	id := e.run(steady).Status.ContainerStatuses[0].ContainerID
	if _, err := e.api.CoreV1().Pods(e.ns).Create(t.Context(), e.pod("crash", "exit", "1"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	restarts := func() int32 {
		p := e.podIs("crash", "started", func(p *corev1.Pod) bool { return len(p.Status.ContainerStatuses) == 1 })
		return p.Status.ContainerStatuses[0].RestartCount
	}
	for _, jump := range []struct {
		name string
		by   time.Duration
	}{{"forward", 2 * time.Hour}, {"back", -2 * time.Hour}} {
		before := restarts()
		setClock(t, jump.by)
		e.podIs("crash", "restarted after the clock went "+jump.name, func(p *corev1.Pod) bool {
			return p.Status.ContainerStatuses[0].RestartCount > before
		})
		p := e.podIs("steady", "Ready", func(p *corev1.Pod) bool { return p.Status.ContainerStatuses[0].Ready })
		if c := p.Status.ContainerStatuses[0]; c.ContainerID != id || c.RestartCount != 0 {
			t.Errorf("clock %s: the container was replaced: %+v", jump.name, c)
		}
		e.run(e.pod("new-" + jump.name))
		if got := e.exec("steady", "/hello", "echo", "here"); got != "here\n" {
			t.Errorf("clock %s: exec: %q", jump.name, got)
		}
		node, err := e.api.CoreV1().Nodes().Get(t.Context(), "dev", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range node.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
				t.Errorf("clock %s: the node: %+v", jump.name, c)
			}
		}
	}
}

// setClock moves the machine's clock.
func setClock(t *testing.T, by time.Duration) {
	t.Helper()
	ts := unix.NsecToTimespec(time.Now().Add(by).UnixNano())
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		t.Fatal(err)
	}
}
