package agent_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/shutdown"
	"github.com/clusterd/clusterd/agent/shutdown/logindtest"
)

// TestRootShutdown: real containers end in their order, with their hooks, before a
// stand-in of logind lets the machine go down; and a shutdown that is cancelled leaves a
// node that takes pods.
func TestRootShutdown(t *testing.T) {
	needRoot(t)
	logind := logindtest.New(t)
	logind.SetDelay(time.Hour) // enough: no drop-in is written to this machine
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", logind.Address())
	const grace = 10 * time.Minute
	m := newMachineWith(t, &machine{shutdown: shutdown.Periods(2*grace, grace)})
	notes := t.TempDir()
	with := func(name string, priority int32, hook v1.LifecycleHandler) *v1.Pod {
		c := app("web")
		c.Lifecycle = &v1.Lifecycle{PreStop: &hook}
		c.VolumeMounts = []v1.VolumeMount{{Name: "notes", MountPath: "/data"}}
		p := newPod(name, c)
		p.Spec.Priority = &priority
		p.Spec.TerminationGracePeriodSeconds = ptr.To(int64(grace.Seconds()))
		p.Spec.Volumes = []v1.Volume{{Name: "notes", VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: notes}}}}
		return p
	}
	// The hook of the first pod holds the shutdown up until the test lets it go.
	fifo := filepath.Join(notes, "gate")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	write := func(name string) v1.LifecycleHandler {
		return v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"/bin/app", "write", "/data/" + name, "ended"}}}
	}
	m.create(with("held", 0, v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"/bin/app", "cat", "/data/gate"}}}))
	m.create(with("plain", 100, write("plain")))
	m.create(with("critical", 2_000_000_000, write("critical")))
	for _, name := range []string{"held", "plain", "critical"} {
		m.ready(name)
	}
	m.eventually("lock", func() bool { _, held := logind.Locks(); return held == 1 })

	logind.Prepare(true)
	readiness := func() (c v1.NodeCondition) {
		n, err := m.api.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
		if err != nil {
			return c
		}
		for _, c := range n.Status.Conditions {
			if c.Type == v1.NodeReady {
				return c
			}
		}
		return c
	}
	m.eventually("node that is shutting down", func() bool {
		c := readiness()
		return c.Status == v1.ConditionFalse && strings.Contains(c.Message, "node is shutting down")
	})
	m.eventually("end of the pod plain", func() bool {
		p := m.get("plain")
		return p.Status.Phase == v1.PodFailed && p.Status.Reason == "Terminated"
	})
	if _, err := os.Stat(filepath.Join(notes, "plain")); err != nil {
		t.Errorf("its hook: %v", err)
	}
	m.create(newPod("late", app("web")))
	m.eventually("refusal of a new pod", func() bool {
		p := m.get("late")
		return p.Status.Phase == v1.PodFailed && p.Status.Reason == "NodeShutdown"
	})
	m.eventually("held pod that Services lead to no more", func() bool {
		p := m.get("held")
		return p.Status.Phase == v1.PodRunning && slices.ContainsFunc(p.Status.Conditions, func(c v1.PodCondition) bool {
			return c.Type == v1.PodReady && c.Status == v1.ConditionFalse && c.Reason == "Terminated"
		})
	})
	if _, err := os.Stat(filepath.Join(notes, "critical")); err == nil || m.get("critical").Status.Phase != v1.PodRunning {
		t.Errorf("the critical pod ended before the others: %v, %s", err, m.get("critical").Status.Phase)
	}
	if _, held := logind.Locks(); held != 1 {
		t.Error("the machine goes down before its pods have ended")
	}
	m.eventually("event of the node", func() bool {
		list, err := m.api.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
		return err == nil && slices.ContainsFunc(list.Items, func(e v1.Event) bool {
			return e.InvolvedObject.Kind == "Node" && e.Reason == "NodeShutdown" && e.Message == "Shutdown manager detected shutdown event"
		})
	})

	if err := os.WriteFile(fifo, []byte("go"), 0o600); err != nil {
		t.Fatal(err)
	}
	m.eventually("release of the lock", func() bool { _, held := logind.Locks(); return held == 0 })
	for _, name := range []string{"held", "critical"} {
		if p := m.get(name); p.Status.Phase != v1.PodFailed || p.Status.Reason != "Terminated" {
			t.Errorf("%s: %s, %s", name, p.Status.Phase, p.Status.Reason)
		}
	}
	if _, err := os.Stat(filepath.Join(notes, "critical")); err != nil {
		t.Errorf("the critical pod's hook: %v", err)
	}
	if _, containers, err := m.runtime.List(t.Context()); err != nil || len(containers) > 0 {
		t.Errorf("%d containers are left, %v", len(containers), err)
	}

	logind.Prepare(false)
	m.eventually("node that is ready again", func() bool { return readiness().Status == v1.ConditionTrue })
	m.create(newPod("again", app("web")))
	m.ready("again")
	if taken, held := logind.Locks(); taken != 2 || held != 1 {
		t.Errorf("%d locks were taken, %d are held", taken, held)
	}
}
