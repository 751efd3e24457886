package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

const (
	atOnce   = 32               // requests under way
	renewers = 16               // of Leases, for one after the other would be too slow for thousands
	renewal  = 25 * time.Second // of a node's Lease: well within the 40 s after which it counts as silent
)

// hollow plays nodes and their agents: Leases are renewed, and a pod that is
// bound is reported as running at once.
type hollow struct {
	client kubernetes.Interface
	group  errgroup.Group
	work   chan *corev1.Pod

	mu      sync.Mutex           // guards below
	asked   map[string]time.Time // when pods of a burst were, by name, until they are seen
	waiting map[types.UID]time.Time
	bound   []time.Duration
	running map[types.UID]bool
	most    int // pods wanted
	done    chan struct{}
}

// cordon keeps pods off the servers' own nodes, once they have registered.
func cordon(ctx context.Context, client kubernetes.Interface, servers int) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err == nil && len(list.Items) == servers {
			for _, n := range list.Items {
				if _, err := client.CoreV1().Nodes().Patch(ctx, n.Name, types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`), metav1.PatchOptions{}); err != nil {
					return fmt.Errorf("cordon %s: %w", n.Name, err)
				}
			}
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the servers' own nodes: %w", errors.Join(err, ctx.Err()))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// newHollow makes the nodes and starts to play them, until ctx ends.
func newHollow(ctx context.Context, client kubernetes.Interface, nodes int) (*hollow, error) {
	h := &hollow{client: client, work: make(chan *corev1.Pod, 1<<16), asked: map[string]time.Time{}, waiting: map[types.UID]time.Time{}, running: map[types.UID]bool{}}
	// The first nodes' Leases are due before the last of thousands is made.
	exists := make([]atomic.Bool, nodes)
	for i := range min(renewers, nodes) {
		h.group.Go(func() error { h.renew(ctx, i, exists); return nil })
	}
	var made errgroup.Group
	made.SetLimit(atOnce)
	for i := range nodes {
		made.Go(func() error {
			err := h.node(ctx, i)
			exists[i].Store(err == nil)
			return err
		})
	}
	if err := made.Wait(); err != nil {
		return nil, err
	}
	if err := h.settled(ctx); err != nil {
		return nil, err
	}
	for range atOnce {
		h.group.Go(func() error { h.agent(ctx); return nil })
	}
	informer := informers.NewSharedInformerFactory(client, 0).Core().V1().Pods().Informer()
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: h.seen, UpdateFunc: func(_, o any) { h.seen(o) },
	}); err != nil {
		return nil, err
	}
	h.group.Go(func() error { informer.RunWithContext(ctx); return nil })
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		return nil, ctx.Err()
	}
	return h, nil
}

// wait returns when all has ended; ctx of newHollow has ended before.
func (h *hollow) wait() { _ = h.group.Wait() }

const prefix = "hollow-"

func name(i int) string { return fmt.Sprintf("%s%05d", prefix, i) }

func (h *hollow) node(ctx context.Context, i int) error {
	node, err := h.client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name(i), Labels: map[string]string{
		corev1.LabelHostname: name(i), corev1.LabelOSStable: "linux", corev1.LabelTopologyZone: fmt.Sprintf("zone-%d", i%3),
	}}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("make node %s: %w", name(i), err)
	}
	if err := h.ready(ctx, node.Name); err != nil {
		return err
	}
	at := metav1.NowMicro()
	_, err = h.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Create(ctx, &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: node.Name},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &node.Name, LeaseDurationSeconds: ptr.To[int32](40), RenewTime: &at},
	}, metav1.CreateOptions{})
	return err
}

// ready tells that a node is.
func (h *hollow) ready(ctx context.Context, name string) error {
	room := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("32"), corev1.ResourceMemory: resource.MustParse("128Gi"),
		corev1.ResourcePods: resource.MustParse("110"), corev1.ResourceEphemeralStorage: resource.MustParse("100Gi"),
	}
	now := metav1.Now()
	status, err := json.Marshal(map[string]any{"status": corev1.NodeStatus{
		Capacity: room, Allocatable: room,
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", LastHeartbeatTime: now, LastTransitionTime: now}},
	}})
	if err != nil {
		return err
	}
	if _, err := h.client.CoreV1().Nodes().Patch(ctx, name, types.StrategicMergePatchType, status, metav1.PatchOptions{}, "status"); err != nil {
		return fmt.Errorf("tell the status of %s: %w", name, err)
	}
	return nil
}

// settled waits until each node has its pod network and no taint: what the leader does
// about new nodes is no part of what a pod costs.
func (h *hollow) settled(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	for {
		list, err := h.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		waiting := 0
		if err == nil {
			for i := range list.Items {
				n := &list.Items[i]
				if !strings.HasPrefix(n.Name, prefix) {
					continue
				}
				if n.Spec.PodCIDR == "" || len(n.Spec.Taints) > 0 {
					waiting++
				}
				// On a busy machine a Lease may be late: an agent says again that it is there.
				if slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
					return c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue
				}) {
					err = errors.Join(err, h.ready(ctx, n.Name))
				}
			}
		}
		if err == nil && waiting == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the pod networks and the taints of %d nodes: %w", waiting, errors.Join(err, ctx.Err()))
		case <-time.After(time.Second):
		}
	}
}

// renew goes round every so manyth Lease from the first on, evenly over a period.
func (h *hollow) renew(ctx context.Context, first int, exists []atomic.Bool) {
	tick := time.NewTicker(renewal * renewers / time.Duration(len(exists)))
	defer tick.Stop()
	for i := first; ; i += renewers {
		if i >= len(exists) {
			i = first
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if !exists[i].Load() {
			continue
		}
		patch := fmt.Sprintf(`{"spec":{"renewTime":%q}}`, time.Now().UTC().Format(metav1.RFC3339Micro))
		_, err := h.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Patch(ctx, name(i), types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		if err != nil && ctx.Err() == nil {
			fmt.Fprintf(os.Stderr, "# renew %s: %v\n", name(i), err)
		}
	}
}

// seen takes note of a pod's way, and hands one that was bound to an agent.
func (h *hollow) seen(o any) {
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return
	}
	now := time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	since, waits := h.waiting[pod.UID]
	if asked, ok := h.asked[pod.Name]; ok {
		since, waits = asked, true
		h.waiting[pod.UID] = asked
		delete(h.asked, pod.Name)
	}
	switch {
	case pod.Spec.NodeName == "" && !waits:
		h.waiting[pod.UID] = now
	case pod.Spec.NodeName != "" && waits:
		h.bound = append(h.bound, now.Sub(since))
		delete(h.waiting, pod.UID)
	}
	switch {
	case pod.Spec.NodeName == "":
	case pod.Status.Phase == corev1.PodRunning:
		if h.running[pod.UID] = true; len(h.running) == h.most && h.done != nil {
			close(h.done)
			h.done = nil
		}
	case pod.Status.Phase == corev1.PodPending && len(pod.Status.PodIPs) == 0:
		h.work <- pod // it has room for more than any case has
	}
}

// agent tells of pods that they run.
func (h *hollow) agent(ctx context.Context) {
	for {
		var pod *corev1.Pod
		select {
		case <-ctx.Done():
			return
		case pod = <-h.work:
		}
		ip := netip.AddrFrom4([4]byte{100, pod.UID[0], pod.UID[1], pod.UID[2]}).String()
		now := metav1.Now()
		var ready []corev1.PodCondition
		for _, kind := range []corev1.PodConditionType{corev1.PodReadyToStartContainers, corev1.PodInitialized, corev1.ContainersReady, corev1.PodReady} {
			ready = append(ready, corev1.PodCondition{Type: kind, Status: corev1.ConditionTrue, LastTransitionTime: now})
		}
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"uid": pod.UID},
			"status": corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}, StartTime: &now, Conditions: ready,
				ContainerStatuses: []corev1.ContainerStatus{{Name: "app", Ready: true, Started: ptr.To(true), Image: "hollow", ImageID: "hollow", ContainerID: "hollow://" + string(pod.UID),
					State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}}}}},
		})
		if err == nil {
			_, err = h.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
		}
		if err != nil && ctx.Err() == nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			fmt.Fprintf(os.Stderr, "# status of %s: %v\n", pod.Name, err)
		}
	}
}

// template is of all pods that are made here.
func template() corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "hollow"}}, Spec: corev1.PodSpec{Containers: []corev1.Container{{
		Name: "app", Image: "hollow",
		Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("16Mi")}},
	}}}}
}

// burst makes so many pods as fast as atOnce requests under way allow, waits until
// they run and returns how long after its creation was asked for each was seen bound, sorted.
func (h *hollow) burst(ctx context.Context, pods int) ([]time.Duration, error) {
	done := h.expect(pods)
	var made errgroup.Group
	made.SetLimit(atOnce)
	for i := range pods {
		made.Go(func() error {
			t := template()
			pod := &corev1.Pod{ObjectMeta: t.ObjectMeta, Spec: t.Spec}
			pod.Name = fmt.Sprintf("burst-%05d", i)
			h.mu.Lock()
			h.asked[pod.Name] = time.Now()
			h.mu.Unlock()
			_, err := h.client.CoreV1().Pods(metav1.NamespaceDefault).Create(ctx, pod, metav1.CreateOptions{})
			return err
		})
	}
	if err := made.Wait(); err != nil {
		return nil, err
	}
	return h.until(ctx, done)
}

// deploy makes one Deployment, waits until so many pods run and returns how long
// each that was seen waiting was bound after that, sorted.
func (h *hollow) deploy(ctx context.Context, pods int) ([]time.Duration, error) {
	done := h.expect(pods)
	_, err := h.client.AppsV1().Deployments(metav1.NamespaceDefault).Create(ctx, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "hollow"},
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To(int32(pods)), Selector: &metav1.LabelSelector{MatchLabels: template().Labels}, Template: template(),
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	return h.until(ctx, done)
}

// expect returns what is closed when so many pods run.
func (h *hollow) expect(pods int) <-chan struct{} {
	done := make(chan struct{})
	h.mu.Lock()
	defer h.mu.Unlock()
	h.most, h.done = pods, done
	return done
}

// until waits for done and returns how long pods waited for their nodes, sorted.
func (h *hollow) until(ctx context.Context, done <-chan struct{}) ([]time.Duration, error) {
	timeout := time.After(10 * time.Minute)
	select {
	case <-done:
	case <-timeout:
		h.mu.Lock()
		defer h.mu.Unlock()
		return nil, fmt.Errorf("%d of %d pods run after ten minutes", len(h.running), h.most)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	slices.Sort(h.bound)
	return h.bound, nil
}
