package vm

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/features"
)

func amounts(cpu, memory string) corev1.ResourceList {
	out := corev1.ResourceList{}
	if cpu != "" {
		out[corev1.ResourceCPU] = resource.MustParse(cpu)
	}
	if memory != "" {
		out[corev1.ResourceMemory] = resource.MustParse(memory)
	}
	return out
}

// TestVMAlone: the machine is what it is for.
func TestVMAlone(t *testing.T) {
	newEnv(t)
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil || strings.Count(string(b), "\n") != 1 || !strings.HasPrefix(string(b), "0::") {
		t.Fatalf("/proc/self/cgroup: %q %v", b, err)
	}
}

// TestVMLimits: the three classes and the kernel's limits of each.
func TestVMLimits(t *testing.T) {
	features.Shows(t, 237, 238, 239)
	e := newEnv(t)
	guaranteed := e.pod("guaranteed")
	guaranteed.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: amounts("500m", "64Mi"), Limits: amounts("500m", "64Mi")}
	burstable := e.pod("burstable")
	burstable.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: amounts("250m", "32Mi")}
	g, b, f := e.run(guaranteed), e.run(burstable), e.run(e.pod("besteffort"))

	for _, dir := range []string{podGroup("", g), containerGroup("", g)} {
		e.holds(dir, "cpu.max", "50000 100000")
		e.holds(dir, "cpu.weight", "59") // of 512 shares, as runc's conversion has it
		e.holds(dir, "memory.max", "67108864")
	}
	e.holds(podGroup("", g), "pids.max", "300")
	e.holds(containerGroup("", g), "memory.swap.max", "0")
	e.holds(containerGroup("", g), "memory.oom.group", "1")
	e.holds(podGroup("burstable", b), "cpu.max", "max 100000")
	e.holds(podGroup("burstable", b), "memory.max", "max")
	e.holds(containerGroup("burstable", b), "memory.max", "max")
	e.holds(podGroup("besteffort", f), "cpu.weight", "1")
	e.holds(filepath.Join(mount, group, "besteffort"), "cpu.weight", "1")
	for class, p := range map[corev1.PodQOSClass]*corev1.Pod{corev1.PodQOSGuaranteed: g, corev1.PodQOSBurstable: b, corev1.PodQOSBestEffort: f} {
		if p.Status.QOSClass != class {
			t.Errorf("pod %s is %s", p.Name, p.Status.QOSClass)
		}
	}
	// The container sees its own cgroup as the root of all.
	if got := e.exec("guaranteed", "/hello", "cat", "/sys/fs/cgroup/memory.max"); strings.TrimSpace(got) != "67108864" {
		t.Errorf("the container sees memory.max %q", got)
	}
}

// TestVMPinned: a whole processor of one's own, and the other for the others.
func TestVMPinned(t *testing.T) {
	features.Shows(t, 240)
	e := newEnv(t)
	shared := e.run(e.pod("shared"))
	own := e.pod("own")
	own.Spec.Containers[0].Resources.Limits = amounts("1", "64Mi")
	o := e.run(own)
	e.holds(containerGroup("", o), "cpuset.cpus", "1")
	e.holds(containerGroup("besteffort", shared), "cpuset.cpus", "0")
	if got := e.exec("own", "/hello", "cat", "/proc/1/status"); !strings.Contains(got, "Cpus_allowed_list:\t1\n") {
		t.Errorf("the container may run elsewhere: %s", got)
	}
	if _, err := ctl("-n", e.ns, "delete", "pod", "own"); err != nil {
		t.Fatal(err)
	}
	e.eventually("the processor to be shared again", func() error {
		b, err := os.ReadFile(filepath.Join(containerGroup("besteffort", shared), "cpuset.cpus"))
		if err == nil && strings.TrimSpace(string(b)) != "0-1" {
			err = errors.New(string(b))
		}
		return err
	})
}

// TestVMHugepages: the kernel limits how many huge pages a container may use,
// and one that asks for none gets none.
func TestVMHugepages(t *testing.T) {
	e := newEnv(t)
	node, err := e.api.CoreV1().Nodes().Get(t.Context(), "dev", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if q := node.Status.Allocatable["hugepages-2Mi"]; q.String() != "32Mi" {
		t.Errorf("allocatable: %s", q.String())
	}
	some := e.pod("some")
	some.Spec.Containers[0].Resources.Limits = amounts("100m", "64Mi")
	some.Spec.Containers[0].Resources.Limits["hugepages-2Mi"] = resource.MustParse("4Mi")
	some.Spec.Volumes = []corev1.Volume{{Name: "huge", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumHugePages}}}}
	some.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "huge", MountPath: "/huge"}}
	s, n := e.run(some), e.run(e.pod("none"))
	e.holds(containerGroup("", s), "hugetlb.2MB.max", "4194304")
	e.holds(podGroup("", s), "hugetlb.2MB.max", "4194304")
	e.holds(containerGroup("besteffort", n), "hugetlb.2MB.max", "0")
	if got := e.exec("some", "/hello", "cat", "/proc/mounts"); !strings.Contains(got, " /huge hugetlbfs ") || !strings.Contains(got, "pagesize=2M") {
		t.Errorf("the volume is not there: %s", got)
	}
}

// TestVMOOM: one process over the limit ends the container as a whole.
func TestVMOOM(t *testing.T) {
	features.Shows(t, 233, 234, 243)
	e := newEnv(t)
	alone := e.pod("alone", "alloc", "96")
	alone.Spec.RestartPolicy = corev1.RestartPolicyNever
	alone.Spec.Containers[0].Resources.Limits = amounts("", "48Mi")
	if _, err := e.api.CoreV1().Pods(e.ns).Create(t.Context(), alone, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p := e.podIs("alone", "Failed", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodFailed })
	if s := p.Status.ContainerStatuses[0].State.Terminated; s == nil || s.Reason != "OOMKilled" || s.ExitCode != 137 {
		t.Errorf("alone: %+v", p.Status.ContainerStatuses)
	}

	// The greedy one is a second process; the first did nothing wrong.
	group := e.pod("group", "sleep")
	group.Spec.Containers[0].Resources.Limits = amounts("", "48Mi")
	e.run(group)
	if out, err := ctl("-n", e.ns, "exec", "group", "--", "/hello", "alloc", "96"); err == nil {
		t.Errorf("the greedy process ended well: %s", out)
	}
	e.podIs("group", "killed as a whole and started again", func(p *corev1.Pod) bool {
		c := p.Status.ContainerStatuses[0]
		last := c.LastTerminationState.Terminated
		return c.RestartCount == 1 && last != nil && last.Reason == "OOMKilled" && c.State.Running != nil
	})
}

// TestVMUse: exec, logs, a probe's work in the container, and what deletion
// leaves behind: nothing.
func TestVMUse(t *testing.T) {
	e := newEnv(t)
	p := e.pod("used")
	p.Spec.Containers[0].LivenessProbe = &corev1.Probe{PeriodSeconds: 1, TimeoutSeconds: 30, ProbeHandler: corev1.ProbeHandler{
		Exec: &corev1.ExecAction{Command: []string{"/hello", "echo", "alive"}}}}
	e.run(p)
	if got := e.exec("used", "/hello", "echo", "well", "done"); got != "well done\n" {
		t.Errorf("exec: %q", got)
	}
	e.eventually("a log line", func() error {
		out, err := ctl("-n", e.ns, "logs", "used")
		if err == nil && !strings.Contains(out, "serving on :8080") {
			err = errors.New(out)
		}
		return err
	})
	if p = e.podIs("used", "alive", func(*corev1.Pod) bool { return true }); p.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("restarted: %+v", p.Status.ContainerStatuses)
	}
	dir := podGroup("besteffort", p)
	if _, err := os.Stat(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := ctl("-n", e.ns, "delete", "pod", "used"); err != nil {
		t.Fatal(err)
	}
	if left := groupsBelow(""); slices.ContainsFunc(left, func(g string) bool { return strings.HasPrefix(g, dir) }) {
		t.Errorf("cgroups are left: %q", left)
	}
	if _, err := os.Stat(filepath.Join(data, "pods", string(p.UID))); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the pod's folder: %v", err)
	}
}
