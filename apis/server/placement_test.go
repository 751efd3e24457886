package server_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/admission"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// TestPodTopologyLabels: a pod says in which zone and region its node is, however it
// got the node.
func TestPodTopologyLabels(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx := t.Context()
	node := &corev1.Node{ObjectMeta: meta("n1")}
	node.Labels = map[string]string{corev1.LabelTopologyZone: "z1", corev1.LabelTopologyRegion: "r1", "disk": "fast"}
	must[*corev1.Node](t)(s.Client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}))
	check := func(what, name, zone, region string) {
		t.Helper()
		labels := must[*corev1.Pod](t)(s.Client.CoreV1().Pods("default").Get(ctx, name, metav1.GetOptions{})).Labels
		if labels[corev1.LabelTopologyZone] != zone || labels[corev1.LabelTopologyRegion] != region || labels["disk"] != "" {
			t.Errorf("%s: %v", what, labels)
		}
	}
	bound := pod("bound")
	bound.Labels = map[string]string{corev1.LabelTopologyZone: "elsewhere"}
	createPod(t, s.Client, bound, "n1")
	check("a pod that was bound", "bound", "z1", "r1")
	static := pod("static")
	static.Spec.NodeName = "n1"
	createPod(t, s.Client, static, "")
	check("a pod that came with its node", "static", "z1", "r1")
	early := pod("early")
	early.Spec.NodeName = "n2"
	createPod(t, s.Client, early, "")
	check("a pod before its node", "early", "", "")
	waits := createPod(t, s.Client, pod("waits"), "")
	check("a pod without a node", "waits", "", "")
	binding := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: waits.Name, Namespace: "default"}, Target: corev1.ObjectReference{Kind: "Node", Name: "n1"}}
	if err := s.Client.CoreV1().RESTClient().Post().Namespace("default").Resource("bindings").Body(binding).Do(ctx).Error(); err != nil {
		t.Fatal(err)
	}
	check("a pod that was bound in the old way", "waits", "z1", "r1")
}

// TestDenyServiceExternalIPs: with the plugin Services get no external addresses; those
// that they had, they keep.
func TestDenyServiceExternalIPs(t *testing.T) {
	memory := servertest.NewMemory()
	service := func(name string, addresses ...string) *corev1.Service {
		return &corev1.Service{ObjectMeta: meta(name), Spec: corev1.ServiceSpec{ExternalIPs: addresses, Ports: []corev1.ServicePort{{Port: 80}}}}
	}
	before := servertest.Start(t, func(c *server.Config) { c.Storage = memory.Decorator() })
	must[*corev1.Service](t)(before.Client.CoreV1().Services("default").Create(t.Context(), service("had", "192.0.2.1", "192.0.2.2"), metav1.CreateOptions{}))
	s := servertest.Start(t, func(c *server.Config) {
		c.Storage, c.Admission = memory.Decorator(), admission.Set{Enable: []string{"DenyServiceExternalIPs"}}
	})
	services := s.Client.CoreV1().Services("default")
	denied := func(what string, err error) {
		t.Helper()
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "Use of external IPs is denied by admission control") {
			t.Errorf("%s: %v, want Forbidden", what, err)
		}
	}
	_, err := services.Create(t.Context(), service("new", "192.0.2.9"), metav1.CreateOptions{})
	denied("a new Service", err)
	plain := must[*corev1.Service](t)(services.Create(t.Context(), service("plain"), metav1.CreateOptions{}))
	plain.Spec.ExternalIPs = []string{"192.0.2.9"}
	_, err = services.Update(t.Context(), plain, metav1.UpdateOptions{})
	denied("an address for a Service", err)
	had := must[*corev1.Service](t)(services.Get(t.Context(), "had", metav1.GetOptions{}))
	had.Spec.ExternalIPs = had.Spec.ExternalIPs[1:]
	must[*corev1.Service](t)(services.Update(t.Context(), had, metav1.UpdateOptions{}))
}

// TestClassesAreProtected: a VolumeAttributesClass stays until no claim has it.
func TestClassesAreProtected(t *testing.T) {
	s := servertest.Start(t, nil)
	class := must[*storagev1.VolumeAttributesClass](t)(s.Client.StorageV1().VolumeAttributesClasses().Create(t.Context(),
		&storagev1.VolumeAttributesClass{ObjectMeta: meta("gold"), DriverName: "example.com", Parameters: map[string]string{"iops": "9"}}, metav1.CreateOptions{}))
	if len(class.Finalizers) != 1 || class.Finalizers[0] != "kubernetes.io/vac-protection" {
		t.Errorf("finalizers %v", class.Finalizers)
	}
}
