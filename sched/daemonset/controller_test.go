package daemonset

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/internal/podctl"
	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// The bug of issue 9: a pod whose name was taken failed the pass.
func TestTakenName(t *testing.T) {
	client := fake.NewClientset()
	refused := schedtest.RefuseNames(client, "pods", 2)
	env := loop.Env{Client: client, Informers: informers.NewSharedInformerFactory(client, 0), Events: loop.NewEvents(client, clock.RealClock{}), Clock: clock.RealClock{}}
	control, err := podctl.New(env, Kind, "test")
	if err != nil {
		t.Fatal(err)
	}
	c := &controller{client: client, clock: env.Clock, pods: control, backoff: flowcontrol.NewBackOff(firstBackoff, maxBackoff)}
	if err := c.execute(t.Context(), newSet(), Plan{Create: []string{"n1"}}, "h"); err != nil {
		t.Errorf("create a pod after a name that is taken: %v", err)
	}
	list, err := client.CoreV1().Pods(schedtest.Namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 || nodeOf(&list.Items[0]) != "n1" || refused() != 2 {
		t.Errorf("%d names were refused, the pods are %v: %v", refused(), list.Items, err)
	}
}
