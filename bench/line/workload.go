package main

import (
	"context"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/e2e/cluster"
)

const (
	helloImage = "clusterd.local/hello:1"
	timeout    = 3 * time.Minute
)

// workload makes Deployments and times their pods.
type workload struct{ client kubernetes.Interface }

func newWorkload(c *cluster.Netns) (*workload, error) {
	client, _, err := c.Client(c.Nodes()[0].Name)
	return &workload{client}, err
}

// waitNodes waits until that many nodes are Ready.
func (w *workload) waitNodes(ctx context.Context, n int) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		list, err := w.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
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
		if ready >= n {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d nodes are Ready: %w", ready, n, ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func deployment(name string, pods int) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To(int32(pods)),
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					TerminationGracePeriodSeconds: ptr.To(int64(0)),
					Containers: []corev1.Container{{
						Name: "app", Image: helloImage,
						Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1m")}},
					}},
				},
			},
		},
	}
}

// applyAndWait makes a Deployment, returns for each pod how long after the
// request it was seen Running, and removes everything again.
func (w *workload) applyAndWait(ctx context.Context, name string, pods int) ([]time.Duration, error) {
	took, err := w.apply(ctx, name, pods)
	if err != nil {
		return nil, err
	}
	return took, w.remove(ctx, name)
}

// apply makes a Deployment and returns for each of its pods how long after the
// request it was seen Running. It looks through an informer, as controllers
// do: a watch that the server ends in a burst is taken up again.
func (w *workload) apply(ctx context.Context, name string, pods int) ([]time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	factory := informers.NewSharedInformerFactoryWithOptions(w.client, 0,
		informers.WithNamespace(metav1.NamespaceDefault),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = "app=" + name }))
	running := make(chan string, 2*pods)
	look := func(o any) {
		if pod, ok := o.(*corev1.Pod); ok && pod.Status.Phase == corev1.PodRunning {
			select {
			case running <- pod.Name:
			case <-ctx.Done():
			}
		}
	}
	informer := factory.Core().V1().Pods().Informer()
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    look,
		UpdateFunc: func(_, o any) { look(o) },
	}); err != nil {
		return nil, err
	}
	factory.Start(ctx.Done())
	defer factory.Shutdown()
	defer cancel()
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		return nil, fmt.Errorf("list the pods of %s: %w", name, ctx.Err())
	}
	began := time.Now()
	if _, err := w.client.AppsV1().Deployments(metav1.NamespaceDefault).Create(ctx, deployment(name, pods), metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	var took []time.Duration
	for len(took) < pods {
		select {
		case pod := <-running:
			if !seen[pod] {
				seen[pod] = true
				took = append(took, time.Since(began))
			}
		case <-ctx.Done():
			return nil, fmt.Errorf("%d of %d pods of %s were seen Running: %w", len(took), pods, name, ctx.Err())
		}
	}
	return took, nil
}

// remove deletes the Deployment and waits until its pods are gone.
func (w *workload) remove(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := w.client.AppsV1().Deployments(metav1.NamespaceDefault).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return err
	}
	for {
		list, err := w.client.CoreV1().Pods(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{LabelSelector: "app=" + name})
		if err != nil {
			return err
		}
		if len(list.Items) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d pods of %s are still there: %w", len(list.Items), name, ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}
