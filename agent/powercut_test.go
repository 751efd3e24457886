package agent_test

import (
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/agent/image"
)

// powerCut leaves of the machine what a boot would find: its disk. Processes,
// mounts, namespaces and cgroups are gone; the files of the data directory stay as
// they are.
func (m *machine) powerCut() {
	m.t.Helper()
	m.stop()
	m.runtime.Close()
	m.images.Close()
	m.eventually("end of all processes", func() bool {
		left := 0
		for _, comm := range []string{"podmon-keeper", ""} { // else it starts another podmon
			for name, pids := range m.processes() {
				for _, pid := range pids {
					if comm == "" || comm == name {
						left++
						_ = unix.Kill(pid, unix.SIGKILL)
					}
				}
			}
		}
		return left == 0
	})
	var points []string
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		m.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); strings.HasPrefix(f[4], m.dir+"/") {
			points = append(points, f[4])
		}
	}
	for _, p := range slices.Backward(points) {
		if err := unix.Unmount(p, unix.MNT_DETACH); err != nil {
			m.t.Fatal(p, err)
		}
	}
	for _, pattern := range []string{"/sys/fs/cgroup/*", "/sys/fs/cgroup"} {
		tops, _ := filepath.Glob(pattern + m.cgroup)
		for _, top := range tops {
			_ = exec.Command("find", top, "-depth", "-type", "d", "-exec", "rmdir", "{}", ";").Run()
		}
	}
}

// boot starts what a boot starts.
func (m *machine) boot() {
	m.t.Helper()
	var err error
	if m.images, err = image.Open(image.Config{Dir: filepath.Join(m.dir, "images"), Registries: m.plain.Load, Logger: slog.New(slog.DiscardHandler)}); err != nil {
		m.t.Fatal(err)
	}
	m.connect()
	m.start()
}

// TestRootPowerCut: after a power cut the pods are made again; addresses,
// mounts, devices and cgroups are as many as before, twice over.
func TestRootPowerCut(t *testing.T) {
	m := newMachine(t)
	web := newPod("web", app("a", "serve", "8080"))
	web.Spec.Volumes = []v1.Volume{
		{Name: "disk", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}},
		{Name: "memory", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{Medium: v1.StorageMediumMemory}}},
	}
	web.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "disk", MountPath: "/disk", SubPath: "sub"}, {Name: "memory", MountPath: "/memory"}}
	m.create(web)
	once := newPod("once", app("a", "serve", "8080"))
	once.Spec.RestartPolicy = v1.RestartPolicyNever
	m.create(once)
	m.ready("web")
	m.ready("once")
	if err := m.api.CoreV1().Pods("default").Delete(t.Context(), "once", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	count := func() map[string]int {
		all := m.census()
		out := map[string]int{}
		for _, what := range []string{"mounts", "network devices", "network namespaces", "addresses", "pod folders", "processes pause", "processes app", "podmon's sandboxes", "podmon's containers"} {
			out[what] = all[what]
		}
		return out
	}
	// The kernel takes the deleted pod's device away a moment after the rest.
	m.eventually("end of the deleted pod: loopback, bridge and one pod's device are left", func() bool {
		now := count()
		return now["pod folders"] == 1 && now["network devices"] == 3
	})
	before := count()
	for cut := range 2 {
		m.powerCut()
		if left := m.processes(); len(left) > 0 {
			t.Fatalf("the cut left %v", left)
		}
		m.boot()
		m.eventually("restart of the container", func() bool {
			s := m.get("web").Status.ContainerStatuses
			return len(s) == 1 && s[0].RestartCount == int32(cut+1) && s[0].Ready
		})
		if m.get("once") != nil {
			t.Error("the pod that was deleted is back")
		}
		p := m.get("web")
		if last := p.Status.ContainerStatuses[0].LastTerminationState.Terminated; last == nil || last.Reason != "ContainerStatusUnknown" {
			t.Errorf("last state %+v", last)
		}
		if got := m.fetch(p, "/hostname"); !strings.Contains(got, "web") {
			t.Errorf("it answers %q", got)
		}
		m.eventually(fmt.Sprintf("as much of everything as before, %v", before), func() bool { return maps.Equal(count(), before) })
	}
}
