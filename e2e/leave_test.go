package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/shutdown/logindtest"
	"github.com/clusterd/clusterd/e2e/cluster"
)

// underLogind starts a node again as a service of a machine whose logind that is.
func (e *env) underLogind(node string) *logindtest.Logind {
	e.t.Helper()
	s := logindtest.New(e.t)
	// It waits for the locks that are held; those of a node end with it.
	e.t.Cleanup(func() { _ = e.Stop(context.WithoutCancel(e.t.Context()), node) })
	s.SetDelay(time.Hour) // enough: no drop-in is written to this machine
	notify := filepath.Join(e.t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notify, Net: "unixgram"})
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { l.Close() })
	e.t.Setenv("NOTIFY_SOCKET", notify)
	e.t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", s.Address())
	if err := errors.Join(e.Stop(e.t.Context(), node), e.Start(e.t.Context(), node)); err != nil {
		e.t.Fatal(err)
	}
	e.held(s, node, 1)
	return s
}

// held waits until so many locks of a machine's are held.
func (e *env) held(s *logindtest.Logind, node string, n int) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("%s holds %d locks", node, n), func(context.Context) error {
		if _, held := s.Locks(); held != n {
			return fmt.Errorf("%d are held", held)
		}
		return nil
	})
}

// logHas reports whether a node's log has the words.
func (e *env) logHas(node, words string) error {
	r, err := e.Logs(node)
	if err != nil {
		return err
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err == nil && !strings.Contains(string(b), words) {
		err = fmt.Errorf("the log of %s lacks %q", node, words)
	}
	return err
}

// hasLeft waits until a node is no member and has no Node object.
func (e *env) hasLeft(node string) {
	e.t.Helper()
	e.eventually(node+" has left", func(ctx context.Context) error {
		list, err := e.members()
		if err != nil {
			return err
		}
		if slices.ContainsFunc(list.Members, func(m member) bool { return m.Name == node }) {
			return fmt.Errorf("members %+v", list.Members)
		}
		if _, err := e.api.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("its Node: %v", err)
		}
		return nil
	})
}

// TestE2ELeaveOnShutdown: with --leave-on-shutdown, a machine that is shut down evicts its
// pods by the API and leaves the cluster, an agent and the server that leads; one that is
// rebooted, one whose logind does not report the type, and the last voter stay.
func TestE2ELeaveOnShutdown(t *testing.T) {
	e := startBare(t, 3, func(c *cluster.Config) {
		c.Agents = 1
		c.Args = append(c.Args, "--leave-on-shutdown", "--shutdown-grace-period", "2m", "--shutdown-grace-period-critical-pods", "10s")
	})
	e.ready(4)
	ns := e.namespace("leaving")
	d := deployment("web", 3)
	d.Spec.Template.Spec.Containers[0].ReadinessProbe = &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/", Port: intstr.FromInt32(8080)}}, PeriodSeconds: 1,
	}
	e.createDeployment(ns, d)
	if _, err := e.api.PolicyV1().PodDisruptionBudgets(ns).Create(t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: ptr.To(intstr.FromInt32(2)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	whole := func() {
		t.Helper()
		e.eventually("three are available", func(ctx context.Context) error {
			d, err := e.api.AppsV1().Deployments(ns).Get(ctx, "web", metav1.GetOptions{})
			if err == nil && d.Status.AvailableReplicas != 3 {
				err = fmt.Errorf("%d are", d.Status.AvailableReplicas)
			}
			return err
		})
	}
	whole()
	// on moves all pods to that node: the others are closed for new ones meanwhile.
	on := func(node string) {
		t.Helper()
		for _, n := range e.Nodes() {
			if n.Name != node {
				_, _, _ = e.run("clusterctl", "", "cordon", n.Name) // those that have left are not there
			}
		}
		e.ctl("delete", "pods", "-n", ns, "-l", "app=web")
		whole()
		for _, n := range e.Nodes() {
			if n.Name != node {
				_, _, _ = e.run("clusterctl", "", "uncordon", n.Name)
			}
		}
		e.eventually("three are on "+node, func(ctx context.Context) error {
			list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
			if err == nil && len(list.Items) < 3 {
				err = fmt.Errorf("%d are", len(list.Items))
			}
			return err
		})
	}
	// lowest watches how few pods are available until stop is called.
	lowest := func() (stop func() int32) {
		ctx, cancel := context.WithCancel(t.Context())
		var least atomic.Int32
		least.Store(3)
		done := make(chan struct{})
		go func() {
			defer close(done)
			for ctx.Err() == nil {
				if d, err := e.api.AppsV1().Deployments(ns).Get(ctx, "web", metav1.GetOptions{}); err == nil {
					least.Store(min(least.Load(), d.Status.AvailableReplicas))
				}
				select {
				case <-ctx.Done():
				case <-time.After(50 * time.Millisecond):
				}
			}
		}()
		return func() int32 { cancel(); <-done; return least.Load() }
	}

	// An agent: a reboot, then a shutdown of unknown type.
	s := e.underLogind("a1")
	e.ready(4)
	s.PrepareAs(true, "reboot")
	e.held(s, "a1", 0)
	s.PrepareAs(false, "reboot")
	e.held(s, "a1", 1)
	s.Prepare(true)
	e.held(s, "a1", 0)
	e.must(e.logHas("a1", "does not report whether it is shut down or rebooted"))
	s.Prepare(false)
	e.held(s, "a1", 1)
	e.ready(4)
	if list, err := e.members(); err != nil || len(list.Members) != 4 {
		t.Fatalf("members %+v, %v", list.Members, err)
	}
	on("a1")
	least := lowest()
	s.PrepareAs(true, "poweroff")
	e.held(s, "a1", 0)
	e.hasLeft("a1")
	e.eventually("a1 logs that it has left", func(context.Context) error { return e.logHas("a1", "this node has left the cluster") })
	whole()
	if n := least(); n < 2 {
		t.Errorf("%d pods were available, and the budget is 2", n)
	}

	// The server that leads.
	logind := map[string]*logindtest.Logind{}
	for _, n := range []string{"n1", "n2", "n3"} {
		e.use(e.other(n, "a1"))
		logind[n] = e.underLogind(n)
		e.use(n)
		e.ready(3)
	}
	leader := e.leader()
	rest := slices.DeleteFunc([]string{"n1", "n2", "n3"}, func(n string) bool { return n == leader })
	e.use(rest[0])
	s = logind[leader]
	on(leader)
	least = lowest()
	s.PrepareAs(true, "poweroff")
	e.held(s, leader, 0)
	e.hasLeft(leader)
	whole()
	if n := least(); n < 2 {
		t.Errorf("%d pods were available, and the budget is 2", n)
	}

	// The last voter.
	last := e.leader()
	e.use(last)
	rest = slices.DeleteFunc(rest, func(n string) bool { return n == last })
	e.ctl("members", "rm", rest[0], "--yes")
	e.hasLeft(rest[0])
	s = logind[last]
	e.eventually(last+" leads", func(context.Context) error {
		list, err := e.members()
		if err == nil && (len(list.Members) != 1 || !list.Members[0].Leader) {
			err = fmt.Errorf("%+v", list.Members)
		}
		return err
	})
	s.PrepareAs(true, "poweroff")
	e.held(s, last, 0)
	e.must(e.logHas(last, "alone holds the cluster's state"))
	s.PrepareAs(false, "poweroff")
	e.held(s, last, 1)
	e.ready(1)
	if n, err := e.api.CoreV1().Nodes().Get(t.Context(), last, metav1.GetOptions{}); err != nil || n.Spec.Unschedulable {
		t.Errorf("%s is closed for pods: %v", last, err)
	}
}
