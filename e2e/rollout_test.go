package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/features"
)

// TestE2ERolloutLeaderKilled kills the leader's clusterd in the middle of a
// rollout of 30 replicas: another leads on, and in the end there are 30 new
// pods, no old one, and never two of one name.
func TestE2ERolloutLeaderKilled(t *testing.T) {
	features.Shows(t, 107, 130)
	const replicas = 30
	e := start(t)
	ns := e.namespace("rollout")
	e.createDeployment(ns, deployment("web", replicas))
	rolledOut := func(what string) { // thirty pods at a time take a busy machine long
		t.Helper()
		e.within(3*testTimeout, what, func(ctx context.Context) error {
			d, err := e.api.AppsV1().Deployments(ns).Get(ctx, "web", metav1.GetOptions{})
			if err != nil {
				return err
			}
			s := d.Status
			if s.ObservedGeneration < d.Generation || s.UpdatedReplicas != replicas || s.AvailableReplicas != replicas || s.Replicas != replicas {
				return fmt.Errorf("status %+v", s)
			}
			return nil
		})
	}
	rolledOut("the first pods run")
	first := e.podsReady(ns, "app=web", replicas)
	old := map[string]bool{}
	for _, p := range first {
		old[string(p.UID)] = true
	}

	leader := e.oneScheduler(ns)
	survivor := e.other(leader)
	e.use(survivor)
	e.ctl("-n", ns, "set", "env", "deployment/web", "MESSAGE=second")
	e.eventually("the rollout is on its way", func(ctx context.Context) error {
		fresh, err := e.freshPods(ctx, ns, old)
		if err == nil && fresh == 0 {
			err = fmt.Errorf("no new pod yet")
		}
		return err
	})
	killed := time.Now()
	if err := e.Kill(leader); err != nil {
		t.Fatal(err)
	}
	e.eventually("writes pass again", func(ctx context.Context) error {
		_, err := e.api.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "probe-"}}, metav1.CreateOptions{})
		return err
	})
	t.Logf("the leader %s was killed; a write passed after %s", leader, time.Since(killed).Round(time.Millisecond))
	if now := e.oneScheduler(ns); now == leader {
		t.Errorf("%s still counts as the leader", now)
	}
	// Its pods are still to be replaced: bring it back, as systemd would.
	if err := e.Start(t.Context(), leader); err != nil {
		t.Fatal(err)
	}
	rolledOut("the rollout is done")
	t.Logf("the rollout was done %s after the kill", time.Since(killed).Round(time.Millisecond))
	pods := e.podsReady(ns, "app=web", replicas)
	sets, err := e.api.AppsV1().ReplicaSets(ns).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(sets.Items) != 2 {
		t.Errorf("%d ReplicaSets, want the old and the new one", len(sets.Items))
	}
	ips := map[string]string{}
	for _, p := range pods {
		if old[string(p.UID)] {
			t.Errorf("%s is an old pod", p.Name)
		}
		if other := ips[p.Status.PodIP]; other != "" {
			t.Errorf("%s and %s both have %s", p.Name, other, p.Status.PodIP)
		}
		ips[p.Status.PodIP] = p.Name
	}
}

// oneScheduler waits until a pod was placed by the leader's scheduler while no other
// server that runs tried to place any, and returns who leads. A leader may change
// meanwhile: then another pod shows it.
func (e *env) oneScheduler(ns string) (leader string) {
	e.t.Helper()
	attempts := func(ctx context.Context) (map[string]string, error) {
		all := map[string]string{}
		for _, n := range e.Nodes() {
			if _, err := e.Pid(n.Name); err != nil {
				continue
			}
			api, _, err := e.Client(n.Name)
			if err != nil {
				return nil, err
			}
			text, err := api.Discovery().RESTClient().Get().AbsPath("/metrics").Do(ctx).Raw()
			if err != nil {
				return nil, err
			}
			for line := range strings.Lines(string(text)) {
				if strings.HasPrefix(line, "clusterd_sched_schedule_attempts_total{") {
					all[n.Name] += line
				}
			}
		}
		return all, nil
	}
	e.eventually("the leader's scheduler alone places pods", func(context.Context) error {
		ctx := e.t.Context() // each wait in here has its own timeout
		leader = e.leader()
		before, err := attempts(ctx)
		if err != nil {
			return err
		}
		p := pod("", "sleep")
		p.GenerateName, p.Labels = "placed-", nil
		if p, err = e.api.CoreV1().Pods(ns).Create(ctx, p, metav1.CreateOptions{}); err != nil {
			return err
		}
		e.podIs(ns, p.Name, "placed", func(p *corev1.Pod) error {
			if p.Spec.NodeName == "" {
				return errors.New("it is not")
			}
			return nil
		})
		// A binding is counted when it has been answered, which the pod may show before.
		var after map[string]string
		e.eventually("it was counted", func(ctx context.Context) (err error) {
			if after, err = attempts(ctx); err == nil && maps.Equal(after, before) {
				err = errors.New("by none of them")
			}
			return err
		})
		for _, n := range e.Nodes() {
			if works := after[n.Name] != before[n.Name]; works != (n.Name == leader) {
				return fmt.Errorf("%s leads; the scheduler of %s works: %v", leader, n.Name, works)
			}
		}
		return e.api.CoreV1().Pods(ns).Delete(ctx, p.Name, metav1.DeleteOptions{})
	})
	return leader
}

// freshPods counts the pods that are not among the old ones.
func (e *env) freshPods(ctx context.Context, ns string, old map[string]bool) (int, error) {
	list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, err
	}
	n := 0
	for _, p := range list.Items {
		if !old[string(p.UID)] {
			n++
		}
	}
	return n, nil
}
