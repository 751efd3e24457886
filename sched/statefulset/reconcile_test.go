package statefulset

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/history"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/schedtest"
)

var now = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

func newSet(replicas int32, edit ...func(*appsv1.StatefulSet)) *appsv1.StatefulSet {
	set := &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "db", Namespace: schedtest.Namespace, UID: "set", Generation: 2},
		Spec: appsv1.StatefulSetSpec{
			Replicas:            &replicas,
			ServiceName:         "db",
			Selector:            &metav1.LabelSelector{MatchLabels: map[string]string{"app": "db"}},
			Template:            schedtest.Template("db", "v1"),
			PodManagementPolicy: appsv1.OrderedReadyPodManagement,
			UpdateStrategy:      appsv1.StatefulSetUpdateStrategy{Type: appsv1.RollingUpdateStatefulSetStrategyType},
		},
	}
	for _, e := range edit {
		e(set)
	}
	return set
}

func parallel(set *appsv1.StatefulSet) { set.Spec.PodManagementPolicy = appsv1.ParallelPodManagement }

func onDelete(set *appsv1.StatefulSet) {
	set.Spec.UpdateStrategy.Type = appsv1.OnDeleteStatefulSetStrategyType
}

func from(n int32) func(*appsv1.StatefulSet) {
	return func(set *appsv1.StatefulSet) { set.Spec.Ordinals = &appsv1.StatefulSetOrdinals{Start: n} }
}

func partition(n int32) func(*appsv1.StatefulSet) {
	return func(set *appsv1.StatefulSet) {
		set.Spec.UpdateStrategy.RollingUpdate = &appsv1.RollingUpdateStatefulSetStrategy{Partition: &n}
	}
}

func unavailable(n intstr.IntOrString) func(*appsv1.StatefulSet) {
	return func(set *appsv1.StatefulSet) {
		set.Spec.UpdateStrategy.RollingUpdate = &appsv1.RollingUpdateStatefulSetStrategy{MaxUnavailable: &n}
	}
}

// pod is written "0 old ready": ordinal, revision, and what else is true of it.
func pod(set *appsv1.StatefulSet, text string) *corev1.Pod {
	words := strings.Fields(text)
	var ordinal int
	if _, err := fmt.Sscan(words[0], &ordinal); err != nil {
		panic(err)
	}
	p := newPod(set, &set.Spec.Template, ordinal, words[1])
	p.UID = types.UID("uid-" + p.Name)
	b := &schedtest.PodBuilder{P: p}
	b.Phase(corev1.PodPending)
	for _, word := range words[2:] {
		switch word {
		case "ready":
			b.Ready(now.Add(-time.Hour))
		case "fresh":
			b.Ready(now.Add(-4 * time.Second))
		case "running":
			b.Phase(corev1.PodRunning)
		case "failed":
			b.Phase(corev1.PodFailed)
		case "going":
			b.Deleting(now)
		case "bare":
			delete(p.Labels, appsv1.PodIndexLabel)
		default:
			panic(word)
		}
	}
	return p
}

func TestDecide(t *testing.T) {
	tests := []struct {
		name string
		set  *appsv1.StatefulSet
		pods []string
		want string
	}{
		{"first alone", newSet(3), nil, "+0 new"},
		{"next when the first is ready", newSet(3), []string{"0 new ready"}, "+1 new"},
		{"not before", newSet(3), []string{"0 new running"}, ""},
		{"not while it goes", newSet(3), []string{"0 new ready going"}, ""},
		{"all at once", newSet(3, parallel), nil, "+0 new +1 new +2 new"},
		{"a hole", newSet(3), []string{"0 new ready", "2 new ready"}, "+1 new"},
		{"ordinals from 5", newSet(2, from(5)), []string{"5 new ready"}, "+6 new"},
		{"ordinals moved up", newSet(2, from(1)), []string{"0 new ready", "1 new ready"}, "+2 new"},
		{"ordinals moved up, then down", newSet(2, from(1)), []string{"0 new ready", "1 new ready", "2 new ready"}, "-db-0"},
		{"finished ones again", newSet(2), []string{"0 new failed", "1 new ready"}, "-db-0"},
		{"identity", newSet(1), []string{"0 new ready bare"}, "~db-0"},
		{"min ready seconds", newSet(2, func(s *appsv1.StatefulSet) { s.Spec.MinReadySeconds = 10 }), []string{"0 new fresh"}, "wait 6s"},

		{"highest goes first", newSet(1), []string{"0 new ready", "1 new ready", "2 new ready"}, "-db-2"},
		{"one by one", newSet(1), []string{"0 new ready", "1 new ready", "2 new ready going"}, ""},
		{"halts while a lower one is unhealthy", newSet(1), []string{"0 new running", "1 new ready", "2 new ready"}, ""},
		{"halts while several are unhealthy", newSet(0), []string{"0 new running", "1 new running"}, ""},
		{"the only unhealthy one goes", newSet(1), []string{"0 new ready", "1 new ready", "2 new running"}, "-db-2"},
		{"all at once down", newSet(1, parallel), []string{"0 new running", "1 new ready", "2 new ready"}, "-db-2 -db-1"},

		{"rolls from the top", newSet(3), []string{"0 old ready", "1 old ready", "2 old ready"}, "-db-2"},
		{"waits for the new one", newSet(3), []string{"0 old ready", "1 old ready", "2 new running"}, ""},
		{"goes on", newSet(3), []string{"0 old ready", "1 old ready", "2 new ready"}, "-db-1"},
		{"is done", newSet(2), []string{"0 new ready", "1 new ready"}, ""},
		{"stops at the partition", newSet(3, partition(2)), []string{"0 old ready", "1 old ready", "2 new ready"}, ""},
		{"below the partition stays old", newSet(3, partition(2)), []string{"1 old ready", "2 new ready"}, "+0 old"},
		{"the partition counts from the start", newSet(3, from(5), partition(1)), []string{"5 old ready", "6 old ready", "7 new ready"}, "-db-6"},
		{"by hand", newSet(2, onDelete), []string{"0 old ready", "1 old ready"}, ""},
		{"by hand, next is new", newSet(2, onDelete), []string{"0 old ready"}, "+1 new"},
		{"two at a time", newSet(4, unavailable(intstr.FromInt32(2))), []string{"0 old ready", "1 old ready", "2 old ready", "3 old ready"}, "-db-3 -db-2"},
		{"half at a time", newSet(4, parallel, unavailable(intstr.FromString("50%"))), []string{"0 old ready", "1 old ready", "2 old ready", "3 new running"}, "-db-2"},
		{"parallel rolls one by one too", newSet(3, parallel), []string{"0 old ready", "1 old ready", "2 new running"}, ""},
		{"a broken revision is left behind", newSet(3), []string{"0 old running"}, "-db-0"},
		{"an old one waits for the new one", newSet(3), []string{"0 old ready", "1 old running", "2 new running"}, ""},
		{"an old one waits for one on its way out", newSet(3), []string{"0 old ready", "1 old running", "2 old ready going"}, ""},
		{"two old ones that are broken", newSet(3), []string{"0 old ready", "1 old running", "2 old running"}, "-db-1"},
		{"an old one that is broken, the new one serves", newSet(3), []string{"0 old ready", "1 old running", "2 new ready"}, "-db-1"},
		{"broken ones cost nothing", newSet(3, parallel), []string{"0 old running", "1 old ready", "2 old running"}, "-db-2 -db-0"},
		{"a broken one below the partition stays", newSet(2, partition(1)), []string{"0 old running", "1 new ready"}, ""},

		{"going itself", newSet(3, func(s *appsv1.StatefulSet) { s.DeletionTimestamp = ptr.To(metav1.NewTime(now)) }), nil, ""},
		{"a burst is bounded", newSet(math.MaxInt32, parallel), nil, "500 creates"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var mine []*corev1.Pod
			for _, text := range test.pods {
				mine = append(mine, pod(test.set, text))
			}
			if got := describe(Decide(Input{Set: test.set, Pods: mine, Current: "old", Update: "new", Now: now})); got != test.want {
				t.Errorf("decides %q, want %q", got, test.want)
			}
		})
	}
}

// TestClaimsOfPendingPods: those of pods that a node may have are left alone.
func TestClaimsOfPendingPods(t *testing.T) {
	set := newSet(6, func(set *appsv1.StatefulSet) {
		set.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}}}
	})
	bound := pod(set, "1 new")
	bound.Spec.NodeName = "n"
	mine := []*corev1.Pod{pod(set, "0 new"), bound, pod(set, "2 new going"), pod(set, "3 new failed"), pod(set, "4 new"), pod(set, "6 new")}
	if got := Decide(Input{Set: set, Pods: mine, Current: "new", Update: "new", Now: now}).Claims; !cmp.Equal(got, []int{0, 4}) {
		t.Errorf("claims of %v, want 0 and 4", got)
	}
	set.Spec.VolumeClaimTemplates = nil
	if got := Decide(Input{Set: set, Pods: mine, Current: "new", Update: "new", Now: now}).Claims; got != nil {
		t.Errorf("claims of %v though the set has none", got)
	}
}

func describe(p Plan) string {
	if len(p.Create) > 100 {
		return fmt.Sprintf("%d creates", len(p.Create))
	}
	var out []string
	for _, c := range p.Create {
		out = append(out, fmt.Sprintf("+%d %s", c.Ordinal, c.Revision))
	}
	for _, d := range p.Delete {
		out = append(out, "-"+d.Name)
	}
	for _, f := range p.Fix {
		out = append(out, "~"+f.Name)
	}
	if p.Recheck > 0 {
		out = append(out, "wait "+p.Recheck.String())
	}
	return strings.Join(out, " ")
}

func TestStatus(t *testing.T) {
	set := newSet(3)
	mine := []*corev1.Pod{pod(set, "0 old ready"), pod(set, "1 old ready going"), pod(set, "2 new running"), pod(set, "3 new failed")}
	got := Decide(Input{Set: set, Pods: mine, Current: "old", Update: "new", Now: now}).Status
	want := appsv1.StatefulSetStatus{
		ObservedGeneration: 2, Replicas: 4, ReadyReplicas: 2, AvailableReplicas: 2, CurrentReplicas: 1, UpdatedReplicas: 1,
		CurrentRevision: "old", UpdateRevision: "new",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	set = newSet(1)
	done := Decide(Input{Set: set, Pods: []*corev1.Pod{pod(set, "0 new ready")}, Current: "old", Update: "new", Now: now}).Status
	if done.CurrentRevision != "new" || done.CurrentReplicas != 1 {
		t.Errorf("a finished rollout is not recorded: %+v", done)
	}
}

// Any sequence of spec changes and faults ends in what the spec says, with the
// promises kept on the way: no two pods of one name, in order only one change
// at a time and none past an unready pod, never more than maxUnavailable of the
// available ones taken away by a roll.
func TestRandomWorkloads(t *testing.T) {
	for seed := range int64(60) {
		r := rand.New(rand.NewPCG(uint64(seed), 0))
		set := newSet(int32(r.IntN(6)))
		if r.IntN(2) == 0 {
			parallel(set)
		}
		current, update := "r0", "r0"
		have := map[string]*corev1.Pod{}
		decide := func() Plan {
			var mine []*corev1.Pod
			for _, p := range have {
				mine = append(mine, p)
			}
			plan := Decide(Input{Set: set, Pods: mine, Current: current, Update: update, Now: now})
			set.Status, current = plan.Status, plan.Status.CurrentRevision
			return plan
		}
		step := func(faults bool) (changed bool) {
			plan := decide()
			if !strings.HasPrefix(string(set.Spec.PodManagementPolicy), "P") && len(plan.Create)+len(plan.Delete) > maxUnavailable(set) {
				t.Fatalf("seed %d: in order, but %s", seed, describe(plan))
			}
			lost := 0
			start, end := span(set)
			for _, p := range plan.Delete {
				if n := ordinalOf(set, p.Name); pods.Ready(p) && n >= start && n < end {
					lost++
				}
				p.DeletionTimestamp = ptr.To(metav1.NewTime(now))
				changed = true
			}
			down := 0
			for n := start; n < end; n++ {
				if p := have[podName(set, n)]; p == nil || !pods.Ready(p) || p.DeletionTimestamp != nil {
					down++
				}
			}
			if lost > 0 && down > max(maxUnavailable(set), down-lost) {
				t.Fatalf("seed %d: %d of %d are down after %s", seed, down, end-start, describe(plan))
			}
			for _, c := range plan.Create {
				p := newPod(set, &set.Spec.Template, c.Ordinal, c.Revision)
				if have[p.Name] != nil {
					t.Fatalf("seed %d: makes %s, which is there", seed, p.Name)
				}
				p.Status.Phase = corev1.PodPending
				have[p.Name] = p
				changed = true
			}
			// The node moves some pods on.
			for name, p := range have {
				switch {
				case faults && r.IntN(3) > 0:
				case p.DeletionTimestamp != nil:
					delete(have, name)
					changed = true
				case p.Labels[history.HashLabel] == "broken":
				case !pods.Ready(p) && !pods.Finished(p):
					(&schedtest.PodBuilder{P: p}).Ready(now)
					changed = true
				}
				if faults && r.IntN(20) == 0 {
					p.Status = corev1.PodStatus{Phase: []corev1.PodPhase{corev1.PodFailed, corev1.PodRunning}[r.IntN(2)]}
				}
			}
			return changed
		}
		for range 40 {
			switch r.IntN(8) {
			case 0:
				set.Spec.Replicas = ptr.To(int32(r.IntN(6)))
			case 1:
				update = []string{"r0", "r1", "r2", "broken"}[r.IntN(4)]
			case 2:
				set.Spec.Ordinals = &appsv1.StatefulSetOrdinals{Start: int32(r.IntN(3))}
			case 3:
				unavailable(intstr.FromInt32(int32(1 + r.IntN(2))))(set)
			}
			step(true)
		}
		update = "last"
		// In order a set that shrinks waits for its unhealthy pods, as its user
		// has to repair them: here the nodes do.
		for _, p := range have {
			if p.Labels[history.HashLabel] == "broken" && !pods.Finished(p) {
				(&schedtest.PodBuilder{P: p}).Ready(now)
			}
		}
		for i := 0; step(false); i++ {
			if i > 200 {
				t.Fatalf("seed %d: does not settle", seed)
			}
		}
		start, end := span(set)
		if len(have) != end-start || set.Status.UpdatedReplicas != int32(end-start) || current != "last" {
			t.Fatalf("seed %d: %d pods of %d, status %+v", seed, len(have), end-start, set.Status)
		}
		for n := start; n < end; n++ {
			if p := have[podName(set, n)]; p == nil || !pods.Ready(p) {
				t.Errorf("seed %d: no ready pod %d", seed, n)
			}
		}
	}
}

func TestNames(t *testing.T) {
	set := newSet(1)
	for name, want := range map[string]int{"db-0": 0, "db-12": 12, "db-01": -1, "db-": -1, "db--1": -1, "other-0": -1, "db-0-1": -1, "db-99999999999": -1} {
		if got := ordinalOf(set, name); got != want {
			t.Errorf("ordinal of %s is %d, want %d", name, got, want)
		}
	}
	set.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}}}
	set.Spec.Template.Spec.Volumes = []corev1.Volume{{Name: "data"}, {Name: "tmp"}}
	p := newPod(set, &set.Spec.Template, 3, "r")
	if p.Spec.Hostname != "db-3" || p.Spec.Subdomain != "db" || len(p.Spec.Volumes) != 2 || p.Spec.Volumes[0].PersistentVolumeClaim.ClaimName != "data-db-3" {
		t.Errorf("pod %+v", p.Spec)
	}
}

func TestClaimOwners(t *testing.T) {
	set := newSet(1)
	policy := func(deleted, scaled appsv1.PersistentVolumeClaimRetentionPolicyType) {
		set.Spec.PersistentVolumeClaimRetentionPolicy = &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{WhenDeleted: deleted, WhenScaled: scaled}
	}
	names := func(refs []metav1.OwnerReference) (out string) {
		for _, ref := range refs {
			out += ref.Kind + "/" + ref.Name + " "
		}
		return out
	}
	stranger := metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: "x", UID: "x"}
	stale := metav1.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: "db-0", UID: "before"}
	going := pod(set, "0 r ready")
	tests := []struct {
		deleted, scaled appsv1.PersistentVolumeClaimRetentionPolicyType
		condemned       *corev1.Pod
		want            string
	}{
		{"Retain", "Retain", nil, "ConfigMap/x "},
		{"Delete", "Retain", nil, "ConfigMap/x StatefulSet/db "},
		{"Delete", "Delete", nil, "ConfigMap/x StatefulSet/db "},
		{"Retain", "Delete", nil, "ConfigMap/x "},
		{"Retain", "Delete", going, "ConfigMap/x Pod/db-0 "},
		{"Delete", "Delete", going, "ConfigMap/x Pod/db-0 "},
		{"Delete", "Retain", going, "ConfigMap/x StatefulSet/db "},
	}
	for _, test := range tests {
		policy(test.deleted, test.scaled)
		if got := names(claimOwners(set, test.condemned, []metav1.OwnerReference{stranger, stale})); got != test.want {
			t.Errorf("whenDeleted %s, whenScaled %s, condemned %t: %s, want %s", test.deleted, test.scaled, test.condemned != nil, got, test.want)
		}
	}
}
