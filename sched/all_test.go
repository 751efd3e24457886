package sched

import (
	"context"
	"fmt"
	"sync"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/leaktest"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/schedtest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// leader runs all loops until stop is called, which waits for their end.
func leader(t *testing.T, c *schedtest.Cluster) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, config(c)) }()
	return sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("loops ended with %v", err)
		}
	})
}

// cluster starts a fake cluster with n nodes whose pods become ready.
func cluster(t *testing.T, n int, objects ...runtime.Object) *schedtest.Cluster {
	t.Helper()
	objects = append(objects, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: schedtest.Namespace}})
	for i := range n {
		objects = append(objects, schedtest.Node(fmt.Sprintf("n%d", i+1)).Obj())
	}
	c := schedtest.New(t, objects...)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { c.RunNodes(ctx, t, nil) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return c
}

func listPods(t *testing.T, c *schedtest.Cluster) (live []corev1.Pod) {
	t.Helper()
	list, err := c.Client.CoreV1().Pods(schedtest.Namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, pod := range list.Items {
		if pod.DeletionTimestamp == nil {
			live = append(live, pod)
		}
	}
	return live
}

// settled returns "" when exactly n pods with the image are ready and no other.
func settled(t *testing.T, c *schedtest.Cluster, n int, image string) string {
	live := listPods(t, c)
	ready := 0
	for i := range live {
		if pods.Ready(&live[i]) && live[i].Spec.Containers[0].Image == image {
			ready++
		}
	}
	if len(live) == n && ready == n {
		return ""
	}
	return fmt.Sprintf("%d pods, %d of them ready with image %s, want %d", len(live), ready, image, n)
}

func complete(t *testing.T, c *schedtest.Cluster, name string) string {
	d, err := c.Client.AppsV1().Deployments(schedtest.Namespace).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want := *d.Spec.Replicas
	if s := d.Status; s.ObservedGeneration == d.Generation && s.UpdatedReplicas == want && s.Replicas == want && s.AvailableReplicas == want {
		return ""
	}
	return fmt.Sprintf("status %+v, want %d of all", d.Status, want)
}

func edit(t *testing.T, c *schedtest.Cluster, name string, change func(*appsv1.Deployment)) {
	t.Helper()
	api := c.Client.AppsV1().Deployments(schedtest.Namespace)
	schedtest.Eventually(t, func() string {
		d, err := api.Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		change(d)
		if _, err := api.Update(t.Context(), d, metav1.UpdateOptions{}); err != nil {
			return err.Error()
		}
		return ""
	})
}

func TestDeploymentRunsAndRolls(t *testing.T) {
	c := cluster(t, 3, schedtest.Deployment("web", 3))
	defer leader(t, c)()

	schedtest.Eventually(t, func() string { return settled(t, c, 3, "v1") })
	schedtest.Eventually(t, func() string { return complete(t, c, "web") })
	nodes := map[string]int{}
	for _, pod := range listPods(t, c) {
		nodes[pod.Spec.NodeName]++
	}
	if len(nodes) != 3 {
		t.Errorf("replicas per node %v, want one on each", nodes)
	}

	edit(t, c, "web", func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = "v2" })
	schedtest.Eventually(t, func() string { return settled(t, c, 3, "v2") })
	schedtest.Eventually(t, func() string { return complete(t, c, "web") })
	d, err := c.Client.AppsV1().Deployments(schedtest.Namespace).Get(t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := d.Annotations["deployment.kubernetes.io/revision"]; got != "2" {
		t.Errorf("revision %q, want 2", got)
	}

	edit(t, c, "web", func(d *appsv1.Deployment) { d.Spec.Replicas = ptr.To[int32](1) })
	schedtest.Eventually(t, func() string { return settled(t, c, 1, "v2") })
}

// A new leader finishes what the old one began, and never runs more pods than
// the rollout allows.
func TestLeaderChangeInMidRollout(t *testing.T) {
	const replicas = 30
	c := cluster(t, 3, schedtest.Deployment("web", replicas))
	stop := leader(t, c)
	schedtest.Eventually(t, func() string { return settled(t, c, replicas, "v1") })

	edit(t, c, "web", func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = "v2" })
	for done := 1; done < replicas; done += 9 {
		schedtest.Eventually(t, func() string {
			n := 0
			for _, pod := range listPods(t, c) {
				if pod.Spec.Containers[0].Image == "v2" {
					n++
				}
			}
			if n >= done {
				return ""
			}
			return fmt.Sprintf("%d new pods, want %d", n, done)
		})
		stop()
		if n := len(listPods(t, c)); n > replicas+8 { // maxSurge 25 % of 30, rounded up
			t.Errorf("%d pods at once, want at most %d", n, replicas+8)
		}
		stop = leader(t, c)
	}
	defer stop()
	schedtest.Eventually(t, func() string { return settled(t, c, replicas, "v2") })
	schedtest.Eventually(t, func() string { return complete(t, c, "web") })
	sets, err := c.Client.AppsV1().ReplicaSets(schedtest.Namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(sets.Items) != 2 {
		t.Errorf("%d replica sets, want 2", len(sets.Items))
	}
}

// Every namespace and every node gets what the cluster owes it.
func TestCareOfNamespacesAndNodes(t *testing.T) {
	c := cluster(t, 3)
	defer leader(t, c)()
	schedtest.Eventually(t, func() string {
		ca, err := c.Client.CoreV1().ConfigMaps(schedtest.Namespace).Get(t.Context(), "kube-root-ca.crt", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if _, err := c.Client.CoreV1().ServiceAccounts(schedtest.Namespace).Get(t.Context(), "default", metav1.GetOptions{}); err != nil {
			return err.Error()
		}
		if ca.Data["ca.crt"] != "PEM" {
			return fmt.Sprintf("data %v", ca.Data)
		}
		return ""
	})
	schedtest.Eventually(t, func() string {
		nodes, err := c.Client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err.Error()
		}
		given := map[string]bool{}
		for _, node := range nodes.Items {
			if node.Spec.PodCIDR != "" {
				given[node.Spec.PodCIDR] = true
			}
		}
		if len(given) == 3 {
			return ""
		}
		return fmt.Sprintf("pod networks %v, want three different ones", given)
	})
	// Both are changed; both are restored.
	if err := c.Client.CoreV1().ServiceAccounts(schedtest.Namespace).Delete(t.Context(), "default", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	ca, err := c.Client.CoreV1().ConfigMaps(schedtest.Namespace).Get(t.Context(), "kube-root-ca.crt", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ca.Data = map[string]string{"ca.crt": "evil"}
	if _, err := c.Client.CoreV1().ConfigMaps(schedtest.Namespace).Update(t.Context(), ca, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string {
		ca, err := c.Client.CoreV1().ConfigMaps(schedtest.Namespace).Get(t.Context(), "kube-root-ca.crt", metav1.GetOptions{})
		if err != nil || ca.Data["ca.crt"] != "PEM" {
			return fmt.Sprintf("%v %v", ca, err)
		}
		if _, err := c.Client.CoreV1().ServiceAccounts(schedtest.Namespace).Get(t.Context(), "default", metav1.GetOptions{}); err != nil {
			return err.Error()
		}
		return ""
	})
}

// What fits nowhere says why, and runs once there is room.
func TestUnschedulable(t *testing.T) {
	big := schedtest.Pod("big").CPU("100").Obj()
	c := cluster(t, 2, big)
	defer leader(t, c)()
	const why = "0/2 nodes are available: 2 Insufficient cpu."
	schedtest.Eventually(t, func() string {
		pod, err := c.Client.CoreV1().Pods(schedtest.Namespace).Get(t.Context(), "big", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		cond := pods.Condition(pod, corev1.PodScheduled)
		if cond == nil || cond.Status != corev1.ConditionFalse || cond.Reason != "Unschedulable" || cond.Message != why {
			return fmt.Sprintf("condition %+v", cond)
		}
		return ""
	})
	schedtest.Eventually(t, func() string {
		events, err := c.Client.CoreV1().Events(schedtest.Namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err.Error()
		}
		for _, event := range events.Items {
			if event.Reason == "FailedScheduling" && event.Message == why && event.InvolvedObject.Name == "big" {
				return ""
			}
		}
		return "no FailedScheduling event"
	})
	if _, err := c.Client.CoreV1().Nodes().Create(t.Context(), schedtest.Node("huge").Has(corev1.ResourceCPU, "200").Obj(), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string {
		pod, err := c.Client.CoreV1().Pods(schedtest.Namespace).Get(t.Context(), "big", metav1.GetOptions{})
		if err != nil || pod.Spec.NodeName != "huge" {
			return fmt.Sprintf("on %q, %v", pod.Spec.NodeName, err)
		}
		return ""
	})
}
