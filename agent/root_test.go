package agent_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/features"
)

func TestRootPodServes(t *testing.T) {
	features.ShowsWithDoubles(t, 288)
	m := newMachine(t)
	if _, err := m.api.CoreV1().ConfigMaps("default").Create(t.Context(), &v1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "conf", Namespace: "default"}, Data: map[string]string{"page": "one", "colour": "red"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := m.api.CoreV1().Secrets("default").Create(t.Context(), &v1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "key", Namespace: "default"}, Data: map[string][]byte{"token": []byte("hush")}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	host := t.TempDir()
	c := app("web")
	c.Env = []v1.EnvVar{
		{Name: "POD_IP", ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: "status.podIP"}}},
		{Name: "COLOUR", ValueFrom: &v1.EnvVarSource{ConfigMapKeyRef: &v1.ConfigMapKeySelector{LocalObjectReference: v1.LocalObjectReference{Name: "conf"}, Key: "colour"}}},
		{Name: "GREETING", Value: "hello $(COLOUR)"},
		{Name: "LIMIT", ValueFrom: &v1.EnvVarSource{ResourceFieldRef: &v1.ResourceFieldSelector{Resource: "limits.memory", Divisor: resource.MustParse("1Mi")}}},
	}
	c.Resources.Limits = v1.ResourceList{v1.ResourceMemory: resource.MustParse("64Mi"), v1.ResourceCPU: resource.MustParse("500m")}
	c.Resources.Requests = c.Resources.Limits
	c.ReadinessProbe = &v1.Probe{ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/", Port: intstr.FromInt32(8080)}}, PeriodSeconds: 10, TimeoutSeconds: 1, FailureThreshold: 3}
	c.VolumeMounts = []v1.VolumeMount{
		{Name: "conf", MountPath: "/conf"}, {Name: "secret", MountPath: "/secret"}, {Name: "down", MountPath: "/down"},
		{Name: "shared", MountPath: "/shared"}, {Name: "mem", MountPath: "/mem"}, {Name: "host", MountPath: "/host", SubPath: "sub"},
	}
	side := app("side", "write", "/shared/note", "from side")
	side.VolumeMounts = []v1.VolumeMount{{Name: "shared", MountPath: "/shared"}}
	side.Resources = c.Resources
	p := newPod("web", c)
	p.Spec.InitContainers = []v1.Container{side}
	p.Spec.Volumes = []v1.Volume{
		{Name: "conf", VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "conf"}}}},
		{Name: "secret", VolumeSource: v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "key"}}},
		{Name: "down", VolumeSource: v1.VolumeSource{DownwardAPI: &v1.DownwardAPIVolumeSource{Items: []v1.DownwardAPIVolumeFile{{Path: "labels", FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.labels"}}}}}},
		{Name: "shared", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}},
		{Name: "mem", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{Medium: v1.StorageMediumMemory, SizeLimit: ptr.To(resource.MustParse("1Mi"))}}},
		{Name: "host", VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: host}}},
	}
	m.create(p)
	p = m.ready("web")
	if p.Status.QOSClass != v1.PodQOSGuaranteed || !strings.HasPrefix(p.Status.PodIP, "10.99.0.") {
		t.Errorf("status %+v", p.Status)
	}
	env := m.fetch(p, "/env")
	for _, want := range []string{"POD_IP=" + p.Status.PodIP, "GREETING=hello red", "LIMIT=64", "FROM_IMAGE=yes", "HOSTNAME=web"} {
		if !strings.Contains(env, want) {
			t.Errorf("no %s in %s", want, env)
		}
	}
	for file, want := range map[string]string{
		"/conf/page": "one", "/secret/token": "hush", "/down/labels": `app="web"`, "/shared/note": "from side", "/etc/hostname": "",
	} {
		if got := m.fetch(p, "/file?name="+file); want != "" && got != want {
			t.Errorf("%s: %q, want %q", file, got, want)
		}
	}
	if got := m.fetch(p, "/file?name=/etc/resolv.conf"); !strings.Contains(got, "nameserver 10.96.0.10\n") ||
		!strings.HasPrefix(got, "search default.svc.cluster.local svc.cluster.local cluster.local") || !strings.Contains(got, "options ndots:5\n") {
		t.Errorf("/etc/resolv.conf: %s", got)
	}
	if got := m.fetch(p, "/file?name=/etc/hosts"); !strings.Contains(got, p.Status.PodIP+"\tweb") {
		t.Errorf("/etc/hosts: %s", got)
	}
	if b, err := os.ReadFile("/sys/fs/cgroup/memory" + m.cgroup + "/pod" + string(p.UID) + "/memory.limit_in_bytes"); err == nil && strings.TrimSpace(string(b)) != "67108864" {
		t.Errorf("pod cgroup's memory limit: %s", b)
	}
	// A change of the ConfigMap reaches the running pod.
	cm := must(m.api.CoreV1().ConfigMaps("default").Get(t.Context(), "conf", metav1.GetOptions{}))
	cm.Data["page"] = "two"
	must(m.api.CoreV1().ConfigMaps("default").Update(t.Context(), cm, metav1.UpdateOptions{}))
	m.eventually("new content", func() bool { return m.fetch(p, "/file?name=/conf/page") == "two" })

	if code, body := m.call("/containerLogs/default/web/web"); code != 200 || body != "serving on 8080\n" {
		t.Errorf("logs: %d %q", code, body)
	}
	if code, body := m.call("/containerLogs/default/web/nope"); code != 404 || !strings.Contains(body, "nope") {
		t.Errorf("logs of an unknown container: %d %q", code, body)
	}
	if code, body := m.call("/images"); code != 200 || !strings.Contains(body, appImage) {
		t.Errorf("images: %d %s", code, body)
	}
	out, code := m.exec("web", "web", nil, "/bin/app", "cat", "/shared/note")
	if out != "from side" || code != 0 {
		t.Errorf("exec: %q %d", out, code)
	}
	if out, code = m.exec("web", "web", strings.NewReader("in and out"), "/bin/app", "copy"); out != "in and out" || code != 0 {
		t.Errorf("exec with stdin: %q %d", out, code)
	}
	if _, code = m.exec("web", "web", nil, "/bin/app", "exit", "5"); code != 5 {
		t.Errorf("exec: exit code %d", code)
	}

	// Deletion is graceful and complete.
	m.delete("web", 10)
	m.eventually("deletion", func() bool { return m.get("web") == nil })
}

// TestRootRestartKeepsContainers: the agent goes and comes; nobody notices.
func TestRootRestartKeepsContainers(t *testing.T) {
	m := newMachine(t)
	for _, n := range []string{"a", "b", "c"} {
		m.create(newPod(n, app("web")))
	}
	ids := map[string]string{}
	for _, n := range []string{"a", "b", "c"} {
		ids[n] = m.ready(n).Status.ContainerStatuses[0].ContainerID
	}
	pids := m.pids()
	m.stop()
	if err := m.api.CoreV1().Pods("default").Delete(t.Context(), "c", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	m.start()
	m.eventually("end of the orphan", func() bool { return len(m.pids()) == 2 })
	for _, n := range []string{"a", "b"} {
		p := m.ready(n)
		if got := p.Status.ContainerStatuses[0].ContainerID; got != ids[n] || p.Status.ContainerStatuses[0].RestartCount != 0 {
			t.Errorf("%s was restarted", n)
		}
		if got := strings.TrimSpace(m.fetch(p, "/")); got != n {
			t.Errorf("%s answers %q", n, got)
		}
	}
	for _, pid := range m.pids() {
		if !slices.Contains(pids, pid) {
			t.Errorf("process %d is new", pid)
		}
	}
	m.create(newPod("d", app("web"))) // and it works on
	d := m.ready("d")
	if got := strings.TrimSpace(m.fetch(d, "/")); got != "d" {
		t.Errorf("d answers %q", got)
	}
}

func TestRootEnds(t *testing.T) {
	m := newMachine(t)
	hog := app("hog", "hog")
	hog.Resources.Limits = v1.ResourceList{v1.ResourceMemory: resource.MustParse("32Mi")}
	p := newPod("oom", hog)
	p.Spec.RestartPolicy = v1.RestartPolicyNever
	m.create(p)
	p = newPod("message", app("m", "message", "last words"))
	p.Spec.RestartPolicy = v1.RestartPolicyNever
	m.create(p)
	logs := app("l", "exit", "4", "words in the log")
	logs.TerminationMessagePolicy = v1.TerminationMessageFallbackToLogsOnError
	p = newPod("logs", logs)
	p.Spec.RestartPolicy = v1.RestartPolicyNever
	m.create(p)
	bad := app("b")
	bad.Command = []string{"/nope"}
	p = newPod("bad", bad)
	p.Spec.RestartPolicy = v1.RestartPolicyNever
	m.create(p)
	user := app("u", "id")
	user.SecurityContext = &v1.SecurityContext{RunAsUser: ptr.To(int64(1234))}
	p = newPod("user", user)
	p.Spec.RestartPolicy = v1.RestartPolicyNever
	p.Spec.SecurityContext = &v1.PodSecurityContext{FSGroup: ptr.To(int64(99))}
	m.create(p)

	ended := func(name string) v1.ContainerStateTerminated {
		var s *v1.ContainerStateTerminated
		m.eventually("end of "+name, func() bool {
			p := m.get(name)
			if len(p.Status.ContainerStatuses) == 0 || p.Status.Phase != v1.PodFailed && p.Status.Phase != v1.PodSucceeded {
				return false
			}
			s = p.Status.ContainerStatuses[0].State.Terminated
			return s != nil
		})
		return *s
	}
	if s := ended("oom"); s.Reason != "OOMKilled" || s.ExitCode != 137 {
		t.Errorf("oom: %+v", s)
	}
	if s := ended("message"); s.Message != "last words" || s.ExitCode != 3 || s.Reason != "Error" {
		t.Errorf("message: %+v", s)
	}
	if s := ended("logs"); s.Message != "words in the log\n" || s.ExitCode != 4 {
		t.Errorf("logs: %+v", s)
	}
	if s := ended("bad"); s.Reason != "ContainerCannotRun" || !strings.Contains(s.Message, "/nope") {
		t.Errorf("bad: %+v", s)
	}
	if s := ended("user"); s.ExitCode != 0 {
		t.Errorf("user: %+v", s)
	}
	if _, body := m.call("/containerLogs/default/user/u"); body != "1234 2345 [77 99]\n" {
		t.Errorf("id: %q", body)
	}
}

// TestRootPauseKilled is FEATURES row 201.
func TestRootPauseKilled(t *testing.T) {
	m := newMachine(t)
	m.create(newPod("web", app("web")))
	was := m.ready("web").Status.PodIP
	s, _, err := m.runtime.List(t.Context())
	if err != nil || len(s) != 1 {
		t.Fatal(err, s)
	}
	if err := syscall.Kill(s[0].Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	m.eventually("another sandbox", func() bool {
		p := m.get("web")
		return p.Status.PodIP != was && p.Status.ContainerStatuses[0].RestartCount == 1 && p.Status.ContainerStatuses[0].Ready
	})
	if got := strings.TrimSpace(m.fetch(m.get("web"), "/")); got != "web" {
		t.Errorf("answer %q", got)
	}
}

// TestRootHungVolume: a host path whose server does not answer holds up its
// own pod only, and the status says what is waited for.
func TestRootHungVolume(t *testing.T) {
	m := newMachine(t)
	dead := filepath.Join(m.dir, "dead")
	if err := os.Mkdir(dead, 0o755); err != nil {
		t.Fatal(err)
	}
	dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skip("needs /dev/fuse:", err)
	}
	server := os.NewFile(uintptr(dev), "fuse")
	if err := unix.Mount("dead", dead, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", dev)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // if the test ends early
		server.Close()
		_ = unix.Unmount(dead, unix.MNT_DETACH)
	})
	stuck := newPod("stuck", app("a", "serve", "8080"))
	stuck.Spec.Volumes = []v1.Volume{{Name: "data", VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: dead + "/data", Type: ptr.To(v1.HostPathDirectory)}}}}
	m.create(stuck)
	untyped := newPod("untyped", app("a", "serve", "8080"))
	untyped.Spec.Volumes = []v1.Volume{{Name: "data", VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: dead + "/data"}}}}
	untyped.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "data", MountPath: "/vol"}}
	m.create(untyped)
	m.create(newPod("free", app("a", "serve", "8080")))
	m.ready("free")
	waits := func(name, words string) func() bool {
		return func() bool {
			s := m.get(name).Status.ContainerStatuses
			return len(s) == 1 && s[0].State.Waiting != nil && strings.Contains(s[0].State.Waiting.Message, words)
		}
	}
	m.eventually("status of what is waited for", waits("stuck", "Setting up volumes since "))
	m.eventually("the same without a type", waits("untyped", "Setting up volumes since "))
	if err := server.Close(); err != nil { // the server is gone for good: the kernel answers in its place
		t.Fatal(err)
	}
	m.eventually("reason of the failure", waits("stuck", `MountVolume.SetUp failed for volume "data" : hostPath type check failed`))
	if err := unix.Unmount(dead, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dead+"/data", 0o755); err != nil {
		t.Fatal(err)
	}
	m.ready("stuck")
	m.ready("untyped")
}
