package watches

import (
	"context"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/clusterd/clusterd/apis/names"
)

// TestWatches: each kind is asked for once, and what is kept is what parts look at.
func TestWatches(t *testing.T) {
	api := fake.NewClientset(
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default", Annotations: map[string]string{"a": "b"}}, Spec: v1.ServiceSpec{ClusterIP: "10.96.0.7"}},
		&discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "web-1", Namespace: "default"}, Endpoints: []discoveryv1.Endpoint{{
			Addresses: []string{"10.244.0.7"}, TargetRef: &v1.ObjectReference{Name: "web-1"},
		}}},
		&v1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{v1.LabelTopologyZone: "z"}, Annotations: map[string]string{names.WireGuard: "key", "a": "b"}},
			Spec:       v1.NodeSpec{PodCIDRs: []string{"10.244.0.0/24"}},
			Status: v1.NodeStatus{
				Addresses:  []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: "192.0.2.1"}},
				Conditions: []v1.NodeCondition{{Type: v1.NodeDiskPressure}, {Type: v1.NodeReady, Status: v1.ConditionTrue}},
				Images:     []v1.ContainerImage{{Names: []string{"large"}}},
			},
		},
	)
	w, err := New(api)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	for _, i := range w.all() {
		select {
		case <-i.HasSyncedChecker().Done():
		case <-t.Context().Done():
			t.Fatal("the watches were not read")
		}
	}
	lists := map[string]int{}
	for _, a := range api.Actions() {
		if a.GetVerb() == "list" {
			lists[a.GetResource().Resource]++
		}
	}
	for _, kind := range []string{"services", "endpointslices", "nodes"} {
		if lists[kind] > 1 {
			t.Errorf("%s were listed %d times", kind, lists[kind])
		}
	}
	obj, ok, err := w.Nodes.GetIndexer().GetByKey("n1")
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	n := obj.(*v1.Node)
	if len(n.Annotations) != 1 || n.Annotations[names.WireGuard] != "key" || n.Labels[v1.LabelTopologyZone] != "z" || !slices.Equal(n.Spec.PodCIDRs, []string{"10.244.0.0/24"}) {
		t.Errorf("%+v", n)
	}
	if len(n.Status.Addresses) != 1 || len(n.Status.Conditions) != 1 || n.Status.Conditions[0].Type != v1.NodeReady || n.Status.Images != nil {
		t.Errorf("%+v", n.Status)
	}
	if obj, ok, _ = w.Slices.GetIndexer().GetByKey("default/web-1"); !ok || obj.(*discoveryv1.EndpointSlice).Endpoints[0].TargetRef != nil || len(obj.(*discoveryv1.EndpointSlice).Endpoints[0].Addresses) != 1 {
		t.Errorf("%+v", obj)
	}
	if obj, ok, _ = w.Services.GetIndexer().GetByKey("default/web"); !ok || obj.(*v1.Service).Spec.ClusterIP != "10.96.0.7" || obj.(*v1.Service).Annotations != nil {
		t.Errorf("%+v", obj)
	}
}
