package daemonset

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/clusterd/clusterd/sched/internal/history"
	"github.com/clusterd/clusterd/sched/schedtest"
)

var now = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

func newSet(edit ...func(*appsv1.DaemonSet)) *appsv1.DaemonSet {
	one, none := intstr.FromInt32(1), intstr.FromInt32(0)
	set := &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "logs", Namespace: schedtest.Namespace, UID: "set", Generation: 2},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "logs"}},
			Template: schedtest.Template("logs", "v1"),
			UpdateStrategy: appsv1.DaemonSetUpdateStrategy{
				Type: appsv1.RollingUpdateDaemonSetStrategyType, RollingUpdate: &appsv1.RollingUpdateDaemonSet{MaxUnavailable: &one, MaxSurge: &none},
			},
		},
	}
	for _, e := range edit {
		e(set)
	}
	return set
}

func bounds(unavailable, surge string) func(*appsv1.DaemonSet) {
	return func(set *appsv1.DaemonSet) {
		u, s := intstr.Parse(unavailable), intstr.Parse(surge)
		set.Spec.UpdateStrategy.RollingUpdate = &appsv1.RollingUpdateDaemonSet{MaxUnavailable: &u, MaxSurge: &s}
	}
}

func onDelete(set *appsv1.DaemonSet) {
	set.Spec.UpdateStrategy = appsv1.DaemonSetUpdateStrategy{Type: appsv1.OnDeleteDaemonSetStrategyType}
}

// pod is written "n1 old ready": node, template, and what else is true of it.
func pod(set *appsv1.DaemonSet, i int, text string) *corev1.Pod {
	words := strings.Fields(text)
	p := newPod(set, words[0], words[1])
	p.Name = strings.Join(words[:2], "-")
	b := (&schedtest.PodBuilder{P: p}).Phase(corev1.PodPending).Created(now.Add(time.Duration(i-1000) * time.Second)).On(words[0])
	for _, word := range words[2:] {
		switch word {
		case "ready":
			b.Ready(now.Add(-time.Hour))
		case "going":
			b.Deleting(now)
		case "failed":
			b.Phase(corev1.PodFailed)
		case "unbound":
			p.Spec.NodeName = ""
		case "again":
			p.Name += "-again"
		default:
			panic(word)
		}
	}
	return p
}

func TestDecide(t *testing.T) {
	plain := []string{"n1", "n2", "n3"}
	tests := []struct {
		name  string
		set   *appsv1.DaemonSet
		nodes []string // "n1 label" or "n1 NoSchedule"
		pods  []string
		want  string
	}{
		{"one each", newSet(), plain, nil, "+n1 +n2 +n3"},
		{"a missing one", newSet(), plain, []string{"n1 new ready", "n3 new"}, "+n2"},
		{"not beside one that goes", newSet(), plain, []string{"n1 new ready", "n2 new ready going", "n3 new"}, ""},
		{"one too many", newSet(), plain, []string{"n1 new ready", "n2 new", "n2 new again", "n3 new"}, "-n2-new-again"},
		{"ended", newSet(), plain[:1], []string{"n1 new failed"}, "!n1-new"},
		{"selector", newSet(func(s *appsv1.DaemonSet) { s.Spec.Template.Spec.NodeSelector = map[string]string{"disk": "ssd"} }),
			[]string{"n1 ssd", "n2"}, []string{"n2 new ready"}, "+n1 -n2-new"},
		{"named node", newSet(func(s *appsv1.DaemonSet) { s.Spec.Template.Spec.NodeName = "n2" }), plain, nil, "+n2"},
		{"tainted", newSet(), []string{"n1 NoSchedule", "n2 NoExecute", "n3"}, []string{"n1 new ready", "n2 new ready", "n3 new ready"}, "-n2-new"},
		{"tainted, none there", newSet(), []string{"n1 NoSchedule"}, nil, ""},
		{"tolerated", newSet(func(s *appsv1.DaemonSet) {
			s.Spec.Template.Spec.Tolerations = []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}}
		}), []string{"n1 NoSchedule", "n2 NoExecute"}, nil, "+n1 +n2"},
		{"cordoned", newSet(), []string{"n1 cordoned"}, nil, "+n1"},
		{"made for a node that is gone", newSet(), plain[:1], []string{"n1 new ready", "n9 new unbound"}, "-n9-new"},

		{"rolls one by one", newSet(), plain, []string{"n1 old ready", "n2 old ready", "n3 old ready"}, "-n1-old"},
		{"waits", newSet(), plain, []string{"n1 new", "n2 old ready", "n3 old ready"}, ""},
		{"two at a time", newSet(bounds("50%", "0")), plain, []string{"n1 old ready", "n2 old ready", "n3 old ready"}, "-n1-old -n2-old"},
		{"broken ones cost nothing", newSet(), plain, []string{"n1 old", "n2 old", "n3 old ready"}, "-n1-old -n2-old"},
		{"by hand", newSet(onDelete), plain[:1], []string{"n1 old ready"}, ""},
		{"surge", newSet(bounds("0", "1")), plain, []string{"n1 old ready", "n2 old ready", "n3 old ready"}, "+n1"},
		{"surge waits", newSet(bounds("0", "1")), plain, []string{"n1 old ready", "n1 new", "n2 old ready", "n3 old ready"}, ""},
		{"surge goes on", newSet(bounds("0", "1")), plain, []string{"n1 old ready", "n1 new ready", "n2 old ready", "n3 old ready"}, "+n2 -n1-old"},
		{"both without surge", newSet(), plain[:1], []string{"n1 old ready", "n1 new ready"}, "-n1-old"},
		{"a surge that was called off", newSet(onDelete), plain[:1], []string{"n1 old ready", "n1 new"}, "-n1-new"},
		{"a surge that was called off, none serves", newSet(), plain[:1], []string{"n1 old", "n1 new"}, "-n1-old"},
		{"of two that are old the one that serves stays", newSet(bounds("0", "1")), plain[:1], []string{"n1 old", "n1 older ready"}, "+n1 -n1-old"},
		{"going itself", newSet(func(s *appsv1.DaemonSet) { stamp := metav1.NewTime(now); s.DeletionTimestamp = &stamp }), plain, nil, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := Decide(Input{Set: test.set, Pods: podsOf(test.set, test.pods), Nodes: nodes(test.nodes), Hash: "new", Now: now})
			if diff := cmp.Diff(test.want, describe(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func podsOf(set *appsv1.DaemonSet, texts []string) (out []*corev1.Pod) {
	for i, text := range texts {
		out = append(out, pod(set, i, text))
	}
	return out
}

func nodes(texts []string) (out []*corev1.Node) {
	for _, text := range texts {
		words := strings.Fields(text)
		b := schedtest.Node(words[0])
		for _, word := range words[1:] {
			switch word {
			case "ssd":
				b.Label("disk", "ssd")
			case "cordoned":
				b.Cordon().Taint(corev1.TaintNodeUnschedulable, "", corev1.TaintEffectNoSchedule)
			default:
				b.Taint("gpu", "", corev1.TaintEffect(word))
			}
		}
		out = append(out, b.Obj())
	}
	return out
}

func describe(p Plan) string {
	var out []string
	for _, node := range p.Create {
		out = append(out, "+"+node)
	}
	for _, d := range p.Delete {
		out = append(out, "-"+d.Name)
	}
	for _, d := range p.Ended {
		out = append(out, "!"+d.Name)
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func TestStatus(t *testing.T) {
	set := newSet()
	got := Decide(Input{
		Set: set, Hash: "new", Now: now,
		Nodes: nodes([]string{"n1", "n2", "n3", "n4 NoSchedule"}),
		Pods:  podsOf(set, []string{"n1 new ready", "n2 old", "n4 old ready"}),
	}).Status
	want := appsv1.DaemonSetStatus{
		ObservedGeneration: 2, DesiredNumberScheduled: 3, CurrentNumberScheduled: 2, NumberMisscheduled: 1,
		NumberReady: 1, NumberAvailable: 1, NumberUnavailable: 2, UpdatedNumberScheduled: 1,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
}

func TestNewPod(t *testing.T) {
	set := newSet(func(s *appsv1.DaemonSet) {
		s.Spec.Template.Spec.HostNetwork = true
		s.Spec.Template.Spec.Tolerations = []corev1.Toleration{{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}}
	})
	p := newPod(set, "n2", "h")
	if nodeOf(p) != "n2" || p.Spec.NodeName != "" || p.Labels[history.HashLabel] != "h" {
		t.Errorf("pod is for %q, labels %v", nodeOf(p), p.Labels)
	}
	if len(p.Spec.Tolerations) != 7 {
		t.Errorf("tolerations: %s", fmt.Sprint(p.Spec.Tolerations))
	}
	if len(set.Spec.Template.Spec.Tolerations) != 1 || set.Spec.Template.Spec.Affinity != nil {
		t.Error("the template was changed")
	}
}

// Whatever happens, a roll never takes more nodes out of service than it may.
func TestRollKeepsItsPromise(t *testing.T) {
	for _, test := range []struct {
		bounds func(*appsv1.DaemonSet)
		least  int
	}{{bounds("2", "0"), 4}, {bounds("0", "2"), 6}} {
		set := newSet(test.bounds)
		var all []*corev1.Node
		have := map[*corev1.Pod]bool{}
		for i := range 6 {
			name := fmt.Sprintf("n%d", i)
			all = append(all, schedtest.Node(name).Obj())
			have[pod(set, i, name+" old ready")] = true
		}
		for step := 0; ; step++ {
			var list []*corev1.Pod
			serving := map[string]bool{}
			for p := range have {
				list = append(list, p)
				if p.DeletionTimestamp == nil && len(p.Status.Conditions) > 0 {
					serving[p.Spec.NodeName] = true
				}
			}
			if len(serving) < test.least {
				t.Fatalf("step %d: %d nodes serve, want %d", step, len(serving), test.least)
			}
			plan := Decide(Input{Set: set, Pods: list, Nodes: all, Hash: "new", Now: now})
			if plan.Status.UpdatedNumberScheduled == 6 && len(list) == 6 && plan.Status.NumberAvailable == 6 {
				break
			}
			if step > 50 {
				t.Fatal("does not settle")
			}
			for _, p := range list { // the nodes act
				if p.DeletionTimestamp != nil {
					delete(have, p)
				} else if step%2 == 0 {
					(&schedtest.PodBuilder{P: p}).Ready(now)
				}
			}
			for _, p := range plan.Delete {
				(&schedtest.PodBuilder{P: p}).Deleting(now)
			}
			for _, node := range plan.Create {
				have[pod(set, step+100, node+" new")] = true
			}
		}
	}
}
