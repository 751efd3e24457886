package deployment

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// model is a Deployment with its ReplicaSets, and what becomes of their pods.
type model struct {
	t     *testing.T
	what  string
	r     *rand.Rand
	d     *appsv1.Deployment
	sets  []*appsv1.ReplicaSet
	clock time.Time
}

func imageOf(rs *appsv1.ReplicaSet) string { return rs.Spec.Template.Spec.Containers[0].Image }

func (m *model) running(rs *appsv1.ReplicaSet) bool { return rs.Status.Replicas > 0 }

// pass decides, looks whether promises are kept, and carries it out.
func (m *model) pass() (plan Plan, changed bool) {
	m.t.Helper()
	plan, err := Decide(Input{Deployment: m.d, Sets: m.sets, Running: m.running, Now: m.clock})
	if err != nil {
		m.t.Fatalf("%s: %v", m.what, err)
	}
	scaled := scalingEvent(m.d, m.sets)
	after := slices.Clone(m.sets)
	for _, c := range plan.Update {
		i := slices.IndexFunc(after, func(rs *appsv1.ReplicaSet) bool { return rs.Name == c.Set.Name })
		after[i] = c.Set.DeepCopy()
	}
	if plan.Create != nil {
		for _, rs := range m.sets {
			if sameTemplate(&rs.Spec.Template, &plan.Create.Spec.Template) {
				m.t.Fatalf("%s: a second set of image %s", m.what, imageOf(rs))
			}
		}
		fresh := plan.Create.DeepCopy()
		fresh.UID, fresh.CreationTimestamp = types.UID(fresh.Name), metav1.NewTime(m.clock)
		after = append(after, fresh)
	}
	m.check(after, scaled)
	for _, gone := range plan.Delete {
		after = slices.DeleteFunc(after, func(rs *appsv1.ReplicaSet) bool { return rs.Name == gone.Name })
		if replicas(gone) > 0 || gone.Status.Replicas > 0 {
			m.t.Fatalf("%s: a set with pods is deleted: %s", m.what, imageOf(gone))
		}
	}
	changed = plan.Create != nil || len(plan.Update)+len(plan.Delete) > 0
	m.sets, m.d.Status = after, plan.Status
	if plan.Revision != "" {
		m.d.Annotations = map[string]string{revisionAnnotation: plan.Revision}
	}
	return plan, changed
}

// check compares what the pass made of the sets with what the spec promises. A change
// of the number of replicas is shared out whatever is available.
func (m *model) check(after []*appsv1.ReplicaSet, scaled bool) {
	m.t.Helper()
	serves := func(sets []*appsv1.ReplicaSet) (n int32) {
		for _, rs := range sets {
			n += serving(rs)
		}
		return n
	}
	want := ptr.Deref(m.d.Spec.Replicas, 1)
	surge, unavailable := bounds(m.d)
	switch {
	case scaled:
	case m.d.Spec.Paused:
		if len(after) > len(m.sets) || total(after) > max(total(m.sets), want+surge) {
			m.t.Fatalf("%s: paused, and %d pods of %d sets become %d of %d", m.what, total(m.sets), len(m.sets), total(after), len(after))
		}
	case m.d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType:
		for _, rs := range after {
			if sameTemplate(&rs.Spec.Template, &m.d.Spec.Template) {
				continue
			}
			grown := slices.ContainsFunc(after, func(now *appsv1.ReplicaSet) bool {
				i := slices.IndexFunc(m.sets, func(was *appsv1.ReplicaSet) bool { return was.Name == now.Name })
				return i < 0 && replicas(now) > 0 || i >= 0 && replicas(now) > replicas(m.sets[i])
			})
			if grown && m.running(rs) {
				m.t.Fatalf("%s: recreated while %s has %d pods", m.what, imageOf(rs), rs.Status.Replicas)
			}
		}
	default:
		if got, most := total(after), max(total(m.sets), want+surge); got > most {
			m.t.Fatalf("%s: %d pods, at most %d may be", m.what, got, most)
		}
		if got, least := serves(after), min(serves(m.sets), want-unavailable); got < least {
			m.t.Fatalf("%s: %d serve, at least %d should", m.what, got, least)
		}
	}
}

// live moves the pods of some sets on; with faults some fail, and of a broken image
// none ever serves.
func (m *model) live(faults bool) (changed bool) {
	for i, rs := range m.sets {
		if faults && m.r.IntN(3) == 0 {
			continue
		}
		rs = rs.DeepCopy()
		have := replicas(rs)
		up := have
		if imageOf(rs) == "broken" {
			up = 0
		} else if faults && have > 0 {
			up = m.r.Int32N(have + 1)
		}
		if rs.Status.Replicas != have || rs.Status.AvailableReplicas != up {
			changed = true
		}
		rs.Status.Replicas, rs.Status.ReadyReplicas, rs.Status.AvailableReplicas = have, up, up
		m.sets[i] = rs
	}
	return changed
}

// Any sequence of changes of the spec (template, replicas, bounds, strategy, pause, a
// way back), of pods that fail and of a clock that jumps keeps the promises of the
// strategy on the way, and ends in what the spec says.
func TestRandomWorkloads(t *testing.T) {
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 7))
		m := &model{t: t, r: r, d: deploy(r.Int32N(8), "v0", 1, 1), clock: now}
		image := func(name string) { m.d.Spec.Template = schedtest.Template("web", name) }
		for step := range 80 {
			m.what = fmt.Sprintf("seed %d, step %d", seed, step)
			switch r.IntN(14) {
			case 0:
				m.d.Spec.Replicas = ptr.To(r.Int32N(9))
			case 1, 2:
				image([]string{"v0", "v1", "v2", "broken"}[r.IntN(4)])
			case 3:
				m.d.Spec.Paused = !m.d.Spec.Paused
			case 4:
				surge, unavailable := intstr.FromInt32(r.Int32N(3)), intstr.FromString([]string{"25%", "50%", "1"}[r.IntN(3)])
				if unavailable.StrVal == "1" {
					unavailable = intstr.FromInt32(1)
				}
				m.d.Spec.Strategy = appsv1.DeploymentStrategy{Type: appsv1.RollingUpdateDeploymentStrategyType, RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: &surge, MaxUnavailable: &unavailable}}
			case 5:
				recreate(m.d)
			case 6:
				m.clock = m.clock.Add(time.Duration(r.IntN(4000)-1000) * time.Second)
			}
			m.d.Generation++
			m.pass()
			m.live(true)
		}
		image("last")
		m.d.Spec.Paused = false
		for step := 0; ; step++ {
			m.what = fmt.Sprintf("seed %d, settling %d", seed, step)
			m.clock = m.clock.Add(time.Second)
			_, decided := m.pass()
			if moved := m.live(false); !decided && !moved {
				break
			}
			if step > 200 {
				t.Fatalf("seed %d does not settle", seed)
			}
		}
		want := ptr.Deref(m.d.Spec.Replicas, 1)
		for _, rs := range m.sets {
			n := int32(0)
			if imageOf(rs) == "last" {
				n = want
			}
			if replicas(rs) != n {
				t.Errorf("seed %d: %d of image %s, want %d", seed, replicas(rs), imageOf(rs), n)
			}
		}
		if s := m.d.Status; s.Replicas != want || s.UpdatedReplicas != want || s.AvailableReplicas != want || !complete(m.d, &s) {
			t.Errorf("seed %d: %d wanted, status %+v", seed, want, s)
		}
	}
}
