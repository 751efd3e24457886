package podctl

import (
	"errors"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/internal/newname"
	"github.com/clusterd/clusterd/sched/loop"
)

// The bug of issue 9: a pod whose name was taken was an error of the pass,
// because the server tries no other name for a pod that has one.
func TestTakenNameIsTriedAnew(t *testing.T) {
	client := fake.NewClientset()
	taken := 0
	client.PrependReactor("create", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if taken++; taken <= 3 {
			return true, nil, apierrors.NewAlreadyExists(corev1.Resource("pods"), "web-x")
		}
		return false, nil, nil
	})
	c := &Control{client: client, Events: record.NewFakeRecorder(20), Pending: loop.NewPending(clock.RealClock{}, nil)}
	rs := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "u"}}
	pod := func() *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", GenerateName: "web-"}}
	}
	if err := c.CreateNamed(t.Context(), rs, pod()); err != nil {
		t.Fatal(err)
	}
	list, err := client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 || list.Items[0].GenerateName != "web-" {
		t.Errorf("%+v %v", list.Items, err)
	}
	// The number of tries is bounded.
	taken = -1000
	client.PrependReactor("create", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		taken++
		return true, nil, apierrors.NewAlreadyExists(corev1.Resource("pods"), "web-x")
	})
	if err := c.CreateNamed(t.Context(), rs, pod()); !apierrors.IsAlreadyExists(err) || taken != -1000+newname.Tries {
		t.Errorf("%d tries: %v", taken+1000, err)
	}
	// Another error is none of the name.
	taken = -1000
	full := errors.New("the disk is full")
	client.PrependReactor("create", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		taken++
		return true, nil, full
	})
	if err := c.CreateNamed(t.Context(), rs, pod()); !errors.Is(err, full) || taken != -999 {
		t.Errorf("%d tries: %v", taken+1000, err)
	}
}
