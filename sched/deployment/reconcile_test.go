package deployment

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/schedtest"
)

var now = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

// set is a ReplicaSet in short: image, spec replicas, available.
type set struct {
	image     string
	replicas  int32
	available int32
	desired   int32 // annotation; 0: the Deployment's
	max       int32 // annotation; 0: none
	revision  int
}

func deploy(n int32, image string, surge, unavailable int) *appsv1.Deployment {
	d := schedtest.Deployment("web", n)
	d.Spec.Template = schedtest.Template("web", image)
	d.Spec.Strategy.RollingUpdate.MaxSurge = ptr.To(intstr.FromInt(surge))
	d.Spec.Strategy.RollingUpdate.MaxUnavailable = ptr.To(intstr.FromInt(unavailable))
	return d
}

func sets(t *testing.T, d *appsv1.Deployment, in ...set) []*appsv1.ReplicaSet {
	t.Helper()
	var out []*appsv1.ReplicaSet
	for i, s := range in {
		like := d.DeepCopy()
		like.Spec.Template.Spec.Containers[0].Image = s.image
		rs, err := newReplicaSet(like)
		if err != nil {
			t.Fatal(err)
		}
		rs.UID = types.UID(rs.Name)
		rs.CreationTimestamp = metav1.NewTime(now.Add(time.Duration(i-100) * time.Hour))
		rs.Spec.Replicas = &s.replicas
		rs.Status.Replicas, rs.Status.AvailableReplicas, rs.Status.ReadyReplicas = s.replicas, s.available, s.available
		desired := s.desired
		if desired == 0 {
			desired = *d.Spec.Replicas
		}
		revision := s.revision
		if revision == 0 {
			revision = i + 1
		}
		rs.Annotations = map[string]string{
			desiredAnnotation: fmt.Sprint(desired), revisionAnnotation: fmt.Sprint(revision),
		}
		if s.max != 0 {
			rs.Annotations[maxAnnotation] = fmt.Sprint(s.max)
		}
		out = append(out, rs)
	}
	return out
}

// sizes applies the plan to the sets and returns image=replicas of each.
func sizes(plan Plan, sets []*appsv1.ReplicaSet) string {
	var out []string
	for _, rs := range sets {
		n := replicas(rs)
		for _, change := range plan.Update {
			if change.Set.Name == rs.Name {
				n = replicas(change.Set)
			}
		}
		out = append(out, fmt.Sprintf("%s=%d", rs.Spec.Template.Spec.Containers[0].Image, n))
	}
	if plan.Create != nil {
		out = append(out, fmt.Sprintf("%s=%d", plan.Create.Spec.Template.Spec.Containers[0].Image, replicas(plan.Create)))
	}
	return strings.Join(out, " ")
}

func TestDecideSizes(t *testing.T) {
	tests := []struct {
		name               string
		replicas           int32
		surge, unavailable int
		image              string
		sets               []set
		change             func(*appsv1.Deployment)
		running            bool
		want               string
	}{
		{"first", 3, 1, 1, "v1", nil, nil, false, "v1=3"},
		{"steady", 3, 1, 1, "v1", []set{{"v1", 3, 3, 0, 0, 0}}, nil, false, "v1=3"},
		{"new template: surge first", 10, 3, 2, "v2", []set{{"v1", 10, 10, 0, 0, 0}}, nil, false, "v1=10 v2=3"},
		{"no surge: down first", 3, 0, 1, "v2", []set{{"v1", 3, 3, 0, 0, 0}}, nil, false, "v1=2 v2=0"},
		{"down by what is unavailable at most", 10, 3, 2, "v2", []set{{"v1", 10, 10, 0, 0, 0}, {"v2", 3, 0, 0, 0, 0}}, nil, false, "v1=8 v2=3"},
		{"down by what became available", 10, 3, 2, "v2", []set{{"v1", 8, 8, 0, 0, 0}, {"v2", 5, 5, 0, 0, 0}}, nil, false, "v1=3 v2=5"},
		{"up into the room", 10, 3, 2, "v2", []set{{"v1", 3, 3, 0, 0, 0}, {"v2", 5, 5, 0, 0, 0}}, nil, false, "v1=3 v2=10"},
		{"stuck rollout keeps the old pods", 10, 3, 2, "v2", []set{{"v1", 8, 8, 0, 0, 0}, {"v2", 5, 0, 0, 0, 0}}, nil, false, "v1=8 v2=5"},
		{"broken old pods go first", 10, 3, 2, "v3", []set{{"v1", 8, 8, 0, 0, 0}, {"v2", 5, 0, 0, 0, 0}, {"v3", 0, 0, 0, 0, 0}}, nil, false, "v1=8 v2=0 v3=0"},
		{"undo", 3, 1, 1, "v1", []set{{"v1", 0, 0, 0, 0, 0}, {"v2", 3, 3, 0, 0, 0}}, nil, false, "v1=1 v2=3"},
		{"scale up", 5, 1, 1, "v1", []set{{"v1", 3, 3, 3, 4, 0}}, nil, false, "v1=5"},
		{"scale to zero", 0, 1, 1, "v1", []set{{"v1", 3, 3, 3, 4, 0}}, nil, false, "v1=0"},
		{"scale up in mid-rollout is shared", 20, 4, 0, "v2", []set{{"v1", 8, 8, 10, 12, 0}, {"v2", 4, 0, 10, 12, 0}}, nil, false, "v1=16 v2=8"},
		{"scale down in mid-rollout is shared", 5, 1, 0, "v2", []set{{"v1", 8, 8, 10, 12, 0}, {"v2", 4, 0, 10, 12, 0}}, nil, false, "v1=4 v2=2"},
		{"saturated: old pods go at once", 3, 1, 1, "v2", []set{{"v1", 2, 2, 5, 0, 0}, {"v2", 3, 3, 0, 0, 0}}, nil, false, "v1=0 v2=3"},
		{"paused: no rollout", 3, 1, 1, "v2", []set{{"v1", 3, 3, 0, 0, 0}}, paused, false, "v1=3"},
		{"paused: scaling works", 5, 1, 1, "v2", []set{{"v1", 3, 3, 3, 4, 0}}, paused, false, "v1=5"},
		{"recreate: down first", 3, 0, 0, "v2", []set{{"v1", 3, 3, 0, 0, 0}}, recreate, true, "v1=0"},
		{"recreate: waits for the end of pods", 3, 0, 0, "v2", []set{{"v1", 0, 0, 0, 0, 0}}, recreate, true, "v1=0"},
		{"recreate: then up", 3, 0, 0, "v2", []set{{"v1", 0, 0, 0, 0, 0}}, recreate, false, "v1=0 v2=3"},
		{"deleting: nothing", 3, 1, 1, "v2", []set{{"v1", 3, 3, 0, 0, 0}}, deleting, false, "v1=3"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			d := deploy(test.replicas, test.image, test.surge, test.unavailable)
			if test.change != nil {
				test.change(d)
			}
			in := sets(t, d, test.sets...)
			plan, err := Decide(Input{Deployment: d, Sets: in, Running: func(*appsv1.ReplicaSet) bool { return test.running }, Now: now})
			if err != nil {
				t.Fatal(err)
			}
			if got := sizes(plan, in); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

func paused(d *appsv1.Deployment)   { d.Spec.Paused = true }
func deleting(d *appsv1.Deployment) { d.DeletionTimestamp = &metav1.Time{Time: now} }
func recreate(d *appsv1.Deployment) {
	d.Spec.Strategy = appsv1.DeploymentStrategy{Type: appsv1.RecreateDeploymentStrategyType}
}

// A status that still counts pods which are about to go must not take away
// more than maxUnavailable.
func TestStaleAvailability(t *testing.T) {
	d := deploy(10, "v2", 3, 2)
	in := sets(t, d, set{image: "v1", replicas: 8, available: 8}, set{image: "v2", replicas: 3, available: 1})
	in[0].Status.Replicas, in[0].Status.AvailableReplicas = 10, 10
	plan, err := Decide(Input{Deployment: d, Sets: in, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := sizes(plan, in), "v1=7 v2=3"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// Whatever happens, a rollout ends, and on the way never has more than
// maxSurge pods too many or maxUnavailable too few.
func TestRolloutConverges(t *testing.T) {
	for _, n := range []int32{0, 1, 2, 3, 7, 30} {
		for surge := range 4 {
			for unavailable := range 4 {
				if surge+unavailable == 0 {
					continue
				}
				t.Run(fmt.Sprintf("%d+%d-%d", n, surge, unavailable), func(t *testing.T) {
					d := deploy(n, "v2", surge, unavailable)
					world := sets(t, d, set{image: "v1", replicas: n, available: n})
					for step := 0; ; step++ {
						if step > 200 {
							t.Fatalf("no end: %s", sizes(Plan{}, world))
						}
						plan, err := Decide(Input{Deployment: d, Sets: world, Now: now})
						if err != nil {
							t.Fatal(err)
						}
						d.Status = plan.Status
						if complete(d, &d.Status) && len(plan.Update) == 0 {
							return
						}
						if plan.Create != nil {
							plan.Create.UID = types.UID(plan.Create.Name)
							plan.Create.CreationTimestamp = metav1.NewTime(now)
							world = append(world, plan.Create)
						}
						for _, change := range plan.Update {
							i := slices.IndexFunc(world, func(rs *appsv1.ReplicaSet) bool { return rs.Name == change.Set.Name })
							world[i] = change.Set
						}
						serves := int32(0)
						for _, rs := range world {
							serves += serving(rs)
						}
						if got, least := serves, n-int32(unavailable); got < least {
							t.Fatalf("%d available, want at least %d", got, least)
						}
						if got, most := total(world), n+int32(surge); got > most {
							t.Fatalf("%d pods, want at most %d", got, most)
						}
						// The pods of one set after another come up.
						rs := world[step%len(world)]
						rs.Status.Replicas, rs.Status.AvailableReplicas, rs.Status.ReadyReplicas = replicas(rs), replicas(rs), replicas(rs)
					}
				})
			}
		}
	}
}

func TestRevisions(t *testing.T) {
	d := deploy(3, "v1", 1, 1)
	d.Annotations = map[string]string{"note": "x", "kubectl.kubernetes.io/last-applied-configuration": "{}", revisionAnnotation: "2"}
	in := sets(t, d, set{image: "v1", revision: 1}, set{image: "v2", replicas: 3, available: 3, revision: 2})
	plan, err := Decide(Input{Deployment: d, Sets: in, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	if plan.Revision != "3" {
		t.Errorf("revision %q, want 3", plan.Revision)
	}
	got := plan.Update[0].Set.Annotations
	want := map[string]string{
		"note": "x", revisionAnnotation: "3", revisionHistoryAnnotation: "1",
		desiredAnnotation: "3", maxAnnotation: "4",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("annotations (-want +got):\n%s", diff)
	}
}

func TestHistoryLimit(t *testing.T) {
	d := deploy(1, "v4", 1, 1)
	d.Spec.RevisionHistoryLimit = ptr.To[int32](1)
	in := sets(t, d, set{image: "v1"}, set{image: "v2"}, set{image: "v3"}, set{image: "v4", replicas: 1, available: 1})
	in[1].Status.Replicas = 1 // still has a pod
	plan, err := Decide(Input{Deployment: d, Sets: in, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	if len(plan.Delete) != 0 {
		t.Fatalf("deletes history before the rollout is complete")
	}
	in[1].Status.Replicas = 0
	in[1].Generation = 2 // spec not acted on
	if plan, err = Decide(Input{Deployment: d, Sets: in, Now: now}); err != nil {
		t.Fatal(err)
	}
	if len(plan.Delete) != 1 || plan.Delete[0].Name != in[0].Name {
		t.Errorf("deletes %v, want %s alone", plan.Delete, in[0].Name)
	}
}

func TestProgressing(t *testing.T) {
	const limit = 600 * time.Second
	d := deploy(3, "v2", 1, 1)
	old := set{image: "v1", replicas: 3, available: 3}
	step := func(at time.Duration, in ...set) (string, time.Duration) {
		t.Helper()
		plan, err := Decide(Input{Deployment: d, Sets: sets(t, d, in...), Now: now.Add(at)})
		if err != nil {
			t.Fatal(err)
		}
		d.Status = plan.Status
		c := condition(&d.Status, appsv1.DeploymentProgressing)
		if c == nil {
			return "", plan.Recheck
		}
		return fmt.Sprintf("%s %s", c.Status, c.Reason), plan.Recheck
	}
	check := func(got, want string) {
		t.Helper()
		if got != want {
			t.Fatalf("Progressing is %q, want %q", got, want)
		}
	}
	got, recheck := step(0, old)
	check(got, "True NewReplicaSetCreated")
	if recheck != limit+time.Second {
		t.Errorf("recheck after %v", recheck)
	}
	got, _ = step(time.Minute, old, set{image: "v2", replicas: 1, available: 0})
	check(got, "True ReplicaSetUpdated")
	got, _ = step(time.Minute+limit-time.Second, old, set{image: "v2", replicas: 1, available: 0})
	check(got, "True ReplicaSetUpdated")
	got, recheck = step(time.Minute+limit, old, set{image: "v2", replicas: 1, available: 0})
	check(got, "False ProgressDeadlineExceeded")
	if recheck != 0 {
		t.Errorf("a missed deadline is looked at again after %v", recheck)
	}
	got, _ = step(2*limit, set{image: "v1", replicas: 2, available: 2}, set{image: "v2", replicas: 2, available: 1})
	check(got, "True ReplicaSetUpdated")
	got, _ = step(2*limit, set{image: "v1"}, set{image: "v2", replicas: 3, available: 3})
	check(got, "True NewReplicaSetAvailable")
	got, _ = step(9*limit, set{image: "v1"}, set{image: "v2", replicas: 3, available: 1})
	check(got, "True NewReplicaSetAvailable") // a pod that fails later has no deadline
	d.Spec.Paused = true
	got, _ = step(9*limit, set{image: "v1"}, set{image: "v2", replicas: 3, available: 3})
	check(got, "Unknown DeploymentPaused")
	d.Spec.Paused = false
	got, _ = step(9*limit, set{image: "v1"}, set{image: "v2", replicas: 3, available: 2})
	check(got, "Unknown DeploymentResumed")
	d.Spec.ProgressDeadlineSeconds = nil
	got, _ = step(9*limit, set{image: "v1"}, set{image: "v2", replicas: 3, available: 3})
	check(got, "")
}

func TestTemplateHash(t *testing.T) {
	template := schedtest.Template("web", "v1")
	hash := func(collisions *int32) string {
		t.Helper()
		h, err := templateHash(&template, collisions)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	// Golden: if this changes, every Deployment's next ReplicaSet gets another
	// name. That is allowed, but should be meant.
	if got, want := hash(nil), "db6d5fb4f"; got != want {
		t.Errorf("hash %s, want %s", got, want)
	}
	if hash(nil) == hash(ptr.To[int32](1)) {
		t.Error("a collision does not change the hash")
	}
	labelled := template.DeepCopy()
	labelled.Labels[hashLabel] = "x"
	if h, _ := templateHash(labelled, nil); h != hash(nil) {
		t.Error("the hash label is part of the hash")
	}
	if !sameTemplate(labelled, &template) {
		t.Error("the hash label makes templates differ")
	}
}
