package scheduler

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/clusterd/clusterd/sched/replicaset"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// within has the preferred terms of a pod reach into namespaces with the label too.
func within(b *schedtest.PodBuilder, k, v string) *schedtest.PodBuilder {
	for _, w := range b.P.Spec.Affinity.PodAffinity.PreferredDuringSchedulingIgnoredDuringExecution {
		w.PodAffinityTerm.NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{k: v}}
		b.P.Spec.Affinity.PodAffinity.PreferredDuringSchedulingIgnoredDuringExecution[0] = w
	}
	return b
}

func inNamespace(b *schedtest.PodBuilder, namespace string) *schedtest.PodBuilder {
	b.P.Namespace = namespace
	return b
}

// TestScorePodAffinity: terms of the pod that comes count, and those of the pods that
// are there.
func TestScorePodAffinity(t *testing.T) {
	pod := schedtest.Pod
	pods := func(p ...*schedtest.PodBuilder) []*schedtest.PodBuilder { return p }
	web := func() *schedtest.PodBuilder { return pod("web").Label("app", "web") }
	for _, test := range []struct {
		name       string
		placed     []*schedtest.PodBuilder
		pod        *schedtest.PodBuilder
		args       string // of the plugin
		a, b, c, d int64  // nodes a and b are in zone 1, c is in 2, d in none
	}{
		{name: "nobody wishes anything", placed: pods(pod("x").Label("app", "db").On("a")), pod: web()},
		{name: "the pod wishes", placed: pods(pod("x").Label("app", "db").On("a"), pod("y").Label("app", "db").On("c"), pod("z").Label("app", "db").On("b")),
			pod: web().Prefer(10, "zone", "app", "db"), a: 20, b: 20, c: 10},
		{name: "placed pods wish for it", placed: pods(pod("x").On("a").Prefer(10, "zone", "app", "web"), pod("y").On("b").Prefer(5, "zone", "app", "web"), pod("z").On("c").Prefer(100, "zone", "app", "other")),
			pod: web(), a: 15, b: 15},
		{name: "placed pods wish that it were elsewhere", placed: pods(pod("x").On("a").Prefer(-10, "zone", "app", "web"), pod("y").On("c").Prefer(-3, corev1.LabelHostname, "app", "web")),
			pod: web(), a: -10, b: -10, c: -3},
		{name: "both wish", placed: pods(pod("x").Label("app", "db").On("a").Prefer(10, "zone", "app", "web")), pod: web().Prefer(-4, "zone", "app", "db"), a: 6, b: 6},
		{name: "wishes that cancel each other out", placed: pods(pod("x").On("a").Prefer(10, "zone", "app", "web").Prefer(-10, "zone", "app", "web")), pod: web()},
		{name: "a placed pod needs it near", placed: pods(pod("x").On("c").Together("zone", "app", "web"), pod("y").On("c").Together("zone", "app", "web")), pod: web(), c: 2},
		{name: "by another weight", placed: pods(pod("x").On("c").Together("zone", "app", "web"), pod("y").On("a").Prefer(7, "zone", "app", "web")), pod: web(),
			args: "hardPodAffinityWeight: 50", a: 7, b: 7, c: 50},
		{name: "by none", placed: pods(pod("x").On("c").Together("zone", "app", "web"), pod("y").On("a").Prefer(7, "zone", "app", "web")), pod: web(),
			args: "hardPodAffinityWeight: 0", a: 7, b: 7},
		{name: "required anti-affinity is no wish", placed: pods(pod("x").On("a").Apart("zone", "app", "web")), pod: web()},
		{name: "those of placed pods are ignored", placed: pods(pod("x").On("a").Prefer(7, "zone", "app", "web"), pod("y").On("c").Together("zone", "app", "web")), pod: web(),
			args: "ignorePreferredTermsOfExistingPods: true"},
		{name: "but not for a pod with wishes", placed: pods(pod("x").On("a").Prefer(7, "zone", "app", "web"), pod("y").Label("app", "db").On("c")), pod: web().Prefer(1, "zone", "app", "db"),
			args: "ignorePreferredTermsOfExistingPods: true", a: 7, b: 7, c: 1},
		{name: "of another namespace", placed: pods(inNamespace(pod("x"), "far").On("a").Prefer(7, "zone", "app", "web")), pod: web()},
		{name: "into another namespace by its labels", placed: pods(within(inNamespace(pod("x"), "far").Prefer(7, "zone", "app", "web"), "team", "red").On("a")), pod: web(), a: 7, b: 7},
		{name: "into namespaces with other labels", placed: pods(within(inNamespace(pod("x"), "far").Prefer(7, "zone", "app", "web"), "team", "blue").On("a")), pod: web()},
		{name: "a pod that has ended wishes nothing", placed: pods(pod("x").On("a").Prefer(7, "zone", "app", "web").Phase(corev1.PodSucceeded)), pod: web()},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := world([]*schedtest.NodeBuilder{
				schedtest.Node("a").Label("zone", "1").Label(corev1.LabelHostname, "a"), schedtest.Node("b").Label("zone", "1").Label(corev1.LabelHostname, "b"),
				schedtest.Node("c").Label("zone", "2").Label(corev1.LabelHostname, "c"), schedtest.Node("d"),
			}, test.placed...)
			s.setNamespace("default", labels.Set{"team": "red"})
			cfg, err := ReadConfig([]byte(configHead + "profiles: [{pluginConfig: [{name: InterPodAffinity, args: {" + test.args + "}}]}]"))
			if err != nil {
				t.Fatal(err)
			}
			s.profiles = profilesOf(cfg.profiles...)
			got := map[string]int64{}
			if of := scorePodAffinity(s, newPodInfo(test.pod.Obj())); of != nil {
				for name, n := range s.nodes {
					if v := of(n); v != 0 {
						got[name] = v
					}
				}
			}
			want := map[string]int64{"a": test.a, "b": test.b, "c": test.c, "d": test.d}
			maps.DeleteFunc(want, func(_ string, v int64) bool { return v == 0 })
			if !maps.Equal(got, want) {
				t.Errorf("%v, want %v", got, want)
			}
		})
	}
}

// TestPlacedPodsDrawOthers: the scheduler's choice follows from it.
func TestPlacedPodsDrawOthers(t *testing.T) {
	nodes := []*schedtest.NodeBuilder{schedtest.Node("a").Label("zone", "1"), schedtest.Node("b").Label("zone", "2")}
	for weight, want := range map[int32]string{50: "a", -50: "b"} {
		s := world(nodes, schedtest.Pod("x").On("a").CPU("100m").Prefer(weight, "zone", "app", "web"), schedtest.Pod("y").On("b").CPU("100m"))
		for range 20 { // equal nodes would share by chance
			p := newPodInfo(schedtest.Pod("web").Label("app", "web").CPU("100m").Obj())
			if got := best(s, p, runFilters(s, p).fit).name; got != want {
				t.Fatalf("weight %d: chose %s, want %s", weight, got, want)
			}
		}
	}
}

// TestHeldTermsAreFound: what is found by namespaces and labels are the terms that
// match, each once, whatever has come and gone.
func TestHeldTermsAreFound(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	some := func(list ...string) string { return list[r.IntN(len(list))] }
	random := func(i int) *podInfo {
		b := inNamespace(schedtest.Pod(fmt.Sprint("p", i)), some("default", "far", "near")).Label("app", some("a", "b", "c")).On(some("n1", "n2", "n3"))
		if r.IntN(2) == 0 {
			b.Label("tier", some("x", "y"))
		}
		if r.IntN(3) > 0 {
			b.Apart("zone", some("app", "tier"), some("a", "b", "x"))
			term := &b.P.Spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution[0]
			switch r.IntN(5) {
			case 0:
				term.NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"team": some("red", "blue")}}
			case 1:
				term.Namespaces = []string{"far", "near"}
			case 2:
				term.LabelSelector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "app", Operator: metav1.LabelSelectorOpNotIn, Values: []string{"a"}}}}
			case 3:
				term.LabelSelector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "app", Operator: metav1.LabelSelectorOpIn, Values: []string{"a", "b"}}, {Key: "tier", Operator: metav1.LabelSelectorOpIn, Values: []string{"x"}}}}
			}
			if r.IntN(8) == 0 {
				term.LabelSelector = nil // no pod
			}
		}
		return newPodInfo(b.Obj())
	}
	s := newSnapshot()
	for _, n := range []string{"n1", "n2", "n3"} {
		s.setNode(schedtest.Node(n).Label("zone", n).Obj())
	}
	s.setNamespace("far", labels.Set{"team": "red"})
	s.setNamespace("near", labels.Set{"team": "blue"})
	found := 0
	for step := range 3000 {
		s.setPod(random(r.IntN(40)).pod)
		if r.IntN(3) == 0 {
			s.removePod(random(r.IntN(40)).pod.UID)
		}
		p := random(1000)
		want, got := map[string]int{}, map[string]int{}
		for _, n := range s.list {
			for _, placed := range n.pods {
				for i := range placed.repel {
					if placed.repel[i].matches(s, p.pod) {
						want[placed.repel[i].id] = 1
					}
				}
			}
		}
		s.repelling.concerning(s, p, func(e *held) { got[e.id]++ })
		if !maps.Equal(got, want) {
			t.Fatalf("step %d: found %v, want %v", step, got, want)
		}
		found += len(got)
	}
	if found == 0 {
		t.Error("no term was ever found: this shows nothing")
	}
	for uid := range maps.Clone(s.placed) {
		s.removePod(uid)
	}
	if len(s.repelling.byID)+len(s.repelling.at) > 0 {
		t.Errorf("left behind: %v, %v", s.repelling.byID, s.repelling.at)
	}
}

// BenchmarkWishesOfPlacedPods is one decision about a plain pod, where all placed pods
// wish to be apart from their like: of few templates and of many.
func BenchmarkWishesOfPlacedPods(b *testing.B) {
	rs := schedtest.ReplicaSet("web", 1)
	for _, size := range []struct{ nodes, pods, templates int }{{100, 400, 1}, {5000, 10_000, 1}, {5000, 50_000, 1}, {5000, 10_000, 1000}} {
		b.Run(fmt.Sprintf("nodes=%d/pods=%d/templates=%d", size.nodes, size.pods, size.templates), func(b *testing.B) {
			s := newSnapshot()
			for i := range size.nodes {
				name := fmt.Sprint("n", i)
				s.setNode(schedtest.Node(name).Label("zone", fmt.Sprint(i%3)).Label(corev1.LabelHostname, name).Has("pods", "1000000").Obj())
			}
			for i := range size.pods {
				app := fmt.Sprint("app", i%size.templates)
				s.assume(newPodInfo(schedtest.Pod(fmt.Sprint("p", i)).Label("app", app).CPU("1m").Prefer(-10, "zone", "app", app).Obj()), fmt.Sprint("n", i%size.nodes))
			}
			made := 0
			b.ReportAllocs()
			for b.Loop() {
				made++
				p := newPodInfo(schedtest.Pod(fmt.Sprint("new", made)).Label("app", "app0").CPU("1m").OwnedBy(rs, replicaset.Kind).Obj())
				s.assume(p, best(s, p, runFilters(s, p).fit).name)
			}
		})
	}
}
