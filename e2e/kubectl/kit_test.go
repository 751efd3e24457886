package kubectl

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/e2e/cluster/clustertest"
)

const (
	image = "clusterd.local/hello:1"
	node  = clustertest.Node
	// testTimeout is how long anything may take on a busy machine.
	testTimeout = 3 * time.Minute
	// stalled is longer than any step takes unless something waits that should
	// not. How fast a step is, the benchmarks tell.
	stalled = 30 * time.Second
)

// shared is the cluster that all tests of the package use.
// timeoutFlag makes kubectl wait as long as tests do.
var timeoutFlag = "--timeout=" + testTimeout.String()

var shared = clustertest.Shared{Name: "clusterd-kubectl", Bridge: "cdkubectl" + lane, Subnet: segment(), Args: []string{"--max-pods", maxPods}}

// maxPods lets the tests that run at the same time have all their pods at once.
const maxPods = "200"

// lane tells two runs of this package apart that go on at once, as package e2e's does.
var lane = os.Getenv("CLUSTERD_E2E_LANE")

func segment() netip.Prefix {
	n, _ := strconv.Atoi(lane)
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 87, byte(n), 0}), 24)
}

func TestMain(m *testing.M) { os.Exit(shared.Main(m)) }

func binDir() (string, error) {
	dir := os.Getenv("CLUSTERD_BIN")
	if dir == "" {
		dir = "../../bin"
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	for _, f := range []string{"clusterd", "clusterctl", "hello.tar"} {
		if _, err := os.Stat(filepath.Join(abs, f)); err != nil {
			return "", fmt.Errorf("%w: run `make build image` first", err)
		}
	}
	return abs, nil
}

// kit is one test's hold on the cluster.
type kit struct {
	*testing.T
	c      *cluster.Netns
	api    kubernetes.Interface
	config *rest.Config
	ns     string // the test's own namespace
	dir    string // for files; commands run in it
}

// start gives the cluster to a test, with a namespace of the given name.
func start(t *testing.T, ns string) *kit {
	t.Helper()
	if os.Getenv("CLUSTERD_E2E") != "netns" {
		t.Skip("needs root and built programs: make build image && CLUSTERD_E2E=netns go test ./e2e/kubectl")
	}
	if os.Geteuid() != 0 {
		t.Fatal("CLUSTERD_E2E is set, but this is not root")
	}
	bin, err := binDir()
	if err != nil {
		t.Fatal(err)
	}
	if err := shared.Start(bin); err != nil {
		t.Fatal(err)
	}
	k := &kit{T: t, c: shared.Cluster, api: shared.API, config: shared.Config, ns: ns, dir: t.TempDir()}
	k.ok("create", "namespace", ns)
	t.Cleanup(func() {
		if t.Failed() {
			k.dump()
		}
	})
	return k
}

// sub is the same hold for a subtest.
func (k *kit) sub(name string, fn func(*kit)) {
	k.Helper()
	k.T.Run(name, func(t *testing.T) {
		inner := *k
		inner.T = t
		fn(&inner)
	})
}

func (k *kit) dump() {
	for _, args := range [][]string{{"get", "pods", "-o", "wide"}, {"get", "events", "--sort-by=.lastTimestamp"}} {
		out, errs, _ := k.in("", args...)
		k.Logf("$ kubectl %s\n%s%s", strings.Join(args, " "), out, errs)
	}
	k.Logf("--- %s:\n%s", node, shared.LastLog(20))
}

// program is the kubectl that CLUSTERD_KUBECTL names (make test builds one of the
// server's version), or the one in PATH, or clusterctl where there is none.
func (k *kit) program() string {
	if path, err := exec.LookPath(cmp.Or(os.Getenv("CLUSTERD_KUBECTL"), "kubectl")); err == nil {
		return path
	}
	return k.c.Bin("clusterctl")
}

// command prepares kubectl as the administrator, in the test's namespace.
// Later flags of args win over the namespace.
func (k *kit) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, k.program(), append([]string{"--namespace", k.ns}, args...)...)
	cmd.Dir = k.dir
	cmd.Env = append(os.Environ(), "KUBECONFIG="+k.c.Nodes()[0].Kubeconfig(), "HOME="+shared.Dir,
		"KUBECTL_EXTERNAL_DIFF=diff -u")
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// in runs kubectl with something on its standard input.
func (k *kit) in(stdin string, args ...string) (stdout, stderr string, code int) {
	k.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout+10*time.Second)
	defer cancel()
	return k.finish(k.command(ctx, args...), stdin)
}

// finish runs a prepared command to its end.
func (k *kit) finish(cmd *exec.Cmd, stdin string) (stdout, stderr string, code int) {
	k.Helper()
	stdout, stderr, code, err := clustertest.Finish(cmd, stdin)
	if err != nil {
		k.Fatalf("%s: %v", cmd, err)
	}
	return stdout, stderr, code
}

// ok runs kubectl, which must succeed.
func (k *kit) ok(args ...string) string {
	k.Helper()
	return k.okIn("", args...)
}

// okIn is ok with something on standard input.
func (k *kit) okIn(stdin string, args ...string) string {
	k.Helper()
	out, errs, code := k.in(stdin, args...)
	if code != 0 {
		k.Fatalf("kubectl %s: exit %d: %s%s", strings.Join(args, " "), code, out, errs)
	}
	return out
}

// fails runs kubectl, which must not succeed, and returns what it says.
func (k *kit) fails(args ...string) string {
	k.Helper()
	return k.failsIn("", args...)
}

func (k *kit) failsIn(stdin string, args ...string) string {
	k.Helper()
	out, errs, code := k.in(stdin, args...)
	if code == 0 {
		k.Fatalf("kubectl %s passed: %s%s", strings.Join(args, " "), out, errs)
	}
	return out + errs
}

// apply applies a manifest.
func (k *kit) apply(manifest string) string {
	k.Helper()
	return k.okIn(manifest, "apply", "-f", "-")
}

// file writes a file of the test's directory and returns its path.
func (k *kit) file(name, content string) string {
	k.Helper()
	path := filepath.Join(k.dir, name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		k.Fatal(err)
	}
	return path
}

// has fails the test unless the text has all the words.
func (k *kit) has(text string, words ...string) {
	k.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			k.Errorf("%q is not in:\n%s", w, text)
		}
	}
}

// lacks fails the test if the text has one of the words.
func (k *kit) lacks(text string, words ...string) {
	k.Helper()
	for _, w := range words {
		if strings.Contains(text, w) {
			k.Errorf("%q is in:\n%s", w, text)
		}
	}
}

// is fails the test unless both are the same.
func (k *kit) is(what, got, want string) {
	k.Helper()
	if got != want {
		k.Errorf("%s is %q, want %q", what, got, want)
	}
}

// field is one field of an object, as jsonpath prints it.
func (k *kit) field(object, path string) string {
	k.Helper()
	return k.ok("get", object, "-o", "jsonpath="+path)
}

// eventually waits until check has nothing to complain of.
func (k *kit) eventually(what string, check func(context.Context) error) {
	k.Helper()
	ctx, cancel := context.WithTimeout(k.Context(), testTimeout)
	defer cancel()
	if err := clustertest.Poll(ctx, check); err != nil {
		k.Fatalf("waited %s for: %s; but: %v", testTimeout, what, err)
	}
}

// soon looks every 20 ms, for as long as eventually does.
func (k *kit) soon(what string, check func(context.Context) (bool, error)) {
	k.Helper()
	if err := wait.PollUntilContextTimeout(k.Context(), 20*time.Millisecond, testTimeout, true, check); err != nil {
		k.Fatalf("%s: %v", what, err)
	}
}

// best measures up to five times and fails when none is within bound: a busy machine
// makes one measurement long, a wait in the program makes all of them so.
func (k *kit) best(what string, bound time.Duration, measure func(i int) time.Duration) {
	k.Helper()
	best := time.Duration(math.MaxInt64)
	const attempts = 8 // as long as the machine is too busy to tell
	for i := range attempts {
		if best = min(best, measure(i)); best <= bound {
			k.Logf("%s: %s", what, best.Round(time.Millisecond))
			return
		}
	}
	k.Errorf("%s: the best of %d took %s, want %s at most", what, attempts, best, bound)
}

// pod gets a pod of the test.
func (k *kit) pod(name string) *corev1.Pod {
	k.Helper()
	p, err := k.api.CoreV1().Pods(k.ns).Get(k.Context(), name, metav1.GetOptions{})
	if err != nil {
		k.Fatal(err)
	}
	return p
}

// podIs waits until a pod is as wanted.
func (k *kit) podIs(name, what string, is func(*corev1.Pod) bool) *corev1.Pod {
	k.Helper()
	var p *corev1.Pod
	k.eventually("pod "+name+" "+what, func(ctx context.Context) (err error) {
		if p, err = k.api.CoreV1().Pods(k.ns).Get(ctx, name, metav1.GetOptions{}); err != nil {
			return err
		}
		if !is(p) {
			return fmt.Errorf("status %+v", p.Status)
		}
		return nil
	})
	return p
}

func (k *kit) ready(name string) *corev1.Pod {
	k.Helper()
	return k.podIs(name, "is Ready", func(p *corev1.Pod) bool { return condition(p, corev1.PodReady) == corev1.ConditionTrue })
}

func (k *kit) phase(name string, want corev1.PodPhase) *corev1.Pod {
	k.Helper()
	return k.podIs(name, "is "+string(want), func(p *corev1.Pod) bool { return p.Status.Phase == want })
}

// gone waits until a pod is no more.
func (k *kit) gone(name string) {
	k.Helper()
	k.eventually("pod "+name+" is gone", func(ctx context.Context) error {
		list, err := k.api.CoreV1().Pods(k.ns).List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
		if err == nil && len(list.Items) > 0 {
			err = fmt.Errorf("status %+v", list.Items[0].Status)
		}
		return err
	})
}

func condition(p *corev1.Pod, kind corev1.PodConditionType) corev1.ConditionStatus {
	for _, c := range p.Status.Conditions {
		if c.Type == kind {
			return c.Status
		}
	}
	return ""
}

func waiting(p *corev1.Pod) *corev1.ContainerStateWaiting {
	if len(p.Status.ContainerStatuses) == 0 {
		return nil
	}
	return p.Status.ContainerStatuses[0].State.Waiting
}

// events are the reasons of the events about an object, oldest first.
func (k *kit) events(name string) []corev1.Event {
	k.Helper()
	list, err := k.api.CoreV1().Events(k.ns).List(k.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + name})
	if err != nil {
		k.Fatal(err)
	}
	return list.Items
}

// event waits for an event whose message has the words. Others of its reason may have
// come before.
func (k *kit) event(name, reason string, words ...string) {
	k.Helper()
	k.eventually(fmt.Sprintf("event %s about %s with %q", reason, name, words), func(context.Context) error {
		var others []string
		for _, e := range k.events(name) {
			if e.Reason == reason && !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(e.Message, w) }) {
				return nil
			}
			others = append(others, e.Reason+": "+e.Message)
		}
		return fmt.Errorf("there is none among %q", others)
	})
}

// exec runs the hello program in a container.
func (k *kit) exec(pod, container string, args ...string) string {
	k.Helper()
	return k.ok(append([]string{"exec", pod, "-c", container, "--", "/hello"}, args...)...)
}

// ask sends a plain HTTP request as the administrator.
func (k *kit) ask(method, path, body string, header ...string) (int, string) {
	k.Helper()
	client, err := rest.HTTPClientFor(k.config)
	if err != nil {
		k.Fatal(err)
	}
	return k.send(client, method, path, body, header...)
}

// send sends a plain HTTP request; header alternates names and values.
func (k *kit) send(client *http.Client, method, path, body string, header ...string) (int, string) {
	k.Helper()
	ctx, cancel := context.WithTimeout(k.Context(), 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, k.config.Host+path, strings.NewReader(body))
	if err != nil {
		k.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := client.Do(req)
	if err != nil {
		k.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		k.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// Both forms in which kubectl -v=6 tells of a response, before and since 1.33.
var (
	oldRequest = regexp.MustCompile(`\b(GET|POST|PUT|PATCH|DELETE) (https?://\S+) (\d{3}) `)
	newRequest = regexp.MustCompile(`verb="(GET|POST|PUT|PATCH|DELETE)" url="([^"]+)".* status="(\d{3})`)
)

// requests are the requests that kubectl -v=6 told of, "GET /api/v1 200"
// each, without their query.
func requests(log string) []string {
	var all []string
	for line := range strings.Lines(log) {
		m := oldRequest.FindStringSubmatch(line)
		if m == nil {
			m = newRequest.FindStringSubmatch(line)
		}
		if m == nil {
			continue
		}
		_, path, _ := strings.Cut(m[2], "://")
		_, path, _ = strings.Cut(path, "/")
		path, _, _ = strings.Cut(path, "?")
		all = append(all, m[1]+" /"+path+" "+m[3])
	}
	return all
}

// simple is a pod of one container "main"; more are further lines of its spec.
func simple(name, args string, more ...string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s, labels: {app: %s}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - {name: main, image: %q, args: [%s]}
%s`, name, name, image, args, lines(more))
}

func lines(more []string) string {
	var b strings.Builder
	for _, l := range more {
		b.WriteString("  " + l + "\n")
	}
	return b.String()
}

// web is a Deployment of the hello program.
func web(name string, replicas int) string {
	return fmt.Sprintf(`apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s}
spec:
  replicas: %[2]d
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - {name: main, image: %[3]q, args: [sleep]}
`, name, replicas, image)
}

// eventuallyHas runs kubectl until its output has the words.
func (k *kit) eventuallyHas(args []string, words ...string) {
	k.Helper()
	k.eventually(fmt.Sprintf("%q in the output of %q", words, args), func(context.Context) error {
		out, errs, _ := k.in("", args...)
		for _, w := range words {
			if !strings.Contains(out, w) {
				return fmt.Errorf("%q is not in:\n%s%s", w, out, errs)
			}
		}
		return nil
	})
}

// established waits until a custom kind is: right after it was made, kubectl's wait ends at
// once, as it takes the conditions that are not there yet for an error.
func (k *kit) established(crd string) {
	k.Helper()
	k.eventuallyHas([]string{"wait", "--for=condition=Established", "crd/" + crd, timeoutFlag}, "condition met")
}

// discovered waits until discovery, from which kubectl has what it knows of kinds, lists
// resources of a group and version: it is filled after their paths are served.
func (k *kit) discovered(group, version string, resources ...string) {
	k.Helper()
	k.eventually(fmt.Sprintf("%q of %s/%s are discovered", resources, group, version), func(context.Context) error {
		code, body := k.ask(http.MethodGet, "/apis", "", "Accept", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList")
		var list apidiscoveryv2.APIGroupDiscoveryList
		if err := json.Unmarshal([]byte(body), &list); err != nil {
			return fmt.Errorf("%d %w", code, err)
		}
		left := slices.Clone(resources)
		for _, g := range list.Items {
			for _, v := range g.Versions {
				if g.Name == group && v.Version == version {
					left = slices.DeleteFunc(left, func(name string) bool {
						return slices.ContainsFunc(v.Resources, func(r apidiscoveryv2.APIResourceDiscovery) bool { return r.Resource == name })
					})
				}
			}
		}
		if len(left) > 0 {
			return fmt.Errorf("%q are not there", left)
		}
		return nil
	})
}

func (k *kit) decode(body string, into any) {
	k.Helper()
	if err := json.Unmarshal([]byte(body), into); err != nil {
		k.Fatalf("%v: %s", err, body)
	}
}
