package schedtest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/sched"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// These tests run all loops against the real API server on a store in memory.
// Only the agents are played.

const ns = "shop"

type line struct {
	t      *testing.T
	server *servertest.Server
	client kubernetes.Interface

	suspects chan string
	mu       sync.Mutex
	dead     map[string]bool
}

func (l *line) Suspects() <-chan string { return l.suspects }

func (l *line) Confirm(_ context.Context, node string) error {
	if l.isDead(node) {
		return errors.New("no answer")
	}
	return nil
}

func (l *line) isDead(node string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dead[node]
}

// newLine starts a server, three nodes and a leader.
func newLine(t *testing.T) *line {
	t.Helper()
	return newLineWith(t, nil)
}

// newLineWith is newLine with a change of the server's config.
func newLineWith(t *testing.T, change func(*server.Config)) *line {
	t.Helper()
	s := servertest.Start(t, change)
	l := &line{t: t, server: s, client: s.Client, suspects: make(chan string), dead: map[string]bool{}}
	md, err := metadata.NewForConfig(s.LoopbackConfig())
	if err != nil {
		t.Fatal(err)
	}
	custom, err := dynamic.NewForConfig(s.LoopbackConfig())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		node := schedtest.Node(fmt.Sprintf("n%d", i+1)).Obj()
		node.UID = ""
		status := node.Status
		status.Capacity = status.Allocatable
		stored, err := l.client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		stored.Status = status
		if _, err := l.client.CoreV1().Nodes().UpdateStatus(t.Context(), stored, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		err := sched.Run(ctx, sched.Config{Client: l.client, Metadata: md, Dynamic: custom, RootCA: []byte("PEM"), Liveness: l})
		if err != nil {
			t.Errorf("loops ended with %v", err)
		}
	})
	wg.Go(func() { schedtest.RunNodes(ctx, t, l.client, l.isDead) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	// Pods need the account that the leader makes.
	schedtest.Eventually(t, func() string {
		if _, err := l.client.CoreV1().ServiceAccounts(ns).Get(t.Context(), "default", metav1.GetOptions{}); err != nil {
			return err.Error()
		}
		return ""
	})
	return l
}

func (l *line) deploy(name string, n int32) {
	l.t.Helper()
	d := schedtest.Deployment(name, n)
	d.Namespace, d.UID = ns, ""
	if _, err := l.client.AppsV1().Deployments(ns).Create(l.t.Context(), d, metav1.CreateOptions{}); err != nil {
		l.t.Fatal(err)
	}
}

// running waits until exactly n pods with the image are ready and the
// Deployment says so.
func (l *line) running(name string, n int, image string) {
	l.t.Helper()
	schedtest.Eventually(l.t, func() string {
		list, err := l.client.CoreV1().Pods(ns).List(l.t.Context(), metav1.ListOptions{LabelSelector: "app=" + name})
		if err != nil {
			return err.Error()
		}
		live, ready := 0, 0
		for i := range list.Items {
			pod := &list.Items[i]
			if pod.DeletionTimestamp != nil {
				continue
			}
			live++
			if pods.Ready(pod) && pod.Spec.Containers[0].Image == image {
				ready++
			}
		}
		d, err := l.client.AppsV1().Deployments(ns).Get(l.t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if s := d.Status; live != n || ready != n || int(s.AvailableReplicas) != n || int(s.UpdatedReplicas) != n || int(s.Replicas) != n || s.ObservedGeneration != d.Generation {
			return fmt.Sprintf("%d pods, %d ready with %s, want %d; status %+v", live, ready, image, n, s)
		}
		return ""
	})
}

func (l *line) kubectl(args ...string) string {
	l.t.Helper()
	path, err := exec.LookPath("kubectl")
	if err != nil {
		l.t.Skip("no kubectl in PATH: install one to run this test")
	}
	config := l.server.Listen(l.t)
	dir := l.t.TempDir()
	file := filepath.Join(dir, "config")
	err = clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: config.Host, CertificateAuthorityData: config.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": {ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}},
		Contexts:       map[string]*clientcmdapi.Context{"x": {Cluster: "c", AuthInfo: "u", Namespace: ns}},
		CurrentContext: "x",
	}, file)
	if err != nil {
		l.t.Fatal(err)
	}
	cmd := exec.CommandContext(l.t.Context(), path, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+file, "HOME="+dir, "NO_PROXY=127.0.0.1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		l.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// What kubectl rollout shows and does.
func TestLineRollout(t *testing.T) {
	l := newLine(t)
	l.deploy("web", 3)
	l.running("web", 3, "v1")
	if out := l.kubectl("rollout", "status", "deployment/web", "--timeout=60s"); !strings.Contains(out, "successfully rolled out") {
		t.Errorf("rollout status says %s", out)
	}
	l.kubectl("set", "image", "deployment/web", "c=v2")
	l.running("web", 3, "v2")
	l.kubectl("rollout", "undo", "deployment/web")
	l.running("web", 3, "v1")
	if out := l.kubectl("rollout", "history", "deployment/web"); !strings.Contains(out, "\n2 ") || !strings.Contains(out, "\n3 ") || strings.Contains(out, "\n1 ") {
		t.Errorf("history is\n%s", out)
	}
	l.kubectl("scale", "deployment/web", "--replicas=5")
	l.running("web", 5, "v1")
	for _, want := range []string{"ScalingReplicaSet", "NewReplicaSetAvailable", "MinimumReplicasAvailable"} {
		schedtest.Eventually(t, func() string {
			if out := l.kubectl("describe", "deployment", "web"); !strings.Contains(out, want) {
				return "describe does not tell of " + want + ":\n" + out
			}
			return ""
		})
	}
}

// Deleting with each propagation policy.
func TestLineCascade(t *testing.T) {
	l := newLine(t)
	for _, name := range []string{"back", "fore", "loose"} {
		l.deploy(name, 2)
	}
	for _, name := range []string{"back", "fore", "loose"} {
		l.running(name, 2, "v1")
	}
	remove := func(name string, policy metav1.DeletionPropagation) {
		t.Helper()
		if err := l.client.AppsV1().Deployments(ns).Delete(t.Context(), name, metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
			t.Fatal(err)
		}
	}
	count := func(name string) (deployments, sets, running int) {
		t.Helper()
		selector := metav1.ListOptions{LabelSelector: "app=" + name}
		if _, err := l.client.AppsV1().Deployments(ns).Get(t.Context(), name, metav1.GetOptions{}); err == nil {
			deployments = 1
		} else if !apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
		rs, err := l.client.AppsV1().ReplicaSets(ns).List(t.Context(), selector)
		if err != nil {
			t.Fatal(err)
		}
		list, err := l.client.CoreV1().Pods(ns).List(t.Context(), selector)
		if err != nil {
			t.Fatal(err)
		}
		return deployments, len(rs.Items), len(list.Items)
	}
	eventually := func(name string, want string) {
		t.Helper()
		schedtest.Eventually(t, func() string {
			d, s, p := count(name)
			if got := fmt.Sprint(d, s, p); got != want {
				return fmt.Sprintf("%s: deployments, replica sets, pods: %s, want %s", name, got, want)
			}
			return ""
		})
	}
	remove("back", metav1.DeletePropagationBackground)
	remove("fore", metav1.DeletePropagationForeground)
	remove("loose", metav1.DeletePropagationOrphan)
	eventually("back", "0 0 0")
	eventually("fore", "0 0 0")
	eventually("loose", "0 1 2")
	list, err := l.client.AppsV1().ReplicaSets(ns).List(t.Context(), metav1.ListOptions{LabelSelector: "app=loose"})
	if err != nil || len(list.Items) != 1 || len(list.Items[0].OwnerReferences) != 0 {
		t.Fatalf("the orphan has owners: %v, %v", list, err)
	}
	// The same Deployment again adopts what was left.
	uid := list.Items[0].UID
	l.deploy("loose", 2)
	l.running("loose", 2, "v1")
	rs, err := l.client.AppsV1().ReplicaSets(ns).Get(t.Context(), list.Items[0].Name, metav1.GetOptions{})
	if err != nil || rs.UID != uid || metav1.GetControllerOf(rs) == nil {
		t.Errorf("not adopted: %v, %v", rs, err)
	}
}

// A namespace goes with all that is in it.
func TestLineNamespace(t *testing.T) {
	l := newLine(t)
	l.deploy("web", 2)
	l.running("web", 2, "v1")
	if err := l.client.CoreV1().Namespaces().Delete(t.Context(), ns, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string {
		n, err := l.client.CoreV1().Namespaces().Get(t.Context(), ns, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return ""
		}
		return fmt.Sprintf("still there: %v %v", n.Status, err)
	})
}

// A dead node's pods run elsewhere; a bare pod does not; when the Node is
// deleted its pods go.
func TestLineNodeDies(t *testing.T) {
	l := newLine(t)
	d := schedtest.Deployment("web", 6)
	d.Namespace, d.UID = ns, ""
	d.Spec.Template.Spec.Tolerations = []corev1.Toleration{{
		Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: ptr.To[int64](0),
	}}
	if _, err := l.client.AppsV1().Deployments(ns).Create(t.Context(), d, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	l.running("web", 6, "v1")
	l.mu.Lock()
	l.dead["n2"] = true
	l.mu.Unlock()
	begin := time.Now()
	l.suspects <- "n2"
	// on returns how many pods stand for the dead node, and how many of them
	// nobody has deleted.
	on := func() (all, kept int) {
		list, err := l.client.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=n2"})
		if err != nil {
			t.Fatal(err)
		}
		for _, pod := range list.Items {
			if pod.DeletionTimestamp == nil {
				kept++
			}
		}
		return len(list.Items), kept
	}
	schedtest.Eventually(t, func() string {
		if _, kept := on(); kept != 0 {
			return fmt.Sprintf("%d pods were not evicted", kept)
		}
		return ""
	})
	l.running("web", 6, "v1")
	t.Logf("all replicas ready again %v after the suspicion", time.Since(begin).Round(time.Millisecond))
	if n, _ := on(); n != 2 {
		t.Errorf("%d pods still stand for the dead node, want 2: nobody knows whether they have ended", n)
	}
	if err := l.client.CoreV1().Nodes().Delete(t.Context(), "n2", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string {
		if n, _ := on(); n != 0 {
			return fmt.Sprintf("%d pods of a node that is no more", n)
		}
		return ""
	})
}

// A Service leads to the ready pods; a budget counts them.
func TestLineServiceAndBudget(t *testing.T) {
	l := newLine(t)
	l.deploy("web", 3)
	selector := map[string]string{"app": "web"}
	_, err := l.client.CoreV1().Services(ns).Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec:       corev1.ServiceSpec{Selector: selector, ClusterIP: corev1.ClusterIPNone, Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = l.client.PolicyV1().PodDisruptionBudgets(ns).Create(t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec:       policyv1.PodDisruptionBudgetSpec{MaxUnavailable: ptr.To(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: selector}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	endpoints := func(want int) {
		t.Helper()
		schedtest.Eventually(t, func() string {
			list, err := l.client.DiscoveryV1().EndpointSlices(ns).List(t.Context(), metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=web"})
			if err != nil {
				return err.Error()
			}
			ready := 0
			for _, s := range list.Items {
				for _, e := range s.Endpoints {
					if *e.Conditions.Ready {
						ready++
					}
				}
			}
			if ready != want || len(list.Items) != 1 {
				return fmt.Sprintf("%d ready endpoints in %d slices, want %d in 1", ready, len(list.Items), want)
			}
			return ""
		})
	}
	endpoints(3)
	schedtest.Eventually(t, func() string {
		pdb, err := l.client.PolicyV1().PodDisruptionBudgets(ns).Get(t.Context(), "web", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if s := pdb.Status; s.DisruptionsAllowed != 1 || s.CurrentHealthy != 3 || s.ExpectedPods != 3 {
			return fmt.Sprintf("budget %+v", s)
		}
		return ""
	})
	l.kubectl("scale", "deployment/web", "--replicas=1")
	endpoints(1)
	l.kubectl("scale", "deployment/web", "--replicas=0")
	endpoints(0)
}

// Many pods at once; prints how fast.
func TestLineBurst(t *testing.T) {
	const n = 200
	l := newLine(t)
	begin := time.Now()
	l.deploy("web", n)
	schedtest.Eventually(t, func() string {
		d, err := l.client.AppsV1().Deployments(ns).Get(t.Context(), "web", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if d.Status.AvailableReplicas != n {
			return fmt.Sprintf("%d available", d.Status.AvailableReplicas)
		}
		return ""
	})
	t.Logf("%d pods created, scheduled, bound and reported ready in %v", n, time.Since(begin).Round(time.Millisecond))
	sets, err := l.client.AppsV1().ReplicaSets(ns).List(t.Context(), metav1.ListOptions{})
	if err != nil || len(sets.Items) != 1 {
		t.Errorf("%d replica sets, %v", len(sets.Items), err)
	}
}
