package batch

import (
	"fmt"
	"maps"
	"math"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/kind"
)

const defaultBackoffLimit = 6

// Labels that Jobs and their pods had before these names got a prefix, and
// still have.
const (
	oldControllerLabel = "controller-uid"
	oldNameLabel       = "job-name"
)

// Job is the kind Job.
func Job() kind.Kind {
	return kind.Typed[*batchv1.Job]{
		GVK:        batchv1.SchemeGroupVersion.WithKind("Job"),
		Resource:   "jobs",
		Singular:   "job",
		Categories: []string{"all"},
		Namespaced: true,

		New:     func() runtime.Object { return &batchv1.Job{} },
		NewList: func() runtime.Object { return &batchv1.JobList{} },

		Default: func(j *batchv1.Job) {
			defaultJobSpec(&j.Spec)
			if len(j.Labels) == 0 {
				j.Labels = maps.Clone(j.Spec.Template.Labels)
			}
		},
		PrepareCreate: func(j *batchv1.Job) {
			j.Generation = 1
			j.Status = batchv1.JobStatus{}
			j.Spec.Scheduling = nil // of a feature that is off
			generateSelector(j)
		},
		PrepareUpdate: func(j, old *batchv1.Job) {
			j.Status = old.Status
			j.Generation = old.Generation
			if !equality.Semantic.DeepEqual(j.Spec, old.Spec) {
				j.Generation++
			}
		},
		Validate:       validateJob,
		ValidateUpdate: validateJobUpdate,
		Warnings: func(j *batchv1.Job) []string {
			return append(jobWarnings(&j.Spec, "spec"), core.PodSpecWarnings(&j.Spec.Template.Spec, "spec.template.spec")...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Status", "Status of the job."),
			cells.Text("Completions", batchv1.JobStatus{}.SwaggerDoc()["succeeded"]),
			cells.Text("Duration", "Time required to complete the job."),
			cells.Age,
			cells.Wide(cells.Text("Containers", "Names of each container in the template.")),
			cells.Wide(cells.Text("Images", "Images referenced by each container in the template.")),
			cells.Wide(cells.Text("Selector", batchv1.JobSpec{}.SwaggerDoc()["selector"])),
		},
		Row: func(j *batchv1.Job, now time.Time) []any {
			names, images := cells.Containers(j.Spec.Template.Spec.Containers)
			return []any{
				j.Name, statusText(j), completionsText(j), durationText(j, now), cells.Since(j.CreationTimestamp, now),
				names, images, metav1.FormatLabelSelector(j.Spec.Selector),
			}
		},
		Fields: func(j *batchv1.Job) fields.Set {
			return fields.Set{"status.successful": fmt.Sprint(j.Status.Succeeded)}
		},

		Status: &kind.TypedStatus[*batchv1.Job]{
			PrepareUpdate: func(j, old *batchv1.Job) {
				j.Spec = old.Spec
				j.Generation = old.Generation
			},
			ValidateUpdate: validateJobStatusUpdate,
		},

		UnconditionalUpdate: true,
		OrphansByDefault:    true,
		OrphanWarning:       "child pods are preserved by default when jobs are deleted; set propagationPolicy=Background to remove them or set propagationPolicy=Orphan to suppress this warning",
	}.Kind()
}

func defaultJobSpec(spec *batchv1.JobSpec) {
	if spec.Completions == nil && spec.Parallelism == nil {
		setDefault(&spec.Completions, 1)
	}
	setDefault(&spec.Parallelism, 1)
	if spec.BackoffLimit == nil {
		limit := int32(defaultBackoffLimit)
		if spec.BackoffLimitPerIndex != nil {
			limit = math.MaxInt32
		}
		spec.BackoffLimit = &limit
	}
	setDefault(&spec.CompletionMode, batchv1.NonIndexedCompletion)
	setDefault(&spec.Suspend, false)
	setDefault(&spec.ManualSelector, false)
	if spec.PodReplacementPolicy == nil {
		policy := batchv1.TerminatingOrFailed
		if spec.PodFailurePolicy != nil {
			policy = batchv1.Failed
		}
		spec.PodReplacementPolicy = &policy
	}
	defaultFailurePolicy(spec.PodFailurePolicy)
	core.DefaultPodTemplate(&spec.Template)
}

func defaultFailurePolicy(policy *batchv1.PodFailurePolicy) {
	if policy == nil {
		return
	}
	for i := range policy.Rules {
		for k := range policy.Rules[i].OnPodConditions {
			if c := &policy.Rules[i].OnPodConditions[k]; c.Status == "" {
				c.Status = corev1.ConditionTrue
			}
		}
	}
}

func setDefault[T any](field **T, value T) {
	if *field == nil {
		*field = &value
	}
}

// generateSelector marks the pods of this Job by its UID, so that no two Jobs
// ever count one pod. A user who sets manualSelector is responsible for that.
func generateSelector(j *batchv1.Job) {
	if j.Spec.ManualSelector != nil && *j.Spec.ManualSelector {
		return
	}
	labels := maps.Clone(j.Spec.Template.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	for k, v := range generatedLabels(j) {
		if _, taken := labels[k]; !taken { // a wrong one is refused by validation
			labels[k] = v
		}
	}
	j.Spec.Template.Labels = labels
	if j.Spec.Selector == nil {
		j.Spec.Selector = &metav1.LabelSelector{}
	}
	if j.Spec.Selector.MatchLabels == nil {
		j.Spec.Selector.MatchLabels = map[string]string{}
	}
	if _, taken := j.Spec.Selector.MatchLabels[batchv1.ControllerUidLabel]; !taken {
		j.Spec.Selector.MatchLabels[batchv1.ControllerUidLabel] = string(j.UID)
	}
}

func generatedLabels(j *batchv1.Job) map[string]string {
	return map[string]string{
		batchv1.ControllerUidLabel: string(j.UID), oldControllerLabel: string(j.UID),
		batchv1.JobNameLabel: j.Name, oldNameLabel: j.Name,
	}
}

func jobWarnings(spec *batchv1.JobSpec, at string) []string {
	var out []string
	if spec.Scheduling != nil {
		out = append(out, at+".scheduling: not supported here, dropped")
	}
	if spec.CompletionMode != nil && *spec.CompletionMode == batchv1.IndexedCompletion &&
		spec.Completions != nil && *spec.Completions > 100_000 && spec.Parallelism != nil && *spec.Parallelism > 10_000 {
		out = append(out, fmt.Sprintf("%s.completions: in Indexed Jobs with a number of completions higher than 10^5 and a parallelism higher than 10^4, Kubernetes might not be able to track completedIndexes when a big number of indexes fail", at))
	}
	return out
}

// statusText is the column STATUS.
func statusText(j *batchv1.Job) string {
	for _, kind := range []batchv1.JobConditionType{batchv1.JobComplete, batchv1.JobFailed} {
		if isTrue(j, kind) {
			return string(kind)
		}
	}
	if j.DeletionTimestamp != nil {
		return "Terminating"
	}
	for _, kind := range []batchv1.JobConditionType{batchv1.JobSuspended, batchv1.JobFailureTarget, batchv1.JobSuccessCriteriaMet} {
		if isTrue(j, kind) {
			return string(kind)
		}
	}
	return "Running"
}

func isTrue(j *batchv1.Job, kind batchv1.JobConditionType) bool {
	for i := range j.Status.Conditions {
		if c := &j.Status.Conditions[i]; c.Type == kind && c.Status == corev1.ConditionTrue {
			return true
		}
	}
	return false
}

func completionsText(j *batchv1.Job) string {
	if j.Spec.Completions != nil {
		return fmt.Sprintf("%d/%d", j.Status.Succeeded, *j.Spec.Completions)
	}
	if j.Spec.Parallelism != nil && *j.Spec.Parallelism > 1 {
		return fmt.Sprintf("%d/1 of %d", j.Status.Succeeded, *j.Spec.Parallelism)
	}
	return fmt.Sprintf("%d/1", j.Status.Succeeded)
}

func durationText(j *batchv1.Job, now time.Time) string {
	switch {
	case j.Status.StartTime == nil:
		return ""
	case j.Status.CompletionTime == nil:
		return duration.HumanDuration(now.Sub(j.Status.StartTime.Time))
	}
	return duration.HumanDuration(j.Status.CompletionTime.Sub(j.Status.StartTime.Time))
}
