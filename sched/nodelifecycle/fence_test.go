package nodelifecycle

import (
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/coordination"
	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/sched/schedtest"
)

func lease(node string, seconds int32, change ...func(*coordinationv1.Lease)) *coordinationv1.Lease {
	at := metav1.NewMicroTime(now)
	l := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: node, Namespace: corev1.NamespaceNodeLease},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &node, LeaseDurationSeconds: &seconds, RenewTime: &at},
	}
	coordination.Promise(l)
	for _, f := range change {
		f(l)
	}
	return l
}

func TestMayTake(t *testing.T) {
	seen := now.Add(time.Hour) // the node's clock is another's
	for name, c := range map[string]struct {
		lease *coordinationv1.Lease
		age   time.Duration
		may   bool
		wait  time.Duration
	}{
		"none":       {nil, time.Hour, false, 0},
		"fresh":      {lease("n", 40), 39 * time.Second, false, time.Second},
		"run out":    {lease("n", 40), 40 * time.Second, true, 0},
		"no promise": {lease("n", 40, func(l *coordinationv1.Lease) { l.Annotations = nil }), time.Hour, false, 0},
		"a promise for an older renewal": {lease("n", 40, func(l *coordinationv1.Lease) {
			l.Spec.RenewTime = ptr.To(metav1.NewMicroTime(now.Add(time.Second)))
		}), time.Hour, false, 0},
		"taken already": {lease("n", 40, func(l *coordinationv1.Lease) { coordination.Take(l, leaseTaker, now) }), time.Hour, false, 0},
		"lost again while it returns": {lease("n", 40, func(l *coordinationv1.Lease) {
			coordination.Take(l, leaseTaker, now)
			coordination.Return(l, now)
		}), time.Hour, true, 0},
		"no duration": {lease("n", 40, func(l *coordinationv1.Lease) { l.Spec.LeaseDurationSeconds = nil }), time.Hour, false, 0},
	} {
		if may, wait := mayTake(c.lease, seen, seen.Add(c.age)); may != c.may || wait != c.wait {
			t.Errorf("%s: %v, %v", name, may, wait)
		}
	}
}

func guarded(pod *schedtest.PodBuilder) *corev1.Pod {
	p := pod.Ready(time.Now()).Obj()
	p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: names.SelfFencingCondition, Status: corev1.ConditionTrue})
	return p
}

// A dead node's Lease is taken after its duration if that lets a pod go, else it
// is left alone.
func TestLeaseIsTaken(t *testing.T) {
	short := lease("n1", 1)
	c := schedtest.New(t, append(nodes(5), guarded(schedtest.Pod("p").On("n1")), schedtest.Pod("q").On("n2").Ready(time.Now()).Obj(), short, lease("n2", 1))...)
	w := &wire{suspects: make(chan string), silent: map[string]bool{"n1": true, "n2": true}}
	start(t, c, w)
	holder := func(node string) string {
		l, err := c.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(t.Context(), node, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if !l.Spec.RenewTime.Equal(short.Spec.RenewTime) {
			t.Errorf("the time of the renewal is %v", l.Spec.RenewTime)
		}
		return *l.Spec.HolderIdentity
	}
	schedtest.Eventually(t, func() string {
		if h := holder("n1"); h != leaseTaker {
			return "n1's lease is held by " + h
		}
		return ""
	})
	schedtest.Eventually(t, func() string {
		pod, err := c.Client.CoreV1().Pods(schedtest.Namespace).Get(t.Context(), "q", metav1.GetOptions{})
		if err != nil || pod.DeletionTimestamp == nil {
			return "q is not evicted"
		}
		return ""
	})
	if h := holder("n2"); h != "n2" {
		t.Errorf("the lease of a node without such pods is held by %s", h)
	}
}
