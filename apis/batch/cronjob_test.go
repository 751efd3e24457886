package batch

import (
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// TestSchedules: a schedule is read or refused, and ends no request.
func TestSchedules(t *testing.T) {
	for schedule, want := range map[string]string{
		"*/5 * * * *": "", "@hourly": "", "@every 1h": "",
		"":                   "Required",
		"TZ=UTC":             "cannot use TZ",
		"CRON_TZ=x":          "cannot use TZ",
		"TZ=":                "cannot use TZ",
		"TZ=UTC 0 * * * *":   "cannot use TZ",
		"61 * * * *":         "above maximum",
		"* * * *":            "expected exactly 5 fields",
		"@every":             "unrecognized descriptor",
		"* * * * * * *  * *": "expected exactly 5 fields",
	} {
		c := &batchv1.CronJob{ObjectMeta: metav1.ObjectMeta{Name: "s", Namespace: "ns"}, Spec: batchv1.CronJobSpec{Schedule: schedule}}
		CronJob().Default(c)
		var errs field.ErrorList
		for _, err := range CronJob().Validate(c) {
			if err.Field == "spec.schedule" {
				errs = append(errs, err)
			}
		}
		if want == "" && len(errs) > 0 || want != "" && (len(errs) != 1 || !strings.Contains(errs[0].Error(), want)) {
			t.Errorf("schedule %q: %v, want %q", schedule, errs, want)
		}
	}
}
