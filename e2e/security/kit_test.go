package security

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	clusterdv1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/e2e/cluster/clustertest"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

const (
	image = "clusterd.local/hello:1"
	// waitLimit is how long anything may take on a busy machine.
	waitLimit = 3 * time.Minute
	// opens is how long a door is watched that should close: a refusal comes at once,
	// so only what is open, or a machine that stands still, takes this long.
	opens = 30 * time.Second
	// ns holds the pods, Secrets and accounts that are attacked.
	ns = "victims"
)

var shared = clustertest.Shared{Name: "clusterd-security", Bridge: "cdsecurity", Subnet: netip.MustParsePrefix("10.85.0.0/24"), Servers: 3, Agents: 2}

func TestMain(m *testing.M) { os.Exit(shared.Main(m)) }

// suite is the cluster under attack.
type suite struct {
	*cluster.Netns
	t      *testing.T // of the group
	api    kubernetes.Interface
	admin  *rest.Config
	dir    string
	bin    string
	ending string // a token that ends ten minutes after the beginning
}

// start makes the cluster and what is attacked on it: a pod on each agent, of which
// each refers to a Secret.
func start(t *testing.T) *suite {
	t.Helper()
	bin := os.Getenv("CLUSTERD_SECURITY")
	if bin == "" {
		t.Skip("it takes long, and needs root and built programs: make security-test")
	}
	if os.Geteuid() != 0 {
		t.Fatal("CLUSTERD_SECURITY is set, but this is not root")
	}
	if err := shared.Start(bin); err != nil {
		t.Fatal(err)
	}
	s := &suite{Netns: shared.Cluster, t: t, api: shared.API, admin: shared.Config, dir: shared.Dir, bin: bin}
	t.Cleanup(func() {
		if t.Failed() {
			s.dump(t)
		}
	})
	s.ctl("image", "load", filepath.Join(bin, "escape.tar"), "--node", "a1,n1")
	s.ctl("create", "namespace", ns)
	for _, name := range []string{"own", "others", "unused"} {
		s.ctl("create", "secret", "generic", name, "-n", ns, "--from-literal=key=secret-of-"+name)
		s.ctl("create", "configmap", name, "-n", ns, "--from-literal=key=of-"+name)
	}
	for agent, secret := range map[string]string{"a1": "own", "a2": "others"} {
		p := pod("on-" + agent)
		p.Spec.NodeName = agent
		p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{
			{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: secret}}},
			{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: secret}}},
		}
		s.create(p)
	}
	for _, name := range []string{"on-a1", "on-a2"} {
		s.ready(name)
	}
	return s
}

// dump prints what one wants to know of a failed run.
func (s *suite) dump(t *testing.T) {
	for _, args := range [][]string{{"get", "nodes,pods", "-A", "-o", "wide"}, {"members"}} {
		out, errs, _ := s.run("", args...)
		t.Logf("$ clusterctl %s\n%s%s", strings.Join(args, " "), out, errs)
	}
	for _, n := range s.Nodes() {
		t.Logf("--- %s:\n%s", n.Name, tail(s.log(n.Name), 30))
	}
}

// log is what clusterd has written on a node.
func (s *suite) log(node string) string {
	r, err := s.Logs(node)
	if err != nil {
		return err.Error()
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func tail(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// run runs clusterctl as the administrator.
func (s *suite) run(stdin string, args ...string) (stdout, stderr string, code int) {
	return s.runFor(waitLimit, stdin, args...)
}

func (s *suite) runFor(limit time.Duration, stdin string, args ...string) (stdout, stderr string, code int) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.t.Context()), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.Bin("clusterctl"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+s.node("n1").Kubeconfig(), "HOME="+s.dir)
	cmd.WaitDelay = 5 * time.Second
	stdout, stderr, code, err := clustertest.Finish(cmd, stdin)
	if err != nil {
		s.t.Fatalf("%s: %v", cmd, err)
	}
	return stdout, stderr, code
}

// ctl runs clusterctl, which must succeed.
func (s *suite) ctl(args ...string) string {
	s.t.Helper()
	out, errs, code := s.run("", args...)
	if code != 0 {
		s.t.Fatalf("clusterctl %s: exit %d: %s%s", strings.Join(args, " "), code, out, errs)
	}
	return out
}

// apply applies manifests.
func (s *suite) apply(manifests string) {
	s.t.Helper()
	if out, errs, code := s.run(manifests, "apply", "-f", "-"); code != 0 {
		s.t.Fatalf("clusterctl apply: exit %d: %s%s", code, out, errs)
	}
}

// eventually waits until check has nothing to complain of.
func (s *suite) eventually(what string, check func(context.Context) error) {
	s.t.Helper()
	if err := s.within(waitLimit, check); err != nil {
		s.t.Fatalf("waited %s for: %s; but: %v", waitLimit, what, err)
	}
}

func (s *suite) within(limit time.Duration, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(s.t.Context(), limit)
	defer cancel()
	return clustertest.Poll(ctx, check)
}

// node is a node of that name, which there is.
func (s *suite) node(name string) cluster.Node {
	return s.Nodes()[slices.IndexFunc(s.Nodes(), func(n cluster.Node) bool { return n.Name == name })]
}

func (s *suite) addr(node string) netip.AddrPort {
	return netip.AddrPortFrom(s.node(node).Addr, 6443)
}

// stolen is a node's identity, as its disk has it.
func (s *suite) stolen(node string) transport.Identity {
	s.t.Helper()
	id, err := clustertest.Stolen(s.node(node))
	if err != nil {
		s.t.Fatal(err)
	}
	return id
}

// trust is the authorities that a node trusts.
func (s *suite) trust(node string) *pki.Trust {
	s.t.Helper()
	trust, err := clustertest.Trust(s.node(node))
	if err != nil {
		s.t.Fatal(err)
	}
	return trust
}

// members is the cluster's list of itself, from a server.
func (s *suite) members(ctx context.Context) (list clusterdv1.MemberList, err error) {
	b, err := s.api.Discovery().RESTClient().Get().AbsPath(clusterdv1.Members).Do(ctx).Raw()
	if err != nil {
		return list, err
	}
	if err := json.Unmarshal(b, &list); err != nil {
		return list, err
	}
	if list.Leader == "" {
		return list, errors.New("there is no leader")
	}
	return list, nil
}

// leads is who leads, and the term.
func (s *suite) leads() (leader string, term uint64) {
	s.t.Helper()
	s.eventually("there is a leader", func(ctx context.Context) error {
		list, err := s.members(ctx)
		leader, term = list.Leader, list.Term
		return err
	})
	return leader, term
}

// pod is a pod of one container "main" that runs the hello program.
func pod(name string, args ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: ns, Labels: map[string]string{"app": name}},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: ptr.To[int64](1),
			Containers:                    []corev1.Container{{Name: "main", Image: image, Args: args}},
		},
	}
}

func (s *suite) create(p *corev1.Pod) *corev1.Pod {
	s.t.Helper()
	out, err := s.api.CoreV1().Pods(p.Namespace).Create(s.t.Context(), p, metav1.CreateOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// podIs waits until a pod is as wanted; is says what is amiss.
func (s *suite) podIs(name, what string, is func(*corev1.Pod) error) *corev1.Pod {
	s.t.Helper()
	var p *corev1.Pod
	s.eventually("pod "+name+" is "+what, func(ctx context.Context) (err error) {
		if p, err = s.api.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{}); err != nil {
			return err
		}
		if err := is(p); err != nil {
			b, _ := json.Marshal(p.Status)
			return fmt.Errorf("%w: %s", err, b)
		}
		return nil
	})
	return p
}

// ready waits until a pod of ns is Ready.
func (s *suite) ready(name string) *corev1.Pod {
	s.t.Helper()
	return s.podIs(name, "Ready", func(p *corev1.Pod) error {
		if !slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		}) {
			return errors.New("it is not")
		}
		return nil
	})
}

// ended waits until the containers of a pod that runs once have ended.
func (s *suite) ended(name string) *corev1.Pod {
	s.t.Helper()
	defer func() {
		if s.t.Failed() {
			s.t.Logf("--- %s:\n%s", name, s.logs(name))
		}
	}()
	return s.podIs(name, "ended", func(p *corev1.Pod) error {
		if p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
			return errors.New("it is not")
		}
		return nil
	})
}

// logs are what a pod's container has written.
func (s *suite) logs(name string) string {
	s.t.Helper()
	b, err := s.api.CoreV1().Pods(ns).GetLogs(name, &corev1.PodLogOptions{}).DoRaw(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	return string(b)
}

// remove deletes pods of ns and waits until they are gone.
func (s *suite) remove(names ...string) {
	s.t.Helper()
	s.ctl(append([]string{"delete", "pod", "-n", ns, "--ignore-not-found", "--timeout=" + waitLimit.String()}, names...)...)
}

// healthy shows that a node is as before: Ready, and new pods start on it.
func (s *suite) healthy(node, name string) error {
	p := pod(name, "exit", "0")
	p.Spec.NodeName, p.Spec.RestartPolicy = node, corev1.RestartPolicyNever
	if _, err := s.api.CoreV1().Pods(ns).Create(s.t.Context(), p, metav1.CreateOptions{}); err != nil {
		return err
	}
	err := s.within(waitLimit, func(ctx context.Context) error {
		got, err := s.api.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if got.Status.Phase != corev1.PodSucceeded {
			return fmt.Errorf("the pod %s on %s is %s", name, node, got.Status.Phase)
		}
		n, err := s.api.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		}) {
			return fmt.Errorf("%s is not Ready", node)
		}
		return nil
	})
	s.remove(name)
	return err
}

// refusedByEvent waits for an event of a namespace that tells of a refusal, and looks
// whether a pod came all the same.
func (s *suite) refusedByEvent(namespace, words string) verdict {
	var said string
	if err := s.within(waitLimit, func(ctx context.Context) error {
		events, err := s.api.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range events.Items {
			if strings.Contains(e.Message, words) {
				said = e.Message
				return nil
			}
		}
		return fmt.Errorf("no event tells of %q", words)
	}); err != nil {
		return open("%v", err)
	}
	return shut("%s", said)
}

// pod is a pod of ns.
func (s *suite) pod(name string) (*corev1.Pod, error) {
	return s.api.CoreV1().Pods(ns).Get(s.t.Context(), name, metav1.GetOptions{})
}

func (s *suite) tryCreate(p *corev1.Pod) error {
	_, err := s.api.CoreV1().Pods(ns).Create(s.t.Context(), p, metav1.CreateOptions{})
	return err
}

// refusals are why a container waits that will not start as it is.
var refusals = []string{"CreateContainerError", "CreateContainerConfigError", "RunContainerError", "StartError", "ImageInspectError", "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "CrashLoopBackOff"}

// settled waits until a pod has ended or cannot start, and judges what it shows:
// nothing of the node may be in its log, and nothing of it on the node. is says what
// else would be wrong.
func (s *suite) settled(name string, is func(log string) error) verdict {
	said := ""
	if err := s.within(waitLimit, func(context.Context) error {
		p, err := s.pod(name)
		if err != nil {
			return err
		}
		said = p.Status.Message
		for _, c := range append(p.Status.InitContainerStatuses, p.Status.ContainerStatuses...) {
			if w := c.State.Waiting; w != nil && slices.Contains(refusals, w.Reason) {
				said = w.Reason + ": " + w.Message
				return nil
			}
			if c.State.Terminated != nil && c.State.Terminated.Reason == "StartError" {
				said = c.State.Terminated.Message
				return nil
			}
		}
		if len(p.Status.ContainerStatuses) > 0 {
			c := p.Status.ContainerStatuses[0]
			if c.State.Terminated == nil {
				return fmt.Errorf("%+v", p.Status)
			}
			b, err := s.api.CoreV1().Pods(ns).GetLogs(name, &corev1.PodLogOptions{}).DoRaw(s.t.Context())
			if err != nil {
				return err
			}
			said = string(b)
			said += c.State.Terminated.Message
			return nil
		}
		if p.Status.Phase != corev1.PodFailed {
			return fmt.Errorf("%+v", p.Status)
		}
		return nil
	}); err != nil {
		return broken(fmt.Errorf("it neither starts nor is refused: %w", err))
	}
	if strings.Contains(said, "canary of the node") {
		return open("the pod shows a file of the node: %s", said)
	}
	if err := s.untouched(); err != nil {
		return open("%v", err)
	}
	if is != nil {
		if err := is(said); err != nil {
			return open("%v", err)
		}
	}
	return shut("%s", strings.Join(strings.Fields(said), " "))
}
