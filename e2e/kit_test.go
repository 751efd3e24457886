package e2e

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/e2e/cluster"
)

const (
	image = "clusterd.local/hello:1"
	// testTimeout is how long anything may take on a busy machine. Tests wait for
	// a condition and so rarely this long.
	testTimeout = 3 * time.Minute
	// stalled is longer than any step takes unless something waits that should
	// not. How fast a step is, the benchmarks tell.
	stalled = 30 * time.Second
)

// lane tells two runs of this package apart that go on at once: each has a bridge
// and a segment of its own. It is empty or a number from 1 to 126.
var lane = os.Getenv("CLUSTERD_E2E_LANE")

// bridge is the name of this run's bridge: no other run's begins with it, since what
// bears it must be gone at the end (cluster.Stays).
func bridge() string {
	n, _ := strconv.Atoi(lane)
	return fmt.Sprintf("cde2e%03d", n)
}

// segment is where the nodes of this run's clusters have their addresses; the next
// one may be used too, see cluster.FarSubnet.
func segment() netip.Prefix {
	n, _ := strconv.Atoi(lane)
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 90, byte(2 * n), 0}), 24)
}

// env is a cluster under test, with the demo image on every node.
type env struct {
	*cluster.Netns
	t      *testing.T
	api    kubernetes.Interface // of the first node
	config *rest.Config
}

// bin is the directory of the programs under test.
func bin(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("CLUSTERD_BIN")
	if dir == "" {
		dir = "../bin"
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"clusterd", "clusterctl", "hello.tar"} {
		if _, err := os.Stat(filepath.Join(abs, f)); err != nil {
			t.Fatalf("%v: run `make build image` first", err)
		}
	}
	return abs
}

func need(t *testing.T) {
	t.Helper()
	if os.Getenv("CLUSTERD_E2E") != "netns" {
		t.Skip("needs root and built programs: make build image && CLUSTERD_E2E=netns go test ./e2e/...")
	}
	if os.Geteuid() != 0 {
		t.Fatal("CLUSTERD_E2E is set, but this is not root")
	}
}

// start makes a cluster of three nodes that are Ready, and takes it down when
// the test ends: then nothing of it may be left on the machine.
func start(t *testing.T) *env {
	t.Helper()
	e := startBare(t, 3)
	e.ready(3)
	return e
}

// ready waits until so many nodes are Ready and brings them the image.
func (e *env) ready(nodes int) {
	e.t.Helper()
	e.eventually("every node is Ready", func(ctx context.Context) error {
		list, err := e.api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		if len(list.Items) != nodes {
			return fmt.Errorf("%d nodes", len(list.Items))
		}
		for _, n := range list.Items {
			if !nodeReady(&n) {
				return fmt.Errorf("%s is not Ready: %+v", n.Name, n.Status.Conditions)
			}
		}
		return nil
	})
	e.eventually("every node has the image", func(context.Context) error { // one that has just started takes no commands yet
		if out, errs, code := e.run("clusterctl", "", "image", "load", filepath.Join(e.binDir(), "hello.tar")); code != 0 {
			return errors.New(out + errs)
		}
		return nil
	})
}

// startBare makes a cluster and waits for its API only. change may change how.
func startBare(t *testing.T, nodes int, change ...func(*cluster.Config)) *env {
	t.Helper()
	need(t)
	dir := filepath.Join(t.TempDir(), "c")
	cfg := cluster.Config{
		Dir: dir, Bin: bin(t), Nodes: nodes,
		Bridge: bridge(), Subnet: segment(),
	}
	for _, fn := range change {
		fn(&cfg)
	}
	c, err := cluster.Up(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	e := &env{Netns: c, t: t}
	t.Cleanup(func() {
		if t.Failed() {
			e.dump()
		}
		marks := append(c.Marks(), dir)
		for _, n := range c.Nodes() {
			_ = c.Resume(n.Name) // a frozen one cannot stop; most do not run frozen
			if err := c.Stop(context.WithoutCancel(t.Context()), n.Name); err != nil {
				t.Errorf("stop: %v", err)
				e.keepLog(n)
			}
		}
		if err := c.Down(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("take the cluster down: %v", err)
		}
		if left, err := cluster.Stays(marks...); err != nil || len(left) > 0 {
			t.Errorf("left behind: %q (%v)", left, err)
		}
	})
	if e.api, e.config, err = c.Client("n1"); err != nil {
		t.Fatal(err)
	}
	return e
}

func (e *env) binDir() string { return filepath.Dir(e.Bin("clusterctl")) }

// dump prints what one wants to know of a failed test.
func (e *env) dump() {
	for _, args := range [][]string{
		{"get", "nodes,deployments,replicasets,pods", "-A", "-o", "wide"},
		{"get", "events", "-A", "--sort-by=.lastTimestamp"},
		{"members"},
	} {
		out, _, _ := e.run("clusterctl", "", args...)
		e.t.Logf("$ clusterctl %s\n%s", strings.Join(args, " "), tail(out, 60))
	}
	for _, n := range e.Nodes() {
		r, err := e.Logs(n.Name)
		if err != nil {
			continue
		}
		b, _ := io.ReadAll(r)
		_ = r.Close()
		e.t.Logf("--- %s:\n%s", n.Name, tail(string(b), 40))
	}
}

// keepLog copies a node's log out of the directory that is about to go.
func (e *env) keepLog(n cluster.Node) {
	r, err := e.Logs(n.Name)
	if err != nil {
		e.t.Error(err)
		return
	}
	defer func() { _ = r.Close() }()
	f, err := os.CreateTemp("", "clusterd-"+n.Name+"-*.log")
	if err != nil {
		e.t.Error(err)
		return
	}
	defer func() { _ = f.Close() }()
	_, err = io.Copy(f, r)
	e.t.Logf("the log of %s is kept in %s (%v)", n.Name, f.Name(), err)
}

func tail(s string, n int) string {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// run runs clusterctl or kubectl as the administrator.
func (e *env) run(prog, stdin string, args ...string) (stdout, stderr string, code int) {
	path := prog
	switch prog {
	case "clusterctl":
		path = e.Bin(prog)
	case "kubectl":
		path = kubectlPath()
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(e.t.Context()), testTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stdin = strings.NewReader(stdin)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+e.kubeconfig(), "HOME="+filepath.Dir(e.Nodes()[0].Data))
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		code = exit.ExitCode()
	case err != nil:
		e.t.Fatalf("%s: %v", prog, err)
	}
	return out.String(), errs.String(), code
}

// kubeconfig leads to a server that runs.
func (e *env) kubeconfig() string {
	for _, n := range e.Nodes() {
		_, runs := e.Pid(n.Name)
		if _, serves := os.Stat(n.Kubeconfig()); runs == nil && serves == nil {
			return n.Kubeconfig()
		}
	}
	return e.Nodes()[0].Kubeconfig()
}

// ctl runs clusterctl, which must succeed, be it only once there is a leader again.
func (e *env) ctl(args ...string) string { return e.ctlIn("", args...) }

// ctlIn is ctl with something on standard input.
func (e *env) ctlIn(stdin string, args ...string) string {
	e.t.Helper()
	out, errs, code := e.runNow(stdin, args...)
	if code != 0 {
		e.t.Fatalf("clusterctl %s: exit %d: %s%s", strings.Join(args, " "), code, out, errs)
	}
	return out
}

// refused runs clusterctl, which must fail, and returns what it says.
func (e *env) refused(stdin string, args ...string) string {
	e.t.Helper()
	out, errs, code := e.runNow(stdin, args...)
	if code == 0 {
		e.t.Fatalf("clusterctl %s: passed: %s", strings.Join(args, " "), out)
	}
	return out + errs
}

// eventuallyHas waits until what clusterctl prints has all the words.
func (e *env) eventuallyHas(args []string, words ...string) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("%q in the output of %q", words, args), func(context.Context) error {
		out, errs, _ := e.run("clusterctl", "", args...)
		for _, w := range words {
			if !strings.Contains(out, w) {
				return fmt.Errorf("%q is not in:\n%s%s", w, out, errs)
			}
		}
		return nil
	})
}

// kubectlPath is the kubectl that CLUSTERD_KUBECTL names (make test builds one of
// the server's version), else the one in PATH.
func kubectlPath() string { return cmp.Or(os.Getenv("CLUSTERD_KUBECTL"), "kubectl") }

// kubectls are the programs that must behave the same.
func kubectls() []string {
	progs := []string{"clusterctl"}
	if _, err := exec.LookPath(kubectlPath()); err == nil {
		progs = append(progs, "kubectl")
	}
	return progs
}

// oneAsk is how long one question may take. On a busy machine some take seconds.
const oneAsk = 15 * time.Second

// eventually waits until check has nothing to complain of.
func (e *env) eventually(what string, check func(context.Context) error) time.Duration {
	e.t.Helper()
	return e.within(testTimeout, what, check)
}

func (e *env) within(limit time.Duration, what string, check func(context.Context) error) time.Duration {
	e.t.Helper()
	began := time.Now()
	ctx, cancel := context.WithTimeout(e.t.Context(), limit)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		// One question that hangs must not use up all the time.
		ask, stop := context.WithTimeout(ctx, oneAsk)
		err := check(ask)
		stop()
		if err == nil {
			return time.Since(began)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			e.t.Fatalf("waited %s for: %s; but: %v", limit, what, err)
		}
	}
}

// use makes the env ask another node.
func (e *env) use(node string) {
	e.t.Helper()
	api, config, err := e.Client(node)
	if err != nil {
		e.t.Fatal(err)
	}
	e.api, e.config = api, config
}

// leader is the name of the node that leads.
func (e *env) leader() string {
	e.t.Helper()
	var leader string
	e.eventually("there is a leader", func(ctx context.Context) error {
		b, err := e.api.Discovery().RESTClient().Get().AbsPath("/clusterd/v1/members").Do(ctx).Raw()
		if err != nil {
			return err
		}
		var list struct {
			Leader  string
			Members []struct {
				Name   string
				Leader bool
			}
		}
		if err := json.Unmarshal(b, &list); err != nil {
			return err
		}
		for _, m := range list.Members {
			if m.Leader {
				leader = m.Name
				return nil
			}
		}
		return fmt.Errorf("%s", b)
	})
	return leader
}

func (e *env) other(than ...string) string {
	e.t.Helper()
	for _, n := range e.Nodes() {
		if !strings.Contains(" "+strings.Join(than, " ")+" ", " "+n.Name+" ") {
			return n.Name
		}
	}
	e.t.Fatal("no other node")
	return ""
}

// namespace makes a namespace of that name.
func (e *env) namespace(name string) string {
	e.t.Helper()
	e.ctl("create", "namespace", name)
	return name
}

// pod is a pod of one container "main" that runs the hello program.
func pod(name string, args ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: ptr.To[int64](1),
			Containers:                    []corev1.Container{{Name: "main", Image: image, Args: args}},
		},
	}
}

// deployment runs the hello program's web server.
func deployment(name string, replicas int32) *appsv1.Deployment {
	p := pod(name)
	p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("1m"), corev1.ResourceMemory: resource.MustParse("4Mi"),
	}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: p.Labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: p.Labels}, Spec: p.Spec},
		},
	}
}

func (e *env) create(ns string, p *corev1.Pod) *corev1.Pod {
	e.t.Helper()
	pods := e.api.CoreV1().Pods(ns)
	return made(e, func(ctx context.Context) (*corev1.Pod, error) { return pods.Create(ctx, p, metav1.CreateOptions{}) },
		func(ctx context.Context) (*corev1.Pod, error) { return pods.Get(ctx, p.Name, metav1.GetOptions{}) })
}

func (e *env) createDeployment(ns string, d *appsv1.Deployment) {
	e.t.Helper()
	all := e.api.AppsV1().Deployments(ns)
	made(e, func(ctx context.Context) (*appsv1.Deployment, error) {
		return all.Create(ctx, d, metav1.CreateOptions{})
	},
		func(ctx context.Context) (*appsv1.Deployment, error) {
			return all.Get(ctx, d.Name, metav1.GetOptions{})
		})
}

func (e *env) get(ns, name string) *corev1.Pod {
	e.t.Helper()
	p, err := e.api.CoreV1().Pods(ns).Get(e.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	return p
}

// podIs waits until a pod is as wanted; is says what is amiss.
func (e *env) podIs(ns, name, what string, is func(*corev1.Pod) error) *corev1.Pod {
	e.t.Helper()
	var p *corev1.Pod
	e.eventually("pod "+name+" is "+what, func(ctx context.Context) (err error) {
		if p, err = e.api.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{}); err != nil {
			return err
		}
		if err := is(p); err != nil {
			return fmt.Errorf("%w; status %s", err, brief(p))
		}
		return nil
	})
	return p
}

// podReady waits until a pod is Ready.
func (e *env) podReady(ns, name string) *corev1.Pod {
	e.t.Helper()
	return e.podIs(ns, name, "Ready", func(p *corev1.Pod) error {
		if !podReady(p) {
			return errors.New("not Ready")
		}
		return nil
	})
}

// podsReady waits until exactly so many pods match, all Ready and none on its
// way out.
func (e *env) podsReady(ns, selector string, n int) []corev1.Pod {
	e.t.Helper()
	var pods []corev1.Pod
	e.eventually(fmt.Sprintf("%d pods %s are Ready", n, selector), func(ctx context.Context) error {
		list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: selector})
		if err != nil {
			return err
		}
		pods = list.Items
		ready := 0
		for i := range pods {
			if podReady(&pods[i]) && pods[i].DeletionTimestamp == nil {
				ready++
			}
		}
		if ready != n || len(pods) != n {
			return fmt.Errorf("%d of %d are Ready", ready, len(pods))
		}
		return nil
	})
	return pods
}

func podReady(p *corev1.Pod) bool {
	c := podCondition(p, corev1.PodReady)
	return c != nil && c.Status == corev1.ConditionTrue
}

func podCondition(p *corev1.Pod, kind corev1.PodConditionType) *corev1.PodCondition {
	for i := range p.Status.Conditions {
		if p.Status.Conditions[i].Type == kind {
			return &p.Status.Conditions[i]
		}
	}
	return nil
}

func nodeReady(n *corev1.Node) bool {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// brief is a pod's status as JSON.
func brief(p *corev1.Pod) string {
	b, err := json.Marshal(p.Status)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// page gets a page of the hello program from a node's network.
func (e *env) page(node, ip string) (string, error) {
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
			err = e.Do(node, func() (err error) {
				conn, err = (&net.Dialer{}).DialContext(ctx, network, addr)
				return err
			})
			return conn, err
		},
	}}
	resp, err := client.Get("http://" + net.JoinHostPort(ip, "8080") + "/")
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

// mustContain fails unless the text has all the words.
func mustContain(t *testing.T, what, text string, words ...string) {
	t.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			t.Errorf("%s: %q is not in:\n%s", what, w, text)
		}
	}
}

func contains(t *testing.T, cidr, ip string) bool {
	t.Helper()
	prefix, err := netip.ParsePrefix(cidr)
	if err != nil {
		t.Fatal(err)
	}
	addr, err := netip.ParseAddr(ip)
	if err != nil {
		t.Fatal(err)
	}
	return prefix.Contains(addr)
}
