package job

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/internal/seconds"
	"github.com/clusterd/clusterd/sched/schedtest"
)

var now = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

func newJob(edit ...func(*batchv1.Job)) *batchv1.Job {
	j := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: "pi", Namespace: schedtest.Namespace, UID: "job", Generation: 1},
		Spec: batchv1.JobSpec{
			Parallelism: ptr.To[int32](1), Completions: ptr.To[int32](1), BackoffLimit: ptr.To[int32](6),
			Template: schedtest.Template("pi", "v1"),
		},
		Status: batchv1.JobStatus{StartTime: ptr.To(metav1.NewTime(now.Add(-time.Minute)))},
	}
	j.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	for _, e := range edit {
		e(j)
	}
	return j
}

func size(parallel, completions int32) func(*batchv1.Job) {
	return func(j *batchv1.Job) {
		j.Spec.Parallelism, j.Spec.Completions = &parallel, &completions
		if completions < 0 {
			j.Spec.Completions = nil
		}
	}
}

func index(j *batchv1.Job) { j.Spec.CompletionMode = ptr.To(batchv1.IndexedCompletion) }

func perIndexLimit(n int32) func(*batchv1.Job) {
	return func(j *batchv1.Job) { index(j); j.Spec.BackoffLimitPerIndex = &n }
}

func limit(n int32) func(*batchv1.Job) { return func(j *batchv1.Job) { j.Spec.BackoffLimit = &n } }

func suspended(j *batchv1.Job) { j.Spec.Suspend = ptr.To(true) }

func replaceFailed(j *batchv1.Job) { j.Spec.PodReplacementPolicy = ptr.To(batchv1.Failed) }

func decided(kind batchv1.JobConditionType) func(*batchv1.Job) {
	return func(j *batchv1.Job) {
		j.Status.Conditions = append(j.Status.Conditions, batchv1.JobCondition{Type: kind, Status: corev1.ConditionTrue, Reason: "R", LastTransitionTime: metav1.NewTime(now)})
	}
}

func policy(rules ...batchv1.PodFailurePolicyRule) func(*batchv1.Job) {
	return func(j *batchv1.Job) { j.Spec.PodFailurePolicy = &batchv1.PodFailurePolicy{Rules: rules} }
}

func onCode(action batchv1.PodFailurePolicyAction, codes ...int32) batchv1.PodFailurePolicyRule {
	return batchv1.PodFailurePolicyRule{Action: action, OnExitCodes: &batchv1.PodFailurePolicyOnExitCodesRequirement{Operator: batchv1.PodFailurePolicyOnExitCodesOpIn, Values: codes}}
}

// pod is written "a running", "b failed 42 1m", "c succeeded i3": name, then
// what is true of it: phase, exit code, how long ago it ended, index.
func pod(j *batchv1.Job, text string) *corev1.Pod {
	words := strings.Fields(text)
	n := Create{Index: -1}
	for _, w := range words {
		if i, err := strconv.Atoi(strings.TrimPrefix(w, "i")); err == nil && strings.HasPrefix(w, "i") {
			n.Index = i
		}
		if f, err := strconv.Atoi(strings.TrimPrefix(w, "x")); err == nil && strings.HasPrefix(w, "x") {
			n.Failures = f
		}
	}
	p := newPod(j, n)
	p.Name, p.UID = words[0], types.UID("uid-"+words[0])
	b := (&schedtest.PodBuilder{P: p}).Phase(corev1.PodPending).Created(now.Add(-time.Hour))
	code, ago := int32(0), time.Hour
	for _, w := range words[1:] {
		switch {
		case w == "running":
			b.Ready(now.Add(-time.Minute)).On("n1")
		case w == "succeeded":
			b.Phase(corev1.PodSucceeded)
		case w == "failed":
			b.Phase(corev1.PodFailed)
			code = 1
		case w == "going":
			b.Deleting(now)
		case w == "counted":
			p.Finalizers = nil
		case strings.HasPrefix(w, "code"):
			n, _ := strconv.Atoi(w[4:])
			code = int32(n)
		case strings.HasPrefix(w, "-"):
			d, err := time.ParseDuration(w[1:])
			if err != nil {
				panic(err)
			}
			ago = d
		}
	}
	if pods.Finished(p) {
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, FinishedAt: metav1.NewTime(now.Add(-ago))}}}}
	}
	return p
}

func describe(j *batchv1.Job, p Plan) string {
	var out []string
	names := func(sign string, list []*corev1.Pod) {
		var n []string
		for _, pod := range list {
			n = append(n, sign+pod.Name)
		}
		slices.Sort(n)
		out = append(out, n...)
	}
	names("release ", p.Release)
	names("drop ", p.Drop)
	names("stop ", p.Stop)
	for _, c := range p.Create {
		if c.Index < 0 {
			out = append(out, "+")
		} else if c.Failures+c.Ignored > 0 {
			out = append(out, fmt.Sprintf("+%d(%d,%d)", c.Index, c.Failures, c.Ignored))
		} else {
			out = append(out, fmt.Sprintf("+%d", c.Index))
		}
	}
	for _, c := range p.Status.Conditions {
		if old := condition(&j.Status, c.Type); old == nil || old.Status != c.Status {
			out = append(out, fmt.Sprintf("%s=%s %s", c.Type, c.Status, c.Reason))
		}
	}
	if p.Recheck > 0 {
		out = append(out, "wait "+p.Recheck.String())
	}
	if p.Expired {
		out = append(out, "expired")
	}
	return strings.Join(out, "; ")
}

func TestDecide(t *testing.T) {
	tests := []struct {
		name string
		job  *batchv1.Job
		pods []string
		want string
	}{
		{"one", newJob(), nil, "+"},
		{"as many as may run", newJob(size(3, 5)), []string{"a running"}, "+; +"},
		{"no more than are missing", newJob(size(3, 5), func(j *batchv1.Job) { j.Status.Succeeded = 4 }), nil, "+"},
		{"too many", newJob(size(1, 5)), []string{"a running", "b"}, "drop b"},
		{"an end is noted first", newJob(size(2, 2)), []string{"a succeeded", "b running"}, "release a"},
		{"the last end", newJob(size(2, 2), func(j *batchv1.Job) { j.Status.Succeeded = 1 }), []string{"b succeeded"}, "release b; SuccessCriteriaMet=True CompletionsReached"},
		{"complete when counted", newJob(decided(batchv1.JobSuccessCriteriaMet), func(j *batchv1.Job) { j.Status.Succeeded = 1 }), []string{"a succeeded counted"}, "Complete=True R"},
		{"not while one goes", newJob(decided(batchv1.JobSuccessCriteriaMet)), []string{"a going running"}, "release a"},
		{"work queue", newJob(size(3, -1)), []string{"a running"}, "+; +"},
		{"work queue is empty", newJob(size(3, -1)), []string{"a running", "b succeeded"}, "release b"},
		{"work queue is done", newJob(size(3, -1), func(j *batchv1.Job) { j.Status.Succeeded = 1 }), []string{"b succeeded counted"}, "SuccessCriteriaMet=True CompletionsReached"},

		{"a failure pauses", newJob(), []string{"a failed -4s"}, "release a; wait 6s"},
		{"two pause twice as long", newJob(), []string{"a failed counted -1m", "b failed -4s"}, "release b; wait 16s"},
		{"the pause is over", newJob(), []string{"a failed counted -11s"}, "+"},
		{"a success ends the row", newJob(size(1, 3)), []string{"a failed counted -4s", "b succeeded counted -2s"}, "+"},
		{"limit", newJob(limit(0)), []string{"a failed"}, "release a; FailureTarget=True BackoffLimitExceeded"},
		{"limit stops the others", newJob(limit(0), size(2, 2)), []string{"a failed", "b running"}, "release a; stop b; FailureTarget=True BackoffLimitExceeded"},
		{"failed when all are counted", newJob(decided(batchv1.JobFailureTarget)), []string{"a failed counted"}, "Failed=True R"},
		{"deadline", newJob(func(j *batchv1.Job) { j.Spec.ActiveDeadlineSeconds = ptr.To[int64](60) }), []string{"a running"}, "stop a; FailureTarget=True DeadlineExceeded"},
		{"before the deadline", newJob(func(j *batchv1.Job) { j.Spec.ActiveDeadlineSeconds = ptr.To[int64](61) }), []string{"a running"}, "wait 1s"},
		{"deleted pods count at once", newJob(), []string{"a running going"}, "release a; wait 10s"},
		{"or when they have ended", newJob(replaceFailed), []string{"a running going"}, ""},

		{"suspended", newJob(suspended), []string{"a running"}, "drop a; Suspended=True JobSuspended"},
		{"resumed", newJob(func(j *batchv1.Job) {
			j.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobSuspended, Status: corev1.ConditionTrue}}
		}), nil, "+; Suspended=False JobResumed"},

		{"indexes", newJob(size(3, 5), index, func(j *batchv1.Job) { j.Status.CompletedIndexes = "0,2" }), []string{"a running i1"}, "+3; +4"},
		{"an index ends", newJob(size(2, 2), index), []string{"a succeeded i1"}, "release a; +0"},
		{"all indexes", newJob(size(2, 2), index), []string{"a succeeded i1", "b succeeded i0"}, "release a; release b; SuccessCriteriaMet=True CompletionsReached"},
		{"two of one index", newJob(size(2, 2), index), []string{"a running i0", "b running i0"}, "drop a; +1"},
		{"no index of this job", newJob(size(2, 2), index), []string{"a running i7"}, "drop a; +0; +1"},
		{"none", newJob(size(1, 0)), nil, "SuccessCriteriaMet=True CompletionsReached"},

		{"index fails, remembered until replaced", newJob(size(2, 2), perIndexLimit(1)), []string{"a failed i0 -1s"}, "+1; wait 9s"},
		{"index replaced", newJob(size(2, 2), perIndexLimit(1)), []string{"a failed i0 -11s", "b running i1"}, "+0(1,0)"},
		{"what was dropped is no failure of its index", newJob(size(2, 2), perIndexLimit(1)), []string{"a running going counted i0", "b running i1"}, "+0"},
		{"deleted by another, it is one", newJob(size(2, 2), perIndexLimit(1)), []string{"a running going i0", "b running i1"}, "wait 10s"},
		{"a deadline beyond what a duration holds", newJob(size(1, 1), func(j *batchv1.Job) {
			j.Spec.ActiveDeadlineSeconds, j.Status.StartTime = ptr.To[int64](math.MaxInt64), ptr.To(metav1.NewTime(now))
		}), []string{"a running"}, "wait " + seconds.Duration(math.MaxInt64).String()},
		{"then let go", newJob(size(2, 2), perIndexLimit(1)), []string{"a failed i0 -11s", "c running i0 x1", "b running i1"}, "release a"},
		{"index lost", newJob(size(2, 2), perIndexLimit(1)), []string{"c failed i0 x1", "b running i1"}, "release c"},
		{"some indexes lost", newJob(size(2, 2), perIndexLimit(0)), []string{"c failed i0", "b succeeded i1"}, "release b; release c; FailureTarget=True FailedIndexes"},
		{"too many lost", newJob(size(3, 3), perIndexLimit(0), func(j *batchv1.Job) { j.Spec.MaxFailedIndexes = ptr.To[int32](0) }), []string{"c failed i0", "b running i1"},
			"release c; stop b; FailureTarget=True MaxFailedIndexesExceeded"},

		{"policy: fail", newJob(size(2, 2), policy(onCode("FailJob", 42))), []string{"a failed code42", "b running"}, "release a; stop b; FailureTarget=True PodFailurePolicy"},
		{"policy: other code", newJob(policy(onCode("FailJob", 42))), []string{"a failed"}, "release a; +"},
		{"policy: ignored", newJob(limit(0), policy(onCode("Ignore", 1))), []string{"a failed"}, "release a; +"},
		{"policy: index", newJob(size(2, 2), perIndexLimit(5), policy(onCode("FailIndex", 3))), []string{"a failed code3 i0", "b running i1"}, "release a"},
		{"policy: index ignored", newJob(size(1, 1), perIndexLimit(0), policy(onCode("Ignore", 3))), []string{"a failed code3 i0"}, "+0(0,1)"},
		{"success policy", newJob(size(3, 3), index, func(j *batchv1.Job) {
			j.Spec.SuccessPolicy = &batchv1.SuccessPolicy{Rules: []batchv1.SuccessPolicyRule{{SucceededIndexes: ptr.To("1-2"), SucceededCount: ptr.To[int32](1)}}}
		}), []string{"a running i0", "b succeeded i2"}, "release b; stop a; SuccessCriteriaMet=True SuccessPolicy"},

		{"time to live", newJob(decided(batchv1.JobFailed), func(j *batchv1.Job) { j.Spec.TTLSecondsAfterFinished = ptr.To[int32](30) }), nil, "wait 30s"},
		{"time is over", newJob(decided(batchv1.JobFailed), func(j *batchv1.Job) { j.Spec.TTLSecondsAfterFinished = ptr.To[int32](0) }), []string{"a failed"}, "release a; expired"},
		{"deleted", newJob(func(j *batchv1.Job) { j.DeletionTimestamp = ptr.To(metav1.NewTime(now)) }), nil, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var mine []*corev1.Pod
			for _, text := range test.pods {
				mine = append(mine, pod(test.job, text))
			}
			if got := describe(test.job, Decide(Input{Job: test.job, Pods: mine, Now: now})); got != test.want {
				t.Errorf("decides %q, want %q", got, test.want)
			}
		})
	}
}

func TestIndexes(t *testing.T) {
	for text, want := range map[string]string{"0,2-4": "0,2-4", "4,0,2,3": "0,2-4", "1,2": "1,2", "7-12": "7-9", "x,1,-3,5-2": "1", "": ""} {
		if got := parseIndexes(text, 10).String(); got != want {
			t.Errorf("%q is %q, want %q", text, got, want)
		}
	}
	x := parseIndexes("0,2-4", 10)
	for i, want := range []bool{true, false, true, true, true, false} {
		if x.has(i) != want {
			t.Errorf("has %d: %t", i, !want)
		}
	}
	if got := x.with([]int{1, 9}).String(); got != "0-4,9" || x.count() != 4 || x.in(parseIndexes("3-8", 10)) != 2 {
		t.Errorf("with: %s, count %d", got, x.count())
	}
}

// However often a leader dies between its writes, every end is counted once,
// and no more pods run than may.
func TestCountsExactly(t *testing.T) {
	for seed := range int64(80) {
		r := rand.New(rand.NewPCG(uint64(seed), 0))
		j := newJob(size(int32(1+r.IntN(4)), int32(1+r.IntN(8))), limit(1000))
		if r.IntN(2) == 0 {
			index(j)
		}
		if r.IntN(3) == 0 && indexed(j) {
			perIndexLimit(1000)(j)
		}
		clock := now
		have := map[types.UID]*corev1.Pod{}
		ended := map[types.UID]corev1.PodPhase{}
		made := 0
		done := func() bool { return finished(&j.Status) != nil }
		for step := 0; !done(); step++ {
			if step > 3000 {
				t.Fatalf("seed %d: does not end: %+v", seed, j.Status)
			}
			clock = clock.Add(time.Duration(r.IntN(60)) * time.Second)
			var mine []*corev1.Pod
			active := 0
			for _, p := range have {
				mine = append(mine, p)
				if pods.Active(p) {
					active++
				}
			}
			if active > int(*j.Spec.Parallelism) {
				t.Fatalf("seed %d: %d pods at once", seed, active)
			}
			plan := Decide(Input{Job: j, Pods: mine, Now: clock})
			// The leader may die after each write.
			dies := r.IntN(6)
			if dies > 0 {
				j.Status = plan.Status
			}
			for _, p := range plan.Release {
				if dies > 1 && r.IntN(4) > 0 {
					p.Finalizers = nil
				}
			}
			for _, p := range append(plan.Drop, plan.Stop...) {
				if dies > 2 {
					if slices.Contains(plan.Drop, p) {
						p.Finalizers = nil
					}
					delete(have, p.UID)
				}
			}
			for _, n := range plan.Create {
				if dies > 3 {
					p := newPod(j, n)
					p.Name = fmt.Sprintf("%s%d", p.GenerateName, made)
					made++
					p.UID = types.UID(p.Name)
					p.CreationTimestamp = metav1.NewTime(clock)
					p.Status.Phase = corev1.PodRunning
					have[p.UID] = p
				}
			}
			for uid, p := range have {
				if pods.Active(p) && r.IntN(3) == 0 {
					p.Status.Phase = []corev1.PodPhase{corev1.PodSucceeded, corev1.PodFailed}[r.IntN(2)]
					ended[uid] = p.Status.Phase
					p.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{FinishedAt: metav1.NewTime(clock)}}}}
				}
				if !tracked(p) && r.IntN(3) == 0 { // a user cleans up
					delete(have, uid)
				}
			}
		}
		succeeded, failed := 0, 0
		for _, phase := range ended {
			if phase == corev1.PodSucceeded {
				succeeded++
			} else {
				failed++
			}
		}
		if int(j.Status.Succeeded) != succeeded || int(j.Status.Failed) != failed || condition(&j.Status, batchv1.JobComplete) == nil {
			t.Errorf("seed %d: counted %d and %d, want %d and %d; %+v", seed, j.Status.Succeeded, j.Status.Failed, succeeded, failed, j.Status)
		}
	}
}
