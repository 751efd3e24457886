package main

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// limited is an API server over a store with limits, as a node has it.
func limited(t *testing.T, change func(*raftstore.Config)) (*servertest.Server, *raftstore.Store) {
	t.Helper()
	store := raftstoretest.New(t, 1, func(c *raftstore.Config) {
		c.VitalPrefixes, c.MaxValueBytes = vitalPrefixes, maxObjectBytes
		if change != nil {
			change(c)
		}
	}).Leader()
	return servertest.Start(t, func(c *server.Config) {
		c.Storage = kubestore.NewDecorator(kubestore.Config{Store: store, Cache: true})
	}), store
}

func codeOf(err error) int {
	var status apierrors.APIStatus
	if errors.As(err, &status) {
		return int(status.Status().Code)
	}
	return 0
}

func deploymentOf(argBytes ...int) *appsv1.Deployment {
	labels := map[string]string{"a": "b"}
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "large"}, Spec: appsv1.DeploymentSpec{
		Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}},
	}}
	for i, n := range argBytes {
		d.Spec.Template.Spec.Containers = append(d.Spec.Template.Spec.Containers, corev1.Container{
			Name: fmt.Sprint("c", i), Image: "app", Args: []string{strings.Repeat("x", n)},
		})
	}
	return d
}

// Objects of up to 1.5 MiB are stored; what is larger is refused with a clear
// error before it reaches the log.
func TestObjectSize(t *testing.T) {
	s, store := limited(t, nil)
	deploys, ctx := s.Client.AppsV1().Deployments("default"), t.Context()
	const mib = 1 << 20
	made, err := deploys.Create(ctx, deploymentOf(3*mib/2-4096), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	list, err := deploys.List(ctx, metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 || len(list.Items[0].Spec.Template.Spec.Containers[0].Args[0]) != 3*mib/2-4096 {
		t.Fatalf("read back: %v", err)
	}
	refused := func(what string, err error, say string) {
		t.Helper()
		if codeOf(err) != http.StatusRequestEntityTooLarge || !strings.Contains(err.Error(), say) {
			t.Errorf("%s: %v", what, err)
		}
	}
	tooLarge := func() {
		other := deploymentOf(3*mib/2 + 4096)
		other.Name = "too-large"
		_, err := deploys.Create(ctx, other, metav1.CreateOptions{})
		refused("create", err, "at most 1572864 are allowed")
		// The object grows by pieces that are small enough themselves.
		patch := fmt.Sprintf(`{"spec":{"template":{"spec":{"containers":[{"name":"more","image":"app","args":[%q]}]}}}}`, strings.Repeat("y", mib))
		_, err = deploys.Patch(ctx, "large", types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
		refused("patch", err, "at most 1572864 are allowed")
		other = deploymentOf(4 * mib)
		other.Name = "far-too-large"
		_, err = deploys.Create(ctx, other, metav1.CreateOptions{})
		refused("create beyond the limit of a request", err, "limit is 3145728")
	}
	// The store and the server write now and then by themselves, not each time.
	for tries := 1; ; tries++ {
		index := store.Status().Keyspace.Index
		tooLarge()
		written := store.Status().Keyspace.Index - index
		if written == 0 {
			break
		}
		if tries == 5 {
			t.Fatalf("%d entries were written to the log, and some each time", written)
		}
	}
	if now, err := deploys.Get(ctx, "large", metav1.GetOptions{}); err != nil || now.ResourceVersion != made.ResourceVersion {
		t.Errorf("afterwards: %v", err)
	}
}

// A full store says so and what helps; what gets it out of its trouble works.
func TestFullStoreCanBeCleanedUp(t *testing.T) {
	const kib = 1 << 10
	s, _ := limited(t, func(c *raftstore.Config) {
		c.QuotaBytes, c.ReserveBytes = 512*kib, 128*kib
		c.FolderQuotas = map[string]int64{kubestore.Folder(server.StoragePrefix("", "secrets"), "default"): 64 * kib}
	})
	ctx, core := t.Context(), s.Client.CoreV1()
	_, err := core.Secrets("default").Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "large"}, Data: map[string][]byte{"a": make([]byte, 70*kib)}}, metav1.CreateOptions{})
	if codeOf(err) != http.StatusInsufficientStorage || !strings.Contains(err.Error(), "the quota of secrets in namespace default is used up") {
		t.Errorf("a Secret beyond its kind's quota: %v", err)
	}
	node, err := core.Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	grace := int64(30)
	pod, err := core.Pods("default").Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: corev1.PodSpec{
		NodeName: "n1", TerminationGracePeriodSeconds: &grace, Containers: []corev1.Container{{Name: "c", Image: "app"}},
	}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	full := error(nil)
	for i := range 40 {
		_, full = core.ConfigMaps("default").Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("m", i)}, Data: map[string]string{"k": strings.Repeat("x", 20*kib)},
		}, metav1.CreateOptions{})
		if full != nil {
			break
		}
	}
	if codeOf(full) != http.StatusInsufficientStorage || apierrors.ReasonForError(full) != kubestore.ReasonInsufficientStorage ||
		!strings.Contains(full.Error(), "clusterctl store top") || !strings.Contains(full.Error(), "storeQuota") {
		t.Fatalf("a full store: %v", full)
	}
	works := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s in a full store: %v", what, err)
		}
	}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
	_, err = s.Client.CoordinationV1().Leases("kube-node-lease").Create(ctx, lease, metav1.CreateOptions{})
	works("a new Lease", err)
	_, err = core.Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n2"}}, metav1.CreateOptions{})
	works("a new Node", err)
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Message: strings.Repeat("m", 500)}}
	_, err = core.Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{})
	works("a Node's status", err)
	pod.Status.Phase, pod.Status.Message = corev1.PodRunning, strings.Repeat("m", 500)
	_, err = core.Pods("default").UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	works("a Pod's status", err)
	works("deleting a Pod with grace", core.Pods("default").Delete(ctx, "p", metav1.DeleteOptions{}))
	if marked, err := core.Pods("default").Get(ctx, "p", metav1.GetOptions{}); err != nil || marked.DeletionTimestamp == nil {
		t.Errorf("the Pod was not marked: %v", err)
	}
	for _, name := range []string{"m0", "m1"} {
		works("deleting a ConfigMap", core.ConfigMaps("default").Delete(ctx, name, metav1.DeleteOptions{}))
	}
	_, err = core.ConfigMaps("default").Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "again"}, Data: map[string]string{"k": strings.Repeat("x", 20*kib)},
	}, metav1.CreateOptions{})
	works("creating after deleting", err)
}

// Only renewals by nodes of their own leases wait.
func TestMayWait(t *testing.T) {
	for _, tt := range []struct {
		origin, key string
		want        bool
	}{
		{"system:node:a", "/registry/coordination.k8s.io/leases/kube-node-lease/a", true},
		{"system:node:a via agents", "/registry/coordination.k8s.io/leases/kube-node-lease/a", true},
		{"system:kube-controller-manager (node-lifecycle)", "/registry/coordination.k8s.io/leases/kube-node-lease/a", false},
		{"system:nodes", "/registry/coordination.k8s.io/leases/kube-node-lease/a", false},
		{"system:node:a", "/registry/coordination.k8s.io/leases/kube-system/a", false},
		{"system:node:a", "/registry/nodes/a", false},
		{"", "", false},
	} {
		if got := mayWait([]byte(tt.origin), []byte(tt.key)); got != tt.want {
			t.Errorf("%s of %s: %t", tt.key, tt.origin, got)
		}
	}
	if folder := kubestore.Folder(server.StoragePrefix("coordination.k8s.io", "leases"), "kube-node-lease"); folder != "/registry/coordination.k8s.io/leases/kube-node-lease/" {
		t.Errorf("leases are in %s", folder)
	}
}
