package batch

import (
	"fmt"
	"strings"
	"time"
	_ "time/tzdata" // so that zones mean the same on every machine

	"github.com/robfig/cron/v3"
	batchv1 "k8s.io/api/batch/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

const (
	defaultSucceededKept = 3
	defaultFailedKept    = 1
	// maxCronJobName leaves room for the time in the names of Jobs.
	maxCronJobName = 52
)

// CronJob is the kind CronJob.
func CronJob() kind.Kind {
	return kind.Typed[*batchv1.CronJob]{
		GVK:        batchv1.SchemeGroupVersion.WithKind("CronJob"),
		Resource:   "cronjobs",
		Singular:   "cronjob",
		ShortNames: []string{"cj"},
		Categories: []string{"all"},
		Namespaced: true,

		New:     func() runtime.Object { return &batchv1.CronJob{} },
		NewList: func() runtime.Object { return &batchv1.CronJobList{} },

		Default: func(c *batchv1.CronJob) {
			if c.Spec.ConcurrencyPolicy == "" {
				c.Spec.ConcurrencyPolicy = batchv1.AllowConcurrent
			}
			setDefault(&c.Spec.Suspend, false)
			setDefault(&c.Spec.SuccessfulJobsHistoryLimit, defaultSucceededKept)
			setDefault(&c.Spec.FailedJobsHistoryLimit, defaultFailedKept)
			core.DefaultPodTemplate(&c.Spec.JobTemplate.Spec.Template)
			defaultFailurePolicy(c.Spec.JobTemplate.Spec.PodFailurePolicy)
		},
		PrepareCreate: func(c *batchv1.CronJob) {
			c.Generation = 1
			c.Status = batchv1.CronJobStatus{}
			c.Spec.JobTemplate.Spec.Scheduling = nil // of a feature that is off
		},
		PrepareUpdate: func(c, old *batchv1.CronJob) {
			c.Status = old.Status
			c.Generation = old.Generation
			if !equality.Semantic.DeepEqual(c.Spec, old.Spec) {
				c.Generation++
			}
		},
		Validate: func(c *batchv1.CronJob) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&c.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			if len(c.Name) > maxCronJobName {
				errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), c.Name, "must be no more than 52 characters"))
			}
			errs = append(errs, core.ValidateTemplateCost(c, &c.Spec.JobTemplate.Spec.Template, nil, field.NewPath("spec", "jobTemplate", "spec", "template"))...)
			return append(errs, validateCronJobSpec(&c.Spec, nil, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(c, old *batchv1.CronJob) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, core.ValidateTemplateCost(c, &c.Spec.JobTemplate.Spec.Template, &old.Spec.JobTemplate.Spec.Template, field.NewPath("spec", "jobTemplate", "spec", "template"))...)
			return append(errs, validateCronJobSpec(&c.Spec, &old.Spec, field.NewPath("spec"))...)
		},
		Warnings: func(c *batchv1.CronJob) []string {
			at := "spec.jobTemplate.spec"
			return append(jobWarnings(&c.Spec.JobTemplate.Spec, at), core.PodSpecWarnings(&c.Spec.JobTemplate.Spec.Template.Spec, at+".template.spec")...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Schedule", batchv1.CronJobSpec{}.SwaggerDoc()["schedule"]),
			cells.Text("Timezone", batchv1.CronJobSpec{}.SwaggerDoc()["timeZone"]),
			{Name: "Suspend", Type: "boolean", Description: batchv1.CronJobSpec{}.SwaggerDoc()["suspend"]},
			cells.Number("Active", batchv1.CronJobStatus{}.SwaggerDoc()["active"]),
			cells.Text("Last Schedule", batchv1.CronJobStatus{}.SwaggerDoc()["lastScheduleTime"]),
			cells.Age,
			cells.Wide(cells.Text("Containers", "Names of each container in the template.")),
			cells.Wide(cells.Text("Images", "Images referenced by each container in the template.")),
			cells.Wide(cells.Text("Selector", batchv1.JobSpec{}.SwaggerDoc()["selector"])),
		},
		Row: func(c *batchv1.CronJob, now time.Time) []any {
			names, images := cells.Containers(c.Spec.JobTemplate.Spec.Template.Spec.Containers)
			zone, last := "<none>", "<none>"
			if c.Spec.TimeZone != nil {
				zone = *c.Spec.TimeZone
			}
			if c.Status.LastScheduleTime != nil {
				last = cells.Since(*c.Status.LastScheduleTime, now)
			}
			return []any{
				c.Name, c.Spec.Schedule, zone, c.Spec.Suspend != nil && *c.Spec.Suspend, int64(len(c.Status.Active)), last,
				cells.Since(c.CreationTimestamp, now), names, images, metav1.FormatLabelSelector(c.Spec.JobTemplate.Spec.Selector),
			}
		},

		Status: &kind.TypedStatus[*batchv1.CronJob]{
			PrepareUpdate: func(c, old *batchv1.CronJob) {
				c.Spec = old.Spec
				c.Generation = old.Generation
			},
			ValidateUpdate: func(c, old *batchv1.CronJob) field.ErrorList {
				return apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			},
		},

		UnconditionalUpdate: true,
	}.Kind()
}

// ParseSchedule reads the schedule of a CronJob.
func ParseSchedule(text string) (cron.Schedule, error) {
	// The library cuts a time zone off at the blank behind it, and panics without one.
	if strings.HasPrefix(text, "TZ=") || strings.HasPrefix(text, "CRON_TZ=") {
		if !strings.Contains(text, " ") {
			return nil, fmt.Errorf("%q is a time zone without a schedule", text)
		}
	}
	return cron.ParseStandard(text)
}

func validateCronJobSpec(spec, old *batchv1.CronJobSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	path := at.Child("schedule")
	switch _, err := ParseSchedule(spec.Schedule); {
	case spec.Schedule == "":
		errs = append(errs, field.Required(path, ""))
	case strings.Contains(spec.Schedule, "TZ"):
		if old == nil || old.Schedule != spec.Schedule {
			errs = append(errs, field.Invalid(path, spec.Schedule, "cannot use TZ or CRON_TZ in schedule, use timeZone field instead"))
		}
	case err != nil:
		errs = append(errs, field.Invalid(path, spec.Schedule, err.Error()))
	}
	if spec.TimeZone != nil && (old == nil || !equality.Semantic.DeepEqual(old.TimeZone, spec.TimeZone)) {
		errs = append(errs, validateZone(*spec.TimeZone, at.Child("timeZone"))...)
	}
	if spec.StartingDeadlineSeconds != nil {
		errs = append(errs, check.NonNegative(at.Child("startingDeadlineSeconds"), *spec.StartingDeadlineSeconds)...)
	}
	errs = append(errs, check.OneOf(at.Child("concurrencyPolicy"), spec.ConcurrencyPolicy, batchv1.AllowConcurrent, batchv1.ForbidConcurrent, batchv1.ReplaceConcurrent)...)
	for name, n := range map[string]*int32{"successfulJobsHistoryLimit": spec.SuccessfulJobsHistoryLimit, "failedJobsHistoryLimit": spec.FailedJobsHistoryLimit} {
		if n != nil {
			errs = append(errs, check.NonNegative(at.Child(name), int64(*n))...)
		}
	}
	job := at.Child("jobTemplate", "spec")
	errs = append(errs, validateJobSpec(&spec.JobTemplate.Spec, job)...)
	if m := spec.JobTemplate.Spec.ManualSelector; m != nil && *m {
		errs = append(errs, field.NotSupported(job.Child("manualSelector"), *m, []string{"nil", "false"}))
	}
	return errs
}

// validateZone wants the name of a zone that is the same for everyone:
// "Local" is that of whichever machine leads.
func validateZone(zone string, at *field.Path) field.ErrorList {
	switch {
	case zone == "":
		return field.ErrorList{field.Invalid(at, zone, "timeZone must be nil or non-empty string")}
	case strings.EqualFold(zone, "Local"):
		return field.ErrorList{field.Invalid(at, zone, "timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones")}
	}
	if _, err := time.LoadLocation(zone); err != nil {
		return field.ErrorList{field.Invalid(at, zone, err.Error())}
	}
	return nil
}
