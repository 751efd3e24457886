package attachdetach

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/internal/bynode"
	"github.com/clusterd/clusterd/sched/loop"
)

// TestANodeThatComesBack: its attachments went with it; the volumes of its pods are looked
// at again.
func TestANodeThatComesBack(t *testing.T) {
	client := fake.NewSimpleClientset()
	env := loop.Env{Client: client, Informers: informers.NewSharedInformerFactory(client, 0), Events: loop.NewEvents(client, clock.RealClock{}), Clock: clock.RealClock{}}
	core := env.Informers.Core().V1()
	attachments := env.Informers.Storage().V1().VolumeAttachments().Informer()
	for _, err := range []error{bynode.Index(core.Pods().Informer()), attachments.AddIndexers(cache.Indexers{attachmentsByNode: nodeOf})} {
		if err != nil {
			t.Fatal(err)
		}
	}
	using := func(name, node, claim string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: name}, Spec: corev1.PodSpec{NodeName: node, Volumes: []corev1.Volume{{
			Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}},
		}}}}
	}
	for _, pod := range []*corev1.Pod{using("other", "n2", "c2"), using("here", "n1", "c1")} {
		if err := core.Pods().Informer().GetIndexer().Add(pod); err != nil {
			t.Fatal(err)
		}
	}
	for claim, volume := range map[string]string{"c1": "v1", "c2": "v2"} {
		c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: claim}, Spec: corev1.PersistentVolumeClaimSpec{VolumeName: volume}}
		if err := core.PersistentVolumeClaims().Informer().GetIndexer().Add(c); err != nil {
			t.Fatal(err)
		}
	}
	looked := make(chan loop.Key, 2)
	c := &controller{pods: core.Pods().Informer().GetIndexer(), attachments: attachments.GetIndexer(), claims: core.PersistentVolumeClaims().Lister()}
	c.Controller = loop.New("attachdetach", env, 1, func(_ context.Context, key loop.Key) error { looked <- key; return nil })
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	ready := make(chan struct{})
	go func() { ended <- c.Controller.RunReady(ctx, func() { close(ready) }) }()
	<-ready
	c.enqueueAt("n1")
	select {
	case key := <-looked:
		if key != (loop.Key{Name: "v1"}) {
			t.Errorf("looked at %s", key)
		}
	case <-time.After(time.Minute):
		t.Error("the volume of the node's pod is not looked at")
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
