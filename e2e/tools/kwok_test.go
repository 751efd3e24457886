package tools

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

var kwokNodes = flag.Int("kwok-nodes", 200, "nodes that kwok plays")

// TestE2EKwok has kwok play nodes, and runs pods on each of them.
func TestE2EKwok(t *testing.T) {
	k := start(t, "tools-kwok")
	config := rest.CopyConfig(k.config)
	config.QPS = -1
	api, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	playing, end := context.WithCancel(context.WithoutCancel(t.Context()))
	log, err := os.Create(filepath.Join(t.TempDir(), "kwok.log"))
	if err != nil {
		t.Fatal(err)
	}
	// The stages are kwok's own: what it does to nodes and pods, and when.
	stages, err := filepath.Glob(filepath.Join(k.peers, "stages", "*.yaml"))
	if err != nil || len(stages) == 0 {
		t.Fatalf("no stages beside kwok (%v)", err)
	}
	cmd := k.command(playing, "kwok", "--config", strings.Join(stages, ","), "--kubeconfig", k.c.Nodes()[0].Kubeconfig(), "--manage-all-nodes=false",
		"--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake", "--node-lease-duration-seconds=40", "--cidr=10.200.0.0/16")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		for _, kind := range []string{"deployments", "pods"} { // while kwok is there to end them
			k.ok("clusterctl", "delete", kind, "--all", "--timeout="+testTimeout.String())
		}
		k.ok("clusterctl", "delete", "nodes", "-l", "type=kwok", "--timeout="+testTimeout.String())
		select {
		case err := <-ended:
			t.Errorf("kwok ended: %v", err)
		default:
			end()
			<-ended
		}
		end()
		if b, err := os.ReadFile(log.Name()); t.Failed() && err == nil {
			t.Logf("kwok:\n%s", b[max(0, len(b)-4000):])
		}
		_ = log.Close()
	})

	n := *kwokNodes
	began := time.Now()
	var group errgroup.Group
	group.SetLimit(16)
	for i := range n {
		group.Go(func() error { return makeKwokNode(t.Context(), api, i) })
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	k.eventually("kwok's nodes are Ready", func(ctx context.Context) error {
		list, err := api.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: "type=kwok"})
		if err != nil {
			return err
		}
		ready := 0
		for _, node := range list.Items {
			for _, c := range node.Status.Conditions {
				if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
					ready++
				}
			}
		}
		if ready != n {
			return fmt.Errorf("%d of %d nodes are Ready", ready, n)
		}
		return nil
	})
	t.Logf("%d nodes are Ready after %s", n, time.Since(began).Round(time.Second))

	// One pod for each node, spread by the scheduler; kwok makes them run.
	began = time.Now()
	if _, err := api.AppsV1().Deployments(k.ns).Create(t.Context(), kwokDeployment(int32(n)), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	nodes := k.runningOn(api, n)
	t.Logf("%d pods run after %s, on %d nodes", n, time.Since(began).Round(time.Second), len(nodes))
	if len(nodes) < n*9/10 {
		t.Errorf("%d pods are on %d nodes of %d, all alike", n, len(nodes), n)
	}

	// A node that is gone takes its pods with it, and others take their place.
	const gone = "kwok-00000"
	if err := api.CoreV1().Nodes().Delete(t.Context(), gone, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	k.eventually("no pod is on the node that is gone", func(ctx context.Context) error {
		list, err := api.CoreV1().Pods(k.ns).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + gone})
		if err == nil && len(list.Items) > 0 {
			err = fmt.Errorf("%d are", len(list.Items))
		}
		return err
	})
	k.runningOn(api, n)
	// Every one of the others is Ready still: kwok's Leases are believed.
	for _, line := range []string{k.ok("clusterctl", "get", "nodes", "-l", "type=kwok", "--no-headers")} {
		k.lacks(line, "NotReady")
	}
	k.ok("clusterctl", "scale", "deployment/hollow", "--replicas=0")
	k.runningOn(api, 0)
}

func makeKwokNode(ctx context.Context, api kubernetes.Interface, i int) error {
	room := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("8Gi"), corev1.ResourcePods: resource.MustParse("110")}
	name := fmt.Sprintf("kwok-%05d", i)
	_, err := api.CoreV1().Nodes().Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Annotations: map[string]string{"kwok.x-k8s.io/node": "fake"},
			Labels: map[string]string{"type": "kwok", corev1.LabelHostname: name},
		},
		Spec:   corev1.NodeSpec{Taints: []corev1.Taint{{Key: "kwok.x-k8s.io/node", Value: "fake", Effect: corev1.TaintEffectNoSchedule}}},
		Status: corev1.NodeStatus{Capacity: room, Allocatable: room},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

func kwokDeployment(replicas int32) *appsv1.Deployment {
	labels := map[string]string{"app": "hollow"}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "hollow"},
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To(replicas), Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					NodeSelector: map[string]string{"type": "kwok"},
					Tolerations:  []corev1.Toleration{{Key: "kwok.x-k8s.io/node", Operator: corev1.TolerationOpExists}},
					Containers: []corev1.Container{{Name: "main", Image: "hollow", Resources: corev1.ResourceRequirements{
						Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("16Mi")},
					}}},
				},
			},
		},
	}
}

// runningOn waits until exactly n pods of kwok's are there, all Ready, and counts
// those of each node.
func (k *kit) runningOn(api kubernetes.Interface, n int) map[string]int {
	k.Helper()
	var nodes map[string]int
	k.eventually(fmt.Sprintf("%d pods run", n), func(ctx context.Context) error {
		list, err := api.CoreV1().Pods(k.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=hollow"})
		if err != nil {
			return err
		}
		nodes = map[string]int{}
		ready := 0
		for _, p := range list.Items {
			for _, c := range p.Status.Conditions {
				if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue && p.DeletionTimestamp == nil {
					ready++
					nodes[p.Spec.NodeName]++
				}
			}
		}
		if ready != n || len(list.Items) != n {
			return fmt.Errorf("%d pods, %d of them Ready", len(list.Items), ready)
		}
		return nil
	})
	return nodes
}
