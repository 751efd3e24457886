package cronjob

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// now is a Wednesday.
var now = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

func newCronJob(schedule string, edit ...func(*batchv1.CronJob)) *batchv1.CronJob {
	cj := &batchv1.CronJob{
		ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: schedtest.Namespace, UID: "c", CreationTimestamp: metav1.NewTime(now.Add(-10 * time.Minute))},
		Spec: batchv1.CronJobSpec{
			Schedule: schedule, ConcurrencyPolicy: batchv1.AllowConcurrent,
			SuccessfulJobsHistoryLimit: ptr.To[int32](1), FailedJobsHistoryLimit: ptr.To[int32](0),
		},
	}
	for _, e := range edit {
		e(cj)
	}
	return cj
}

func last(ago time.Duration) func(*batchv1.CronJob) {
	return func(cj *batchv1.CronJob) { cj.Status.LastScheduleTime = ptr.To(metav1.NewTime(now.Add(-ago))) }
}

func deadline(seconds int64) func(*batchv1.CronJob) {
	return func(cj *batchv1.CronJob) { cj.Spec.StartingDeadlineSeconds = &seconds }
}

func concurrency(p batchv1.ConcurrencyPolicy) func(*batchv1.CronJob) {
	return func(cj *batchv1.CronJob) { cj.Spec.ConcurrencyPolicy = p }
}

func zone(name string) func(*batchv1.CronJob) {
	return func(cj *batchv1.CronJob) { cj.Spec.TimeZone = &name }
}

// job is written "name Complete -5m".
func job(text string) *batchv1.Job {
	words := strings.Fields(text)
	j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: words[0], Namespace: schedtest.Namespace, UID: types.UID(words[0])}}
	for _, w := range words[1:] {
		if ago, err := time.ParseDuration(w); err == nil {
			j.CreationTimestamp = metav1.NewTime(now.Add(ago))
			continue
		}
		j.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobConditionType(w), Status: corev1.ConditionTrue}}
		j.Status.CompletionTime = ptr.To(metav1.NewTime(now))
	}
	return j
}

func TestDecide(t *testing.T) {
	tests := []struct {
		name string
		cj   *batchv1.CronJob
		jobs []string
		want string
	}{
		{"not yet", newCronJob("30 * * * *"), nil, "next 03:30:00"},
		{"due", newCronJob("*/4 * * * *"), nil, "+03:04:00 next 03:08:00"},
		{"made and written down", newCronJob("*/4 * * * *", last(5*time.Second)), nil, "next 03:08:00"},
		{"made, not written down", newCronJob("*/4 * * * *"), []string{fmt.Sprintf("c-%d", now.Unix()/60)}, "last 03:04:00 next 03:08:00"},
		{"of many missed the last", newCronJob("* * * * *", last(5*time.Minute)), nil, "+03:04:00 next 03:05:00"},
		{"too many missed", newCronJob("* * * * *", func(cj *batchv1.CronJob) { cj.CreationTimestamp = metav1.NewTime(now.Add(-48 * time.Hour)) }), nil,
			"+03:04:00 TooManyMissedTimes next 03:05:00"},
		{"too late", newCronJob("0 3 * * *", deadline(60)), nil, "next 03:00:00"},
		{"just in time", newCronJob("3 3 * * *", deadline(70)), nil, "+03:03:00 next 03:03:00"},
		{"zone", newCronJob("4 4 * * *", zone("Europe/Berlin")), nil, "+03:04:00 next 03:04:00"},
		{"no such zone", newCronJob("4 4 * * *", zone("Middle/Earth")), nil, "UnparseableSchedule"},
		{"every", newCronJob("@every 4m"), nil, "+03:02:05 next 03:06:05"},
		{"every, with a deadline that is shorter", newCronJob("@every 4m", deadline(130)), nil, "+03:02:05 next 03:06:05"},
		{"every, too late", newCronJob("@every 4m", deadline(60)), nil, "MissSchedule next 03:06:05"},
		{"every, with a deadline that is longer", newCronJob("@every 4m", deadline(600)), nil, "+03:02:05 next 03:06:05"},
		{"a deadline longer than a duration holds", newCronJob("*/4 * * * *", deadline(math.MaxInt64)), nil, "+03:04:00 next 03:08:00"},
		{"suspended", newCronJob("* * * * *", func(cj *batchv1.CronJob) { cj.Spec.Suspend = ptr.To(true) }), []string{"a Failed"}, "-a"},
		{"may run together", newCronJob("* * * * *"), []string{"a -1m"}, "+03:04:00 next 03:05:00"},
		{"forbid", newCronJob("* * * * *", concurrency(batchv1.ForbidConcurrent)), []string{"a -1m"}, "JobAlreadyActive next 03:05:00"},
		{"forbid, ended", newCronJob("* * * * *", concurrency(batchv1.ForbidConcurrent)), []string{"a Complete -1m"}, "+03:04:00 next 03:05:00"},
		{"replace", newCronJob("* * * * *", concurrency(batchv1.ReplaceConcurrent)), []string{"a -1m"}, "-a! +03:04:00 next 03:05:00"},
		{"history", newCronJob("30 * * * *"), []string{"a Complete -3m", "b Complete -2m", "d Failed -1m", "e -5m"}, "-a -d next 03:30:00"},
		{"never", newCronJob("0 0 31 2 *"), nil, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var jobs []*batchv1.Job
			for _, text := range test.jobs {
				jobs = append(jobs, job(text))
			}
			if got := describe(test.cj, Decide(Input{CronJob: test.cj, Jobs: jobs, Now: now})); got != test.want {
				t.Errorf("decides %q, want %q", got, test.want)
			}
		})
	}
}

func describe(cj *batchv1.CronJob, p Plan) string {
	const clock = "15:04:05"
	var out []string
	for _, j := range p.Delete {
		out = append(out, "-"+j.Name)
	}
	slices.Sort(out)
	for _, j := range p.Replace {
		out = append(out, "-"+j.Name+"!")
	}
	if p.Create != nil {
		out = append(out, "+"+p.At.UTC().Format(clock))
	}
	for _, s := range p.Events {
		out = append(out, s.Reason)
	}
	if t := p.Status.LastScheduleTime; t != nil && !t.Equal(cj.Status.LastScheduleTime) {
		out = append(out, "last "+t.UTC().Format(clock))
	}
	if p.Recheck > 0 {
		out = append(out, "next "+now.Add(p.Recheck).UTC().Format(clock))
	}
	return strings.Join(out, " ")
}

func TestStatus(t *testing.T) {
	cj := newCronJob("30 * * * *", func(cj *batchv1.CronJob) { cj.Status.Active = []corev1.ObjectReference{{UID: "a"}} })
	p := Decide(Input{CronJob: cj, Jobs: []*batchv1.Job{job("a Complete -3m"), job("b -1m")}, Now: now})
	if len(p.Status.Active) != 1 || p.Status.Active[0].Name != "b" || p.Status.LastSuccessfulTime == nil || len(p.Events) != 1 || p.Events[0].Reason != "SawCompletedJob" {
		t.Errorf("status %+v, says %v", p.Status, p.Events)
	}
	cj.Status.Active = []corev1.ObjectReference{{UID: "gone", Name: "web-1"}, {UID: "b", Name: "b"}}
	p = Decide(Input{CronJob: cj, Jobs: []*batchv1.Job{job("b -1m")}, Now: now})
	if len(p.Status.Active) != 1 || len(p.Events) != 1 || p.Events[0].Reason != "MissingJob" || !strings.Contains(p.Events[0].Message, "web-1") {
		t.Errorf("a job that was deleted: status %+v, says %v", p.Status, p.Events)
	}
}

// Where the clocks are put forward 02:30 does not exist; where they are put
// back it comes once.
func TestClockChanges(t *testing.T) {
	times, err := read(newCronJob("30 2 * * *", zone("Europe/Berlin")))
	if err != nil {
		t.Fatal(err)
	}
	forward := time.Date(2030, 3, 31, 12, 0, 0, 0, time.UTC)
	if n := times.missed(forward.Add(-24*time.Hour), forward, 10); n > 1 {
		t.Errorf("%d times on the short day", n)
	}
	back := time.Date(2030, 10, 27, 12, 0, 0, 0, time.UTC)
	if n := times.missed(back.Add(-24*time.Hour), back, 10); n < 1 {
		t.Errorf("%d times on the long day", n)
	}
}
