package agent_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/users"
)

// inside makes the pod one with a user namespace.
func inside(p *v1.Pod) *v1.Pod {
	p.Spec.HostUsers = ptr.To(false)
	return p
}

// idsOf are the host's ids that podmon has on record for a pod.
func (m *machine) idsOf(pod string) api.IDRange {
	m.t.Helper()
	sandboxes, _, err := m.runtime.List(m.t.Context())
	if err != nil {
		m.t.Fatal(err)
	}
	for _, s := range sandboxes {
		if s.Sandbox.Name == pod && s.Sandbox.Users != nil {
			return *s.Sandbox.Users
		}
	}
	m.t.Fatalf("podmon has no ids of %s on record", pod)
	return api.IDRange{}
}

// run executes a verb of the app in a container, which must end well.
func (m *machine) run(pod, container string, args ...string) string {
	m.t.Helper()
	out, code := m.exec(pod, container, nil, append([]string{"/bin/app"}, args...)...)
	if code != 0 {
		m.t.Errorf("%s in %s/%s: exit code %d: %s", args, pod, container, code, out)
	}
	return strings.TrimSpace(out)
}

// TestRootUserNamespace: a pod with hostUsers: false is root in its own user
// namespace and nobody outside; volumes and root file system have the owners
// that they would have without.
func TestRootUserNamespace(t *testing.T) {
	m := newMachine(t)
	must(m.api.CoreV1().ConfigMaps("default").Create(t.Context(), &v1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "conf", Namespace: "default"}, Data: map[string]string{"page": "one"}}, metav1.CreateOptions{}))
	must(m.api.CoreV1().Secrets("default").Create(t.Context(), &v1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "key", Namespace: "default"}, Data: map[string][]byte{"token": []byte("hush")}}, metav1.CreateOptions{}))
	host := t.TempDir()
	if err := os.Chown(host, 1000, 1000); err != nil {
		t.Fatal(err)
	}
	volumes := []v1.VolumeMount{
		{Name: "disk", MountPath: "/disk"}, {Name: "disk", MountPath: "/sub", SubPath: "sub"}, {Name: "mem", MountPath: "/mem"},
		{Name: "all", MountPath: "/all"}, {Name: "conf", MountPath: "/conf"}, {Name: "key", MountPath: "/key"}, {Name: "host", MountPath: "/host"},
		{Name: "image", MountPath: "/image"},
	}
	first := app("first", "write", "/disk/first", "from the init container")
	side := app("side", "serve", "8081")
	side.RestartPolicy = ptr.To(v1.ContainerRestartPolicyAlways)
	web := app("web")
	web.ReadinessProbe = &v1.Probe{ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"/bin/app", "id"}}}, PeriodSeconds: 1, TimeoutSeconds: 30, FailureThreshold: 3}
	web.Lifecycle = &v1.Lifecycle{PostStart: &v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"/bin/app", "write", "/disk/hook", "x"}}}}
	strong := app("strong", "serve", "8082")
	strong.SecurityContext = &v1.SecurityContext{Privileged: ptr.To(true)}
	worker := app("worker", "serve", "8083")
	worker.SecurityContext = &v1.SecurityContext{RunAsUser: ptr.To(int64(1234)), RunAsGroup: ptr.To(int64(2345)), ProcMount: ptr.To(v1.UnmaskedProcMount)}
	p := inside(newPod("web", web, strong, worker))
	p.Spec.InitContainers = []v1.Container{first, side}
	for _, list := range [][]v1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for i := range list {
			list[i].VolumeMounts = volumes
		}
	}
	p.Spec.SecurityContext = &v1.PodSecurityContext{FSGroup: ptr.To(int64(3456)), Sysctls: []v1.Sysctl{{Name: "net.ipv4.ping_group_range", Value: "0 7"}}}
	p.Spec.Volumes = []v1.Volume{
		{Name: "disk", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}},
		{Name: "mem", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{Medium: v1.StorageMediumMemory}}},
		{Name: "conf", VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "conf"}}}},
		{Name: "key", VolumeSource: v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "key", DefaultMode: ptr.To(int32(0o400))}}},
		{Name: "all", VolumeSource: v1.VolumeSource{Projected: &v1.ProjectedVolumeSource{Sources: []v1.VolumeProjection{
			{DownwardAPI: &v1.DownwardAPIProjection{Items: []v1.DownwardAPIVolumeFile{{Path: "name", FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.name"}}}}}}}}},
		{Name: "image", VolumeSource: v1.VolumeSource{Image: &v1.ImageVolumeSource{Reference: appImage}}},
		{Name: "host", VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: host}}},
	}
	m.create(p)
	m.ready("web")

	ids := m.idsOf("web")
	if ids.First < users.Count || ids.Count != users.Count {
		t.Errorf("ids %+v", ids)
	}
	wantMap := fmt.Sprintf("0 %d %d", ids.First, ids.Count)
	for _, c := range []string{"web", "side", "strong", "worker"} {
		if got := strings.Join(strings.Fields(m.run("web", c, "cat", "/proc/self/uid_map")), " "); got != wantMap {
			t.Errorf("%s: uid_map %q, want %q", c, got, wantMap)
		}
	}
	for _, tt := range []struct{ args, want string }{
		{"id", "0 0 [3456]"},
		{"cat /disk/first", "from the init container"},
		{"cat /disk/hook", "x"},
		{"cat /conf/page", "one"},
		{"cat /key/token", "hush"},
		{"cat /all/name", "web"},
		{"cat /proc/sys/net/ipv4/ping_group_range", "0\t7"},
		{"owner /bin/app /etc /data", "0 0 755\n0 0 777\n0 0 777"},
		{"owner /etc/hosts", "0 0 644"},
		{"owner /dev/termination-log", "0 0 666"},
		{"owner /disk", "0 3456 2777"},
		{"owner /disk/first", "0 3456 644"},
		{"owner /mem", "0 3456 2777"},
		{"owner /host", "1000 1000 755"},
		{"owner /dev/shm", "0 0 1777"},
		{"owner /image /image/bin/app", "0 0 755\n0 0 755"},
		{"write /disk/w w", ""},
		{"write /mem/w w", ""},
		{"write /sub/w w", ""},
		{"write /host/w w", ""},
		{"write /data/w w", ""},
		{"write /dev/shm/w w", ""},
		{"chown /disk/w 42 43", ""},
		{"chown /data/w 42 43", ""},
		{"chown /bin/app 44 45", ""}, // from the image: copied up
		{"owner /disk/w /data/w /bin/app /dev/shm/w", "42 43 644\n42 43 644\n44 45 755\n0 0 644"},
	} {
		if got := m.run("web", "web", strings.Fields(tt.args)...); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.args, got, tt.want)
		}
	}
	if got := m.run("web", "worker", "id"); got != "1234 2345 [77 3456]" {
		t.Errorf("worker: %q", got)
	}
	// Outside: what is on disk belongs to whom the pod says, what is in memory to
	// the pod's own ids.
	for file, want := range map[string][2]uint32{
		filepath.Join(m.dir, "pods/uid-web/volumes/kubernetes.io~empty-dir/disk/w"): {42, 43},
		filepath.Join(m.dir, "pods/uid-web/volumes/kubernetes.io~empty-dir/mem/w"):  {0, 3456},
		filepath.Join(host, "w"): {0, 0},
	} {
		var st syscall.Stat_t
		if err := syscall.Stat(file, &st); err != nil || [2]uint32{st.Uid, st.Gid} != want {
			t.Errorf("%s: %d %d, %v; want %v", file, st.Uid, st.Gid, err, want)
		}
	}
	_, cs, err := m.runtime.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cs {
		if c.Pid == 0 {
			continue
		}
		want := ids.First + c.Container.UID
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.Pid))
		if line := fmt.Sprintf("\nUid:\t%d\t%[1]d\t%[1]d\t%[1]d\n", want); err != nil || !strings.Contains(string(status), line) {
			t.Errorf("%s runs as another than %d: %v %s", c.Container.Name, want, err, status)
		}
	}
	// Root is root over what is the pod's, and no more.
	if out, code := m.exec("web", "strong", nil, "/bin/app", "mknod", "/data/mem"); code == 0 {
		t.Errorf("a privileged container made a device: %s", out)
	}
	if out, code := m.exec("web", "strong", nil, "/bin/app", "write", "/proc/sys/kernel/panic", "7"); code == 0 {
		t.Errorf("a privileged container set a sysctl of the machine: %s", out)
	}
	m.run("web", "strong", "write", "/proc/sys/net/ipv4/ip_forward", "1")
	// procMount: Unmasked leaves /proc as the kernel shows it.
	for c, masked := range map[string]bool{"web": true, "worker": false} {
		table := m.run("web", c, "cat", "/proc/self/mountinfo")
		for _, at := range []string{" /proc/keys ", " /proc/sys ", " /proc/timer_list "} {
			if strings.Contains(table, at) != masked {
				t.Errorf("%s: %s is masked: %v, want %v\n%s", c, at, !masked, masked, table)
			}
		}
	}

	// Another pod has other ids, also when an agent that came later chooses them.
	m.stop()
	m.start()
	m.create(inside(newPod("two", app("web"))))
	m.ready("two")
	if got := m.idsOf("web"); got != ids {
		t.Errorf("after a restart of the agent the ids are %+v, were %+v", got, ids)
	}
	if two := m.idsOf("two"); two.First < ids.First+ids.Count && ids.First < two.First+two.Count {
		t.Errorf("two pods have the ids %+v and %+v", ids, two)
	}
	// A container that is restarted by this agent finds its volumes.
	kill := m.status("web", "web")
	if err := syscall.Kill(kill.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	m.eventually("the container's restart", func() bool {
		for _, s := range m.get("web").Status.ContainerStatuses {
			if s.Name == "web" {
				return s.RestartCount == 1 && s.Ready
			}
		}
		return false
	})
	if got := m.run("web", "web", "owner", "/disk/w"); got != "42 43 644" {
		t.Errorf("after the restart: %q", got)
	}

	// The pause's end makes another sandbox, with the same ids.
	was := m.get("two").Status.PodIP
	sandboxes, _, err := m.runtime.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	before := m.idsOf("two")
	for _, s := range sandboxes {
		if s.Sandbox.Name == "two" {
			if err := syscall.Kill(s.Pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
	}
	m.eventually("another sandbox", func() bool {
		s := m.get("two").Status
		return s.PodIP != was && s.ContainerStatuses[0].RestartCount == 1 && s.ContainerStatuses[0].Ready
	})
	if got := m.idsOf("two"); got != before {
		t.Errorf("the next sandbox has the ids %+v, the one before had %+v", got, before)
	}

	// What a pod had is given back when it has gone.
	m.delete("web", 5)
	m.eventually("deletion", func() bool { return m.get("web") == nil })
	m.create(inside(newPod("three", app("web"))))
	m.ready("three")
	if got := m.idsOf("three"); got != ids {
		t.Errorf("the third pod has %+v, free was %+v", got, ids)
	}
	node := must(m.api.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{}))
	if h := node.Status.RuntimeHandlers; len(h) != 2 || h[0].Name != "" || !*h[0].Features.UserNamespaces || !*h[1].Features.UserNamespaces {
		t.Errorf("the node says %+v", h)
	}
}

// status is what podmon knows of a pod's container.
func (m *machine) status(pod, container string) api.ContainerStatus {
	m.t.Helper()
	sandboxes, containers, err := m.runtime.List(m.t.Context())
	if err != nil {
		m.t.Fatal(err)
	}
	for _, s := range sandboxes {
		for _, c := range containers {
			if s.Sandbox.Name == pod && c.Container.SandboxID == s.Sandbox.ID && c.Container.Name == container && c.Pid != 0 {
				return c
			}
		}
	}
	m.t.Fatalf("no container %s of %s runs", container, pod)
	return api.ContainerStatus{}
}
