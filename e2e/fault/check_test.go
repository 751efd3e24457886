package fault

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/raftstore"
)

// check looks at a healed cluster, whose load has ended.
func (r *run) check(ctx context.Context) {
	r.eventually(ctx, "every node is Ready", r.nodesReady)
	for i := range r.apis {
		r.eventually(ctx, fmt.Sprintf("n%d has every acknowledged write", i+1), func(ctx context.Context) error { return r.writesThere(ctx, i) })
	}
	r.eventually(ctx, "the members agree", r.sameHash)
	for _, w := range r.watchers {
		r.eventually(ctx, fmt.Sprintf("the watcher of n%d received every acknowledged write", w.node+1), func(context.Context) error {
			missed := w.missed(r.acks.all)
			if len(missed) == 0 {
				return nil
			}
			return fmt.Errorf("it missed %d, such as %+v; it is at %d with gaps %v", len(missed), missed[0], w.at(), w.gaps)
		})
	}
	r.eventually(ctx, "the watchers received the same", func(context.Context) error { return r.sameEvents() })
	r.eventually(ctx, "the Deployment is taken back to its size", func(ctx context.Context) error {
		return r.patchDeployment(ctx, r.api(0), fmt.Sprintf(`{"spec":{"replicas":%d}}`, replicas))
	})
	r.eventually(ctx, "exactly the Deployment's pods run", r.podsRun)
}

func (r *run) nodesReady(ctx context.Context) error {
	list, err := r.api(0).CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, n := range list.Items {
		if !slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		}) {
			return fmt.Errorf("%s is not: %+v", n.Name, n.Status.Conditions)
		}
	}
	if len(list.Items) != len(r.apis) {
		return fmt.Errorf("there are %d nodes", len(list.Items))
	}
	return nil
}

// writesThere fails the test when a write is lost, and returns an error when
// the node cannot say.
func (r *run) writesThere(ctx context.Context, node int) error {
	for key, acks := range r.acks.all {
		if len(acks) == 0 {
			continue
		}
		cm, err := r.api(node).CoreV1().ConfigMaps(namespace).Get(ctx, key, metav1.GetOptions{})
		if err != nil {
			return err
		}
		last := acks[len(acks)-1]
		if n, revision, err := counted(cm); err != nil || n < last.n || revision < last.revision {
			r.t.Errorf("LOST: n%d has %s = %d at revision %d, but %d was acknowledged at %d (%v)", node+1, key, n, revision, last.n, last.revision, err)
		}
	}
	return nil
}

func (r *run) status(ctx context.Context, node int) (raftstore.Status, error) {
	var s raftstore.Status
	b, err := r.api(node).Discovery().RESTClient().Get().AbsPath("/clusterd/v1/store").Do(ctx).Raw()
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(b, &s)
}

// sameHash compares the members' keyspaces at one index. Heartbeats move it,
// so several looks may be needed to find all three at the same one.
func (r *run) sameHash(ctx context.Context) error {
	first, err := r.status(ctx, 0)
	if err != nil {
		return err
	}
	for i := range r.apis {
		s, err := r.status(ctx, i)
		if err != nil {
			return err
		}
		a, b := first.Keyspace, s.Keyspace
		if a.Index != b.Index {
			return fmt.Errorf("n1 is at index %d, n%d at %d", a.Index, i+1, b.Index)
		}
		if a != b {
			r.t.Errorf("DIVERGED at index %d: n1 has %+v, n%d has %+v", a.Index, a, i+1, b)
		}
	}
	return nil
}

// sameEvents compares what the watchers received where none had a gap. It fails the
// test when two received different events of one revision, and returns an error when one
// has not received what another has: of a write whose answer was lost no one has waited
// for the event.
func (r *run) sameEvents() error {
	received := map[int64]seen{}
	for _, w := range r.watchers {
		for _, s := range w.all() {
			if other, ok := received[s.revision]; ok && other != s {
				r.t.Errorf("revision %d was received as %+v and, by n%d, as %+v", s.revision, other, w.node+1, s)
			}
			received[s.revision] = s
		}
	}
	for _, w := range r.watchers {
		mine := map[int64]bool{}
		for _, s := range w.all() {
			mine[s.revision] = true
		}
		for revision, s := range received {
			if !mine[revision] && !w.skipped(revision) {
				return fmt.Errorf("the watcher of n%d did not receive %+v", w.node+1, s)
			}
		}
	}
	return nil
}

// podsRun wants the Deployment's pods Ready, no other there, and on each node
// exactly the processes of those pods.
func (r *run) podsRun(ctx context.Context) error {
	pods, err := r.api(0).CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	on := map[string]int{}
	for _, p := range pods.Items {
		ready := slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		})
		if !ready || p.Status.Phase != corev1.PodRunning || p.DeletionTimestamp != nil {
			return fmt.Errorf("%s on %s is %s, ready %t, deleted %v", p.Name, p.Spec.NodeName, p.Status.Phase, ready, p.DeletionTimestamp)
		}
		on[p.Spec.NodeName]++
	}
	if len(pods.Items) != replicas {
		return fmt.Errorf("there are %d pods", len(pods.Items))
	}
	for _, n := range r.c.Nodes() {
		for _, comm := range []string{"hello", "pause"} {
			pids, err := r.pids(n.Name, comm)
			if err != nil {
				return err
			}
			if len(pids) != on[n.Name] {
				return fmt.Errorf("%s has %d pods and %d processes %s", n.Name, on[n.Name], len(pids), comm)
			}
		}
	}
	d, err := r.api(0).AppsV1().Deployments(namespace).Get(ctx, "web", metav1.GetOptions{})
	if err != nil {
		return err
	}
	if s := d.Status; s.ObservedGeneration != d.Generation || s.ReadyReplicas != replicas || s.UpdatedReplicas != replicas {
		return fmt.Errorf("the Deployment says %+v", s)
	}
	return nil
}

// recoveryTimeout is how long a healed cluster may take until anything holds again,
// on a busy machine.
const recoveryTimeout = 3 * time.Minute

// eventually waits until check has nothing to complain of, and ends the test
// when that takes too long.
func (r *run) eventually(ctx context.Context, what string, check func(context.Context) error) time.Duration {
	r.t.Helper()
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, recoveryTimeout)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var err error
	for {
		ask, stop := context.WithTimeout(ctx, 5*time.Second)
		now := check(ask)
		stop()
		if now == nil {
			return time.Since(began)
		}
		if ctx.Err() == nil || err == nil || !errors.Is(now, context.DeadlineExceeded) {
			err = now
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			r.t.Fatalf("waited %s until %s; but: %v", recoveryTimeout, what, err)
		}
	}
}
