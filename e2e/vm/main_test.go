package vm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
)

const (
	image = "clusterd.local/hello:1"
	data  = "/var/lib/clusterd-dev"
	group = "/clusterd-dev" // parent of all pods' cgroups
	mount = "/sys/fs/cgroup"
	// testTimeout is how long one thing may take on an emulated processor.
	testTimeout = 4 * time.Minute
)

func TestMain(m *testing.M) {
	if os.Getenv("CLUSTERD_VM") == "" {
		os.Exit(m.Run()) // each test skips itself
	}
	code, err := runWithCluster(m)
	if err != nil {
		fmt.Println("vm:", err)
		code = 1
	}
	os.Exit(code)
}

// runWithCluster runs the tests against one `clusterd dev`, which must start,
// end when asked to, and leave no cgroup and no mount behind.
func runWithCluster(m *testing.M) (int, error) {
	cmd := exec.Command("clusterd", "dev", "--advertise", "127.0.0.1",
		"--cpu-manager-policy", "static", "--reserved-cpus", "0", "--pod-pids-limit", "300")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		return 1, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	code := 1
	err := prepare(ended)
	if err == nil {
		code = m.Run()
	}
	if serr := cmd.Process.Signal(os.Interrupt); serr != nil {
		return code, errors.Join(err, serr)
	}
	select {
	case werr := <-ended:
		err = errors.Join(err, werr)
	case <-time.After(testTimeout):
		return code, errors.Join(err, errors.New("clusterd dev does not end"))
	}
	return code, errors.Join(err, remains())
}

// prepare waits for the node and gives it the image.
func prepare(ended <-chan error) error {
	for deadline := time.Now().Add(testTimeout); ; {
		out, err := ctl("get", "nodes", "-o", `jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out == "True" {
			break
		}
		select {
		case err := <-ended:
			return fmt.Errorf("clusterd dev ended: %w", err)
		case <-time.After(time.Second):
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the node does not become Ready: %s %w", out, err)
		}
	}
	_, err := ctl("image", "load", "/bin/hello.tar")
	return err
}

// remains tells what `clusterd dev` left when it ended.
func remains() error {
	var errs []error
	if groups := groupsBelow(group); len(groups) > 0 {
		errs = append(errs, fmt.Errorf("cgroups are left: %q", groups))
	}
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, data+"/images") || strings.Contains(line, data+"/pods") || strings.Contains(line, "/shm ") && strings.Contains(line, data) {
			errs = append(errs, fmt.Errorf("a mount is left: %s", strings.TrimSpace(line)))
		}
	}
	return errors.Join(errs...)
}

// ctl runs clusterctl.
func ctl(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "clusterctl", args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+data+"/admin.kubeconfig")
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("clusterctl %s: %w: %s", strings.Join(args, " "), err, said.String())
	}
	return out.String(), nil
}

// env is one test's view of the cluster.
type env struct {
	t   *testing.T
	api kubernetes.Interface
	ns  string
}

func newEnv(t *testing.T) *env {
	t.Helper()
	if os.Getenv("CLUSTERD_VM") == "" {
		t.Skip("runs in an emulated machine: make test-vm")
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", data+"/admin.kubeconfig")
	if err != nil {
		t.Fatal(err)
	}
	api, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	e := &env{t: t, api: api, ns: strings.ToLower(t.Name())}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: e.ns}}
	if _, err := api.CoreV1().Namespaces().Create(t.Context(), ns, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			out, err := ctl("-n", e.ns, "describe", "pods")
			t.Log(out, err)
		}
		if _, err := ctl("delete", "namespace", e.ns); err != nil {
			t.Error(err)
		}
	})
	return e
}

// pod is a pod of one container "main" that runs the hello program.
func (e *env) pod(name string, args ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: e.ns},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: ptr.To[int64](1),
			Containers:                    []corev1.Container{{Name: "main", Image: image, Args: args}},
		},
	}
}

// run creates the pod and waits until all its containers run.
func (e *env) run(p *corev1.Pod) *corev1.Pod {
	e.t.Helper()
	if _, err := e.api.CoreV1().Pods(e.ns).Create(e.t.Context(), p, metav1.CreateOptions{}); err != nil {
		e.t.Fatal(err)
	}
	return e.podIs(p.Name, "Running", func(p *corev1.Pod) bool {
		for _, c := range p.Status.ContainerStatuses {
			if c.State.Running == nil {
				return false
			}
		}
		return p.Status.Phase == corev1.PodRunning
	})
}

func (e *env) podIs(name, what string, is func(*corev1.Pod) bool) *corev1.Pod {
	e.t.Helper()
	var p *corev1.Pod
	e.eventually("pod "+name+" is "+what, func() error {
		var err error
		if p, err = e.api.CoreV1().Pods(e.ns).Get(e.t.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		if !is(p) {
			b, _ := json.Marshal(p.Status)
			return fmt.Errorf("status %s", b)
		}
		return nil
	})
	return p
}

func (e *env) eventually(what string, check func() error) {
	e.t.Helper()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(testTimeout); ; <-tick.C {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			e.t.Fatalf("waited for: %s; but: %v", what, err)
		}
	}
}

// exec runs a command in the pod's container and returns what it printed.
func (e *env) exec(pod string, args ...string) string {
	e.t.Helper()
	out, err := ctl(append([]string{"-n", e.ns, "exec", pod, "--"}, args...)...)
	if err != nil {
		e.t.Fatal(err)
	}
	return out
}

// podGroup is the directory of a pod's cgroup.
func podGroup(class string, p *corev1.Pod) string {
	return filepath.Join(mount, group, class, "pod"+string(p.UID))
}

// containerGroup is the directory of the cgroup of a pod's first container.
func containerGroup(class string, p *corev1.Pod) string {
	_, id, _ := strings.Cut(p.Status.ContainerStatuses[0].ContainerID, "://")
	return filepath.Join(podGroup(class, p), id)
}

// holds checks the content of a file of a cgroup.
func (e *env) holds(dir, file, want string) {
	e.t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, file))
	if got := strings.TrimSpace(string(b)); err != nil || got != want {
		e.t.Errorf("%s/%s: %q, want %q (%v)", dir, file, got, want, err)
	}
}

// groupsBelow lists a cgroup and all below it.
func groupsBelow(name string) []string {
	var out []string
	_ = filepath.WalkDir(filepath.Join(mount, name), func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			out = append(out, p)
		}
		return nil
	})
	return out
}
