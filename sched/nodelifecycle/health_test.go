package nodelifecycle

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/seconds"
	"github.com/clusterd/clusterd/sched/schedtest"
)

var now = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

func TestSilent(t *testing.T) {
	tests := []struct {
		name    string
		seen    seen
		silent  bool
		recheck time.Duration
	}{
		{"fresh", seen{heartbeat: now.Add(-10 * time.Second)}, false, 30 * time.Second},
		{"stale", seen{heartbeat: now.Add(-Grace)}, true, 0},
		{"fresh but dead", seen{heartbeat: now, dead: true}, true, 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if silent, recheck := test.seen.silent(now); silent != test.silent || recheck != test.recheck {
				t.Errorf("got %v %v", silent, recheck)
			}
		})
	}
}

func TestUnknown(t *testing.T) {
	node := schedtest.Node("a").Obj()
	got := unknown(node.Status.Conditions, now)
	if len(got) != 4 || got[0].Type != corev1.NodeReady || got[0].Status != corev1.ConditionUnknown || got[0].Reason != "NodeStatusUnknown" {
		t.Fatalf("conditions %+v", got)
	}
	if got[1].Reason != "NodeStatusNeverUpdated" {
		t.Errorf("a condition never posted has reason %s", got[1].Reason)
	}
	if node.Status.Conditions[0].Status != corev1.ConditionTrue {
		t.Error("the argument was changed")
	}
	if again := unknown(got, now.Add(time.Hour)); again != nil {
		t.Errorf("unknown conditions are written again: %+v", again)
	}
}

func TestTaints(t *testing.T) {
	const key = "node.kubernetes.io/"
	ready := func(s corev1.ConditionStatus, since time.Duration) *schedtest.NodeBuilder {
		b := schedtest.Node("a")
		b.N.Status.Conditions[0].Status = s
		b.N.Status.Conditions[0].LastTransitionTime = metav1.NewTime(now.Add(-since))
		return b
	}
	bare := schedtest.Node("a")
	bare.N.Status.Conditions = nil
	pressed := ready(corev1.ConditionTrue, 0)
	pressed.N.Status.Conditions = append(pressed.N.Status.Conditions, corev1.NodeCondition{Type: corev1.NodeDiskPressure, Status: corev1.ConditionTrue})
	tests := []struct {
		name    string
		node    *schedtest.NodeBuilder
		hold    bool // no evictions now
		delay   time.Duration
		want    string
		recheck time.Duration
	}{
		{"ready", ready(corev1.ConditionTrue, 0), false, 0, "", 0},
		{"back again", ready(corev1.ConditionTrue, 0).Taint(key+"unreachable", "", "NoSchedule").Taint(key+"unreachable", "", "NoExecute").Taint("mine", "", "NoExecute"), false, 0, "mine:NoExecute", 0},
		{"never posted", bare, false, 0, "not-ready:NoSchedule", 0},
		{"not ready", ready(corev1.ConditionFalse, 0), false, 0, "not-ready:NoSchedule not-ready:NoExecute", 0},
		{"unreachable", ready(corev1.ConditionUnknown, 0), false, 0, "unreachable:NoSchedule unreachable:NoExecute", 0},
		{"mass failure", ready(corev1.ConditionUnknown, 0), true, 0, "unreachable:NoSchedule", 0},
		{"mass failure keeps what is set", ready(corev1.ConditionUnknown, 0).Taint(key+"unreachable", "", "NoExecute"), true, 0, "unreachable:NoSchedule unreachable:NoExecute", 0},
		{"delayed", ready(corev1.ConditionUnknown, time.Second), false, 5 * time.Second, "unreachable:NoSchedule", 4 * time.Second},
		{"delay over", ready(corev1.ConditionUnknown, 5*time.Second), false, 5 * time.Second, "unreachable:NoSchedule unreachable:NoExecute", 0},
		{"not ready becomes unreachable", ready(corev1.ConditionUnknown, 0).Taint(key+"not-ready", "", "NoSchedule").Taint(key+"not-ready", "", "NoExecute"), false, time.Hour, "unreachable:NoSchedule unreachable:NoExecute", time.Hour},
		{"cordoned", ready(corev1.ConditionTrue, 0).Cordon(), false, 0, "unschedulable:NoSchedule", 0},
		{"uncordoned", ready(corev1.ConditionTrue, 0).Taint(key+"unschedulable", "", "NoSchedule"), false, 0, "", 0},
		{"pressure", pressed, false, 0, "disk-pressure:NoSchedule", 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, recheck := taints(test.node.Obj(), !test.hold, test.delay, now)
			var words []string
			for _, taint := range got {
				words = append(words, fmt.Sprintf("%s:%s", strings.TrimPrefix(taint.Key, key), taint.Effect))
			}
			if text := strings.Join(words, " "); text != test.want || recheck != test.recheck {
				t.Errorf("got %s after %v, want %s after %v", text, recheck, test.want, test.recheck)
			}
			node := test.node.Obj().DeepCopy()
			node.Spec.Taints = got
			if again, _ := taints(node, !test.hold, test.delay, now.Add(time.Minute)); test.delay == 0 && fmt.Sprint(again) != fmt.Sprint(got) {
				t.Errorf("not stable: %v, then %v", got, again)
			}
		})
	}
}

func TestEvictionOf(t *testing.T) {
	added := metav1.NewTime(now.Add(-10 * time.Second))
	unreachable := corev1.Taint{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoExecute, TimeAdded: &added}
	wish := corev1.Taint{Key: "maintenance", Effect: corev1.TaintEffectNoExecute}
	noSchedule := corev1.Taint{Key: "x", Effect: corev1.TaintEffectNoSchedule}
	tolerate := func(key string, seconds *int64) corev1.Toleration {
		return corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, TolerationSeconds: seconds}
	}
	tests := []struct {
		name      string
		taints    []corev1.Taint
		tolerates []corev1.Toleration
		suspended bool
		want      eviction
		wait      time.Duration
	}{
		{"no taint", nil, nil, false, stays, 0},
		{"not of the kind that evicts", []corev1.Taint{noSchedule}, nil, false, stays, 0},
		{"not tolerated", []corev1.Taint{unreachable}, nil, false, leaves, 0},
		{"tolerated without a limit", []corev1.Taint{unreachable}, []corev1.Toleration{tolerate(unreachable.Key, nil)}, false, stays, 0},
		{"tolerated for a while", []corev1.Taint{unreachable}, []corev1.Toleration{tolerate(unreachable.Key, ptr.To[int64](300))}, false, later, 290 * time.Second},
		{"tolerated for longer than a duration holds", []corev1.Taint{unreachable}, []corev1.Toleration{tolerate(unreachable.Key, ptr.To[int64](math.MaxInt64))}, false, later, seconds.Duration(math.MaxInt64) - 10*time.Second},
		{"time is up", []corev1.Taint{unreachable}, []corev1.Toleration{tolerate(unreachable.Key, ptr.To[int64](10))}, false, leaves, 0},
		{"shortest counts", []corev1.Taint{unreachable}, []corev1.Toleration{tolerate("", nil), tolerate(unreachable.Key, ptr.To[int64](60))}, false, later, 50 * time.Second},
		{"every taint counts", []corev1.Taint{unreachable, wish}, []corev1.Toleration{tolerate(unreachable.Key, nil)}, false, leaves, 0},
		{"taint without a time", []corev1.Taint{wish}, []corev1.Toleration{tolerate(wish.Key, ptr.To[int64](30))}, false, later, 25 * time.Second},
		{"mass failure", []corev1.Taint{unreachable}, nil, true, stays, 0},
		{"mass failure and a wish", []corev1.Taint{unreachable, wish}, nil, true, leaves, 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			b := schedtest.Pod("p").On("a")
			for _, toleration := range test.tolerates {
				b.Tolerate(toleration)
			}
			got, wait := evictionOf(b.Obj(), test.taints, now.Add(-5*time.Second), now, test.suspended)
			if got != test.want || wait != test.wait {
				t.Errorf("got %v after %v, want %v after %v", got, wait, test.want, test.wait)
			}
		})
	}
}
