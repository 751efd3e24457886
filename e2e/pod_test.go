package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/features"
)

// TestE2EPod looks at one pod from the inside and the outside.
func TestE2EPod(t *testing.T) {
	e := start(t)
	ns := e.namespace("pods")
	ctx := t.Context()
	if _, err := e.api.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "cm"}, Data: map[string]string{"key": "from the map"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := e.api.CoreV1().Secrets(ns).Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"password": "hush"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p := pod("full")
	p.Annotations = map[string]string{"note": "read me"}
	p.Spec.Volumes = []corev1.Volume{
		{Name: "cm", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "cm"}}}},
		{Name: "s", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "s"}}},
		{Name: "shared", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
	}
	field := func(path string) *corev1.EnvVarSource {
		return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}
	}
	main := &p.Spec.Containers[0]
	main.Env = []corev1.EnvVar{
		{Name: "MESSAGE", Value: "$(WHO) was here"},
		{Name: "WHO", Value: "nobody"},
		{Name: "AGAIN", Value: "$(WHO) was here"},
		{Name: "POD_NAME", ValueFrom: field("metadata.name")},
		{Name: "NODE_NAME", ValueFrom: field("spec.nodeName")},
		{Name: "POD_IP", ValueFrom: field("status.podIP")},
		{Name: "NOTE", ValueFrom: field("metadata.annotations['note']")},
		{Name: "FROM_MAP", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "cm"}, Key: "key"}}},
	}
	main.VolumeMounts = []corev1.VolumeMount{{Name: "cm", MountPath: "/etc/cm"}, {Name: "s", MountPath: "/etc/s"}, {Name: "shared", MountPath: "/shared"}}
	main.ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/healthz", Port: intstr.FromInt32(8080)}}, PeriodSeconds: 1}
	main.Resources = corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("64Mi"), corev1.ResourceCPU: resource.MustParse("500m")}}
	p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "side", Image: image, Args: []string{"sleep"}, VolumeMounts: []corev1.VolumeMount{{Name: "shared", MountPath: "/shared"}}})
	e.create(ns, p)
	got := e.podReady(ns, "full")
	in := func(container string, args ...string) string {
		t.Helper()
		return e.ctl(append([]string{"-n", ns, "exec", "full", "-c", container, "--", "/hello"}, args...)...)
	}

	t.Run("environment", func(t *testing.T) {
		features.Shows(t, 269)
		env := in("main", "env")
		mustContain(t, "env", env, "AGAIN=nobody was here\n", "POD_NAME=full\n", "NODE_NAME="+got.Spec.NodeName+"\n", "POD_IP="+got.Status.PodIP+"\n", "NOTE=read me\n", "FROM_MAP=from the map\n")
		mustContain(t, "mounts", in("main", "cat", "/proc/mounts"), " /etc/cm ", " /etc/s ", " /shared ", " /dev ", " /proc ")
	})
	t.Run("files", func(t *testing.T) {
		if got := in("main", "cat", "/etc/cm/key"); got != "from the map" {
			t.Errorf("ConfigMap: %q", got)
		}
		if got := in("main", "cat", "/etc/s/password"); got != "hush" {
			t.Errorf("Secret: %q", got)
		}
		mustContain(t, "hosts", in("main", "cat", "/etc/hosts"), got.Status.PodIP+"\tfull")
		if got := strings.TrimSpace(in("side", "cat", "/proc/sys/kernel/hostname")); got != "full" {
			t.Errorf("hostname %q", got)
		}
	})
	t.Run("containers share the network", func(t *testing.T) {
		features.Shows(t, 263, 265)
		mustContain(t, "localhost", in("side", "fetch", "http://127.0.0.1:8080/healthz"), "ok")
		if a, b := in("main", "cat", "/proc/sys/kernel/hostname"), in("side", "cat", "/proc/sys/kernel/hostname"); a != b {
			t.Errorf("hostnames %q and %q", a, b)
		}
	})
	t.Run("conditions", func(t *testing.T) {
		features.Shows(t, 207, 213, 215)
		for _, kind := range []corev1.PodConditionType{corev1.PodScheduled, corev1.PodInitialized, corev1.ContainersReady, corev1.PodReady} {
			if c := podCondition(got, kind); c == nil || c.Status != corev1.ConditionTrue || c.LastTransitionTime.IsZero() {
				t.Errorf("%s: %+v", kind, c)
			}
		}
		if got.Status.Phase != corev1.PodRunning || got.Status.PodIP == "" || got.Status.HostIP == "" || got.Status.StartTime == nil {
			t.Errorf("status %s", brief(got))
		}
	})
	t.Run("QoS", func(t *testing.T) {
		features.Shows(t, 239)
		features.Conforms(t, 308)
		both := pod("guaranteed", "sleep")
		both.Spec.Containers[0].Resources.Limits = main.Resources.Limits
		e.create(ns, both)
		e.create(ns, pod("besteffort", "sleep"))
		for name, want := range map[string]corev1.PodQOSClass{"full": corev1.PodQOSBurstable, "guaranteed": corev1.PodQOSGuaranteed, "besteffort": corev1.PodQOSBestEffort} {
			if got := e.get(ns, name).Status.QOSClass; got != want {
				t.Errorf("%s is %s, want %s", name, got, want)
			}
		}
	})
	t.Run("events", func(t *testing.T) {
		e.eventually("the events tell the story", func(context.Context) error {
			text := e.ctl("-n", ns, "describe", "pod", "full")
			for _, w := range []string{"Scheduled", "Pulled", "Created", "Started", "Successfully assigned " + ns + "/full to " + got.Spec.NodeName} {
				if !strings.Contains(text, w) {
					return fmt.Errorf("%q is not in:\n%s", w, text)
				}
			}
			return nil
		})
	})
	t.Run("logs", func(t *testing.T) {
		features.Shows(t, 298)
		features.Conforms(t, 289)
		e.eventuallyHas([]string{"-n", ns, "logs", "full", "-c", "main"}, "hello from full, serving on :8080")
		if got := e.ctl("-n", ns, "logs", "full", "-c", "main", "--tail=1", "--timestamps"); !strings.Contains(got, time.Now().UTC().Format("2006-")) {
			t.Errorf("timestamps: %q", got)
		}
		e.follow(ns)
	})
	t.Run("exec's exit code", func(t *testing.T) {
		for _, prog := range kubectls() {
			if _, _, code := e.run(prog, "", "-n", ns, "exec", "full", "-c", "side", "--", "/hello", "exit", "7"); code != 7 {
				t.Errorf("%s: exit %d, want 7", prog, code)
			}
			if out, errs, code := e.run(prog, "", "-n", ns, "exec", "full", "-c", "side", "--", "/nosuch"); code == 0 || !strings.Contains(errs, "nosuch") {
				t.Errorf("%s: exit %d: %s%s", prog, code, out, errs)
			}
		}
	})
	t.Run("previous log", func(t *testing.T) {
		e.create(ns, pod("crash", "echo", "last words"))
		e.podIs(ns, "crash", "started again", func(p *corev1.Pod) error {
			if len(p.Status.ContainerStatuses) == 0 || p.Status.ContainerStatuses[0].RestartCount == 0 {
				return errors.New("not yet")
			}
			return nil
		})
		e.eventuallyHas([]string{"-n", ns, "logs", "-p", "crash"}, "last words")
	})
	t.Run("init containers run one after the other", func(t *testing.T) {
		features.Shows(t, 214, 273)
		features.Conforms(t, 285)
		ip := pod("init", "sleep")
		ip.Spec.InitContainers = []corev1.Container{
			{Name: "first", Image: image, Args: []string{"exit", "0", "0.2"}},
			{Name: "second", Image: image, Args: []string{"exit", "0"}},
		}
		e.create(ns, ip)
		s := e.podReady(ns, "init").Status
		first, second := s.InitContainerStatuses[0].State.Terminated, s.InitContainerStatuses[1].State.Terminated
		if first == nil || second == nil || second.StartedAt.Before(&first.FinishedAt) || s.ContainerStatuses[0].State.Running.StartedAt.Before(&second.FinishedAt) {
			t.Errorf("order: %+v, %+v", first, second)
		}
	})
	t.Run("a failing readiness probe", func(t *testing.T) {
		rp := pod("unready", "serve")
		rp.Spec.Containers[0].ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(9)}}, PeriodSeconds: 1}
		e.create(ns, rp)
		e.eventually("the event names the probe", func(context.Context) error {
			if text := e.ctl("-n", ns, "describe", "pod", "unready"); !strings.Contains(text, "Readiness probe failed") {
				return errors.New(text)
			}
			return nil
		})
		if p := e.get(ns, "unready"); podReady(p) || p.Status.Phase != corev1.PodRunning {
			t.Errorf("status %s", brief(p))
		}
	})
	t.Run("a failing liveness probe", func(t *testing.T) {
		lp := pod("unwell", "serve")
		lp.Spec.Containers[0].LivenessProbe = &corev1.Probe{
			ProbeHandler:  corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"/hello", "exit", "1"}}},
			PeriodSeconds: 1, FailureThreshold: 1, TerminationGracePeriodSeconds: ptr.To[int64](1),
		}
		e.create(ns, lp)
		e.podIs(ns, "unwell", "started again", func(p *corev1.Pod) error {
			if len(p.Status.ContainerStatuses) == 0 || p.Status.ContainerStatuses[0].RestartCount == 0 {
				return errors.New("not yet")
			}
			return nil
		})
	})
	t.Run("deletion with grace", func(t *testing.T) {
		features.Shows(t, 303)
		stubborn := pod("graceful")
		const hook, graceful = 10 * time.Second, 600
		stubborn.Spec.TerminationGracePeriodSeconds = ptr.To[int64](graceful)
		stubborn.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"/hello", "sleep", strconv.Itoa(int(hook.Seconds()))}}}}
		e.create(ns, stubborn)
		e.podReady(ns, "graceful")
		logs := e.startCtl("-n", ns, "logs", "-f", "graceful")
		deleted := time.Now()
		if err := e.api.CoreV1().Pods(ns).Delete(ctx, "graceful", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		if p := e.get(ns, "graceful"); p.DeletionTimestamp == nil || *p.DeletionGracePeriodSeconds != graceful {
			t.Errorf("not on its way out: %v", p.DeletionTimestamp)
		}
		mustContain(t, "get", e.ctl("-n", ns, "get", "pod", "graceful"), "Terminating")
		// A program that heeds SIGTERM is gone long before the grace is over.
		e.eventually("the pod is gone", func(ctx context.Context) error {
			_, err := e.api.CoreV1().Pods(ns).Get(ctx, "graceful", metav1.GetOptions{})
			if err == nil {
				return errors.New("still there")
			}
			return nil
		})
		if took := time.Since(deleted); took < hook {
			t.Errorf("gone %s after its deletion: the preStop hook, of %s, was not waited for", took, hook)
		}
		mustContain(t, "last words", logs(), "stopping")
		// One that does not is killed when the grace is over.
		const grace = 3
		deaf := pod("deaf", "cat", "/dev/stdin") // it reads, whatever signal comes
		deaf.Spec.Containers[0].Stdin = true
		deaf.Finalizers = []string{"clusterd.test/seen"}
		deaf.Spec.TerminationGracePeriodSeconds = ptr.To[int64](grace)
		e.create(ns, deaf)
		e.podReady(ns, "deaf")
		deleted = time.Now()
		if err := e.api.CoreV1().Pods(ns).Delete(ctx, "deaf", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		p := e.podIs(ns, "deaf", "killed", func(p *corev1.Pod) error {
			if s := p.Status.ContainerStatuses; len(s) != 1 || s[0].State.Terminated == nil {
				return errors.New("still running")
			}
			return nil
		})
		if end := p.Status.ContainerStatuses[0].State.Terminated; end.ExitCode != 137 || time.Since(deleted) < grace*time.Second {
			t.Errorf("after %s: %+v", time.Since(deleted), end)
		}
		if _, err := e.api.CoreV1().Pods(ns).Patch(ctx, "deaf", types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		e.eventually("the pod is removed", func(ctx context.Context) error {
			_, err := e.api.CoreV1().Pods(ns).Get(ctx, "deaf", metav1.GetOptions{})
			if !apierrors.IsNotFound(err) {
				return fmt.Errorf("%v", err)
			}
			return nil
		})
		e.eventually("an event tells of the end", func(context.Context) error {
			if text := e.ctl("-n", ns, "get", "events", "--field-selector=involvedObject.name=deaf"); !strings.Contains(text, "Killing") {
				return errors.New(text)
			}
			return nil
		})
	})
}

// follow reads a log while it is written.
func (e *env) follow(ns string) {
	e.t.Helper()
	e.create(ns, pod("count", "count"))
	e.podReady(ns, "count")
	ctx, cancel := context.WithTimeout(e.t.Context(), testTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, e.Bin("clusterctl"), "-n", ns, "logs", "-f", "count")
	cmd.Env = append(os.Environ(), "KUBECONFIG="+e.kubeconfig())
	out, err := cmd.StdoutPipe()
	if err != nil {
		e.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		e.t.Fatal(err)
	}
	s := bufio.NewScanner(out)
	for i := 0; i < 300; i++ {
		if !s.Scan() || s.Text() != fmt.Sprint(i) {
			e.t.Errorf("line %d of logs -f: %q (%v)", i, s.Text(), s.Err())
			break
		}
	}
	cancel()
	_ = cmd.Wait() // it was killed
}

// startCtl runs clusterctl in the background; the function waits for its end
// and returns what it printed.
func (e *env) startCtl(args ...string) func() string {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.t.Context(), testTimeout)
	e.t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, e.Bin("clusterctl"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+e.kubeconfig())
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		e.t.Fatal(err)
	}
	return func() string {
		_ = cmd.Wait()
		return out.String()
	}
}
