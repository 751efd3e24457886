package disruption

import (
	"context"
	"errors"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	appslisters "k8s.io/client-go/listers/apps/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// TestExpected: how many pods there should be is asked of whatever controls them.
func TestExpected(t *testing.T) {
	keep := func(objects ...any) cache.Indexer {
		i := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
		for _, o := range objects {
			if err := i.Add(o); err != nil {
				t.Fatal(err)
			}
		}
		return i
	}
	meta := func(name string, owners ...metav1.OwnerReference) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: schedtest.Namespace, Name: name, UID: types.UID(name), OwnerReferences: owners}
	}
	by := func(apiVersion, kind, name string) metav1.OwnerReference {
		return *metav1.NewControllerRef(&metav1.ObjectMeta{Name: name, UID: types.UID(name)}, schema.FromAPIVersionAndKind(apiVersion, kind))
	}
	c := &controller{
		sets: appslisters.NewReplicaSetLister(keep(
			&appsv1.ReplicaSet{ObjectMeta: meta("web-1", by("apps/v1", "Deployment", "web")), Spec: appsv1.ReplicaSetSpec{Replicas: ptr.To(int32(2))}},
			&appsv1.ReplicaSet{ObjectMeta: meta("web-2", by("apps/v1", "Deployment", "web")), Spec: appsv1.ReplicaSetSpec{Replicas: ptr.To(int32(1))}},
			&appsv1.ReplicaSet{ObjectMeta: meta("alone"), Spec: appsv1.ReplicaSetSpec{Replicas: ptr.To(int32(4))}},
		)),
		deployments: appslisters.NewDeploymentLister(keep(&appsv1.Deployment{ObjectMeta: meta("web"), Spec: appsv1.DeploymentSpec{Replicas: ptr.To(int32(5))}})),
		stateful:    appslisters.NewStatefulSetLister(keep(&appsv1.StatefulSet{ObjectMeta: meta("db"), Spec: appsv1.StatefulSetSpec{Replicas: ptr.To(int32(3))}})),
		rcs:         corelisters.NewReplicationControllerLister(keep(&corev1.ReplicationController{ObjectMeta: meta("rc"), Spec: corev1.ReplicationControllerSpec{Replicas: ptr.To(int32(6))}})),
		scale: func(_ context.Context, _ string, owner *metav1.OwnerReference) (int32, error) {
			if owner.Kind == "Shard" {
				return 7, nil
			}
			return 0, errors.New("no such kind")
		},
	}
	for _, tt := range []struct {
		name   string
		owners []metav1.OwnerReference // of a pod each; of no kind: a pod without a controller
		want   int32
		asked  bool
		err    string
	}{
		{name: "a StatefulSet", owners: []metav1.OwnerReference{by("apps/v1", "StatefulSet", "db"), by("apps/v1", "StatefulSet", "db")}, want: 3},
		{name: "and a pod that belongs to none", owners: []metav1.OwnerReference{{}, by("apps/v1", "StatefulSet", "db")}, want: 3},
		{name: "a Deployment in a rollout", owners: []metav1.OwnerReference{by("apps/v1", "ReplicaSet", "web-1"), by("apps/v1", "ReplicaSet", "web-2")}, want: 5},
		{name: "a ReplicaSet of no Deployment", owners: []metav1.OwnerReference{by("apps/v1", "ReplicaSet", "alone")}, want: 4},
		{name: "a ReplicationController", owners: []metav1.OwnerReference{by("v1", "ReplicationController", "rc")}, want: 6},
		{name: "a kind with a scale", owners: []metav1.OwnerReference{by("example.com/v1", "Shard", "s"), by("apps/v1", "StatefulSet", "db")}, want: 10, asked: true},
		{name: "a StatefulSet of another group", owners: []metav1.OwnerReference{by("example.com/v1", "StatefulSet", "db")}, asked: true, err: `controller of pod "0": scale of StatefulSet "db": no such kind`},
		{name: "gone", owners: []metav1.OwnerReference{by("apps/v1", "StatefulSet", "no")}},
		{name: "only pods that belong to none", owners: []metav1.OwnerReference{{}, {}}},
	} {
		var selected []*corev1.Pod
		for i, owner := range tt.owners {
			pod := &corev1.Pod{ObjectMeta: meta(string(rune('0' + i)))}
			if owner.Kind != "" {
				pod.OwnerReferences = []metav1.OwnerReference{owner}
			}
			selected = append(selected, pod)
		}
		got, asked, err := c.expected(t.Context(), selected)
		if got != tt.want || asked != tt.asked || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: %d, asked %t, %v; want %d, %t, %q", tt.name, got, asked, err, tt.want, tt.asked, tt.err)
		}
	}
}
