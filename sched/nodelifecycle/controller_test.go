package nodelifecycle

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/leaktest"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// wire is a fake of gossip and control connections.
type wire struct {
	suspects chan string
	mu       sync.Mutex
	silent   map[string]bool
	asked    int
}

func (w *wire) Suspects() <-chan string { return w.suspects }

func (w *wire) Confirm(_ context.Context, node string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked++
	if w.silent[node] {
		return errors.New("no answer")
	}
	return nil
}

func (w *wire) silence(nodes ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, node := range nodes {
		w.silent[node] = true
	}
}

func (w *wire) questions() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.asked
}

func start(t *testing.T, c *schedtest.Cluster, w *wire) {
	t.Helper()
	startAt(t, c, Config{Liveness: w}, clock.RealClock{}, func(*controller) {})
}

func startAt(t *testing.T, c *schedtest.Cluster, cfg Config, at clock.WithTicker, change func(*controller)) *controller {
	t.Helper()
	env := loop.Env{
		Client:    c.Client,
		Informers: informers.NewSharedInformerFactory(c.Client, 0),
		Events:    loop.NewEvents(c.Client, at),
		Clock:     at,
	}
	l, err := newController(env, cfg)
	if err != nil {
		t.Fatal(err)
	}
	change(l)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	env.Informers.StartWithContext(ctx)
	wg.Go(func() {
		if err := l.run(ctx); err != nil {
			t.Errorf("loop ended with %v", err)
		}
	})
	wg.Go(func() { _ = env.Events.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait(); env.Informers.Shutdown() })
	return l
}

func nodes(n int) (out []runtime.Object) {
	for i := range n {
		out = append(out, schedtest.Node(fmt.Sprintf("n%d", i+1)).Obj())
	}
	return out
}

func readyIs(t *testing.T, c *schedtest.Cluster, name string, want corev1.ConditionStatus, taints int) func() string {
	return func() string {
		node, err := c.Client.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if got := readiness(node); got != want || len(node.Spec.Taints) != taints {
			return fmt.Sprintf("%s is Ready=%s with taints %v, want %s and %d", name, got, node.Spec.Taints, want, taints)
		}
		return ""
	}
}

// A node that gossip suspects and that does not answer is out of service long
// before its lease runs out; its pods are replaced; it comes back when its
// agent posts status again.
func TestSuspectedNode(t *testing.T) {
	patient := schedtest.Pod("patient").On("n1").Ready(time.Now()).
		Tolerate(corev1.Toleration{Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}).Obj()
	c := schedtest.New(t, append(nodes(3), schedtest.Pod("p").On("n1").Ready(time.Now()).Obj(), patient)...)
	w := &wire{suspects: make(chan string), silent: map[string]bool{"n1": true}}
	start(t, c, w)
	w.suspects <- "n1"
	w.suspects <- "stranger"

	schedtest.Eventually(t, readyIs(t, c, "n1", corev1.ConditionUnknown, 2))
	schedtest.Eventually(t, func() string {
		pod, err := c.Client.CoreV1().Pods(schedtest.Namespace).Get(t.Context(), "p", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if pod.DeletionTimestamp == nil || pods.Ready(pod) || pods.Condition(pod, corev1.DisruptionTarget) == nil {
			return fmt.Sprintf("deleted %v, conditions %v", pod.DeletionTimestamp, pod.Status.Conditions)
		}
		return ""
	})
	schedtest.Eventually(t, func() string {
		pod, err := c.Client.CoreV1().Pods(schedtest.Namespace).Get(t.Context(), "patient", metav1.GetOptions{})
		if err != nil || pod.DeletionTimestamp != nil || pods.Ready(pod) {
			return fmt.Sprintf("a pod that tolerates all should stay, not ready: %v, %v", pod, err)
		}
		return ""
	})

	schedtest.Eventually(t, func() string { return post(t, c, "n1") })
	schedtest.Eventually(t, readyIs(t, c, "n1", corev1.ConditionTrue, 0))
}

// post plays the agent that posts its node's status.
func post(t *testing.T, c *schedtest.Cluster, name string) string {
	node, err := c.Client.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		return err.Error()
	}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now()}}
	if _, err := c.Client.CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{}); err != nil {
		return err.Error()
	}
	return ""
}

// A suspicion alone changes nothing.
func TestFalseAccusation(t *testing.T) {
	c := schedtest.New(t, nodes(3)...)
	w := &wire{suspects: make(chan string)}
	start(t, c, w)
	w.suspects <- "n1"
	schedtest.Eventually(t, func() string {
		if n := w.questions(); n < 4 { // each at the start, and the accused once more
			return fmt.Sprintf("asked %d times", n)
		}
		return ""
	})
	if fault := readyIs(t, c, "n1", corev1.ConditionTrue, 0)(); fault != "" {
		t.Error(fault)
	}
}

// If most nodes look dead no pod is evicted; when they come back all is as before.
func TestMassFailureEvictsNoPod(t *testing.T) {
	c := schedtest.New(t, append(nodes(3), schedtest.Pod("p").On("n3").Ready(time.Now()).Obj())...)
	w := &wire{suspects: make(chan string), silent: map[string]bool{"n1": true}}
	start(t, c, w) // asks all, and finds n1
	schedtest.Eventually(t, readyIs(t, c, "n1", corev1.ConditionUnknown, 2))
	w.silence("n2", "n3")
	w.suspects <- "n2"
	schedtest.Eventually(t, readyIs(t, c, "n2", corev1.ConditionUnknown, 1))
	w.suspects <- "n3"
	schedtest.Eventually(t, readyIs(t, c, "n3", corev1.ConditionUnknown, 1))
	pod, err := c.Client.CoreV1().Pods(schedtest.Namespace).Get(t.Context(), "p", metav1.GetOptions{})
	if err != nil || pod.DeletionTimestamp != nil {
		t.Errorf("evicted in a mass failure: %v, %v", pod, err)
	}
}
