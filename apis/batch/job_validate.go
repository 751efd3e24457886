package batch

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/internal/check"
)

// Limits of what one Job's status can tell.
const (
	maxParallelIndexed  = 100_000
	maxBackoffIndexed   = 100_000
	manyCompletions     = 100_000
	maxParallelWithMany = 10_000
	maxManagedBy        = 63
	maxSuccessRules     = 20
	maxSuccessIndexes   = 64 * 1024
	maxFailureRules     = 20
	maxExitCodes        = 255
	maxConditionRules   = 20
)

func validateJob(j *batchv1.Job) field.ErrorList {
	spec := field.NewPath("spec")
	errs := apivalidation.ValidateObjectMeta(&j.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	errs = append(errs, validateGeneratedSelector(j, spec)...)
	errs = append(errs, core.ValidateTemplateCost(j, &j.Spec.Template, nil, spec.Child("template"))...)
	errs = append(errs, validateJobSelector(&j.Spec, spec)...)
	errs = append(errs, validateJobSpec(&j.Spec, spec)...)
	if indexed(&j.Spec) && j.Spec.Completions != nil && *j.Spec.Completions > 0 {
		// The highest index gives the longest name, which becomes a host name.
		host := j.Name + "-" + strconv.Itoa(int(*j.Spec.Completions)-1)
		for _, msg := range validation.IsDNS1123Label(host) {
			errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), j.Name, "will not able to create pod with invalid DNS hostname "+host+": "+msg))
		}
	}
	return errs
}

func indexed(spec *batchv1.JobSpec) bool {
	return spec.CompletionMode != nil && *spec.CompletionMode == batchv1.IndexedCompletion
}

func validateGeneratedSelector(j *batchv1.Job, at *field.Path) field.ErrorList {
	if j.Spec.ManualSelector != nil && *j.Spec.ManualSelector || j.UID == "" {
		return nil
	}
	var errs field.ErrorList
	for key, want := range generatedLabels(j) {
		if got, ok := j.Spec.Template.Labels[key]; ok && got != want {
			errs = append(errs, field.Invalid(at.Child("template", "metadata", "labels").Key(key), got, fmt.Sprintf("must be '%s'", want)))
		}
	}
	if s := j.Spec.Selector; s != nil && s.MatchLabels[batchv1.ControllerUidLabel] != string(j.UID) && s.MatchLabels[oldControllerLabel] != string(j.UID) {
		errs = append(errs, field.Invalid(at.Child("selector"), s, "`selector` not auto-generated"))
	}
	return errs
}

func validateJobSelector(spec *batchv1.JobSpec, at *field.Path) field.ErrorList {
	if spec.Selector == nil {
		return field.ErrorList{field.Required(at.Child("selector"), "")}
	}
	errs := check.LabelSelector(at.Child("selector"), spec.Selector)
	if parsed, err := metav1.LabelSelectorAsSelector(spec.Selector); err == nil && !parsed.Matches(labels.Set(spec.Template.Labels)) {
		errs = append(errs, field.Invalid(at.Child("template", "metadata", "labels"), spec.Template.Labels, "`selector` does not match template `labels`"))
	}
	return errs
}

// validateJobSpec checks all but the selector, which a CronJob's template does
// not have yet.
func validateJobSpec(spec *batchv1.JobSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for name, n := range map[string]*int32{
		"parallelism": spec.Parallelism, "completions": spec.Completions, "backoffLimit": spec.BackoffLimit,
		"ttlSecondsAfterFinished": spec.TTLSecondsAfterFinished, "backoffLimitPerIndex": spec.BackoffLimitPerIndex, "maxFailedIndexes": spec.MaxFailedIndexes,
	} {
		if n != nil {
			errs = append(errs, check.NonNegative(at.Child(name), int64(*n))...)
		}
	}
	if spec.ActiveDeadlineSeconds != nil {
		errs = append(errs, check.NonNegative(at.Child("activeDeadlineSeconds"), *spec.ActiveDeadlineSeconds)...)
	}
	errs = append(errs, check.OneOfOrNil(at.Child("completionMode"), spec.CompletionMode, batchv1.NonIndexedCompletion, batchv1.IndexedCompletion)...)
	if spec.ManagedBy != nil {
		path := at.Child("managedBy")
		errs = append(errs, validation.IsDomainPrefixedPath(path, *spec.ManagedBy)...)
		if len(*spec.ManagedBy) > maxManagedBy {
			errs = append(errs, field.TooLong(path, "", maxManagedBy))
		}
	}
	errs = append(errs, validateIndexed(spec, at)...)
	errs = append(errs, validateFailurePolicy(spec, at.Child("podFailurePolicy"))...)
	errs = append(errs, validateSuccessPolicy(spec, at.Child("successPolicy"))...)
	if p := spec.PodReplacementPolicy; p != nil {
		path := at.Child("podReplacementPolicy")
		errs = append(errs, check.OneOf(path, *p, batchv1.Failed, batchv1.TerminatingOrFailed)...)
		if spec.PodFailurePolicy != nil && *p == batchv1.TerminatingOrFailed {
			errs = append(errs, field.NotSupported(path, *p, []batchv1.PodReplacementPolicy{batchv1.Failed}))
		}
	}
	errs = append(errs, core.ValidatePodTemplate(&spec.Template, at.Child("template"))...)
	policy := at.Child("template", "spec", "restartPolicy")
	switch spec.Template.Spec.RestartPolicy {
	case corev1.RestartPolicyNever:
	case corev1.RestartPolicyOnFailure:
		if spec.PodFailurePolicy != nil {
			errs = append(errs, field.Invalid(policy, spec.Template.Spec.RestartPolicy, "only \"Never\" is supported when podFailurePolicy is specified"))
		}
	case corev1.RestartPolicyAlways, "": // as it is left out: that is no choice for a Job
		errs = append(errs, field.Required(policy, `valid values: "OnFailure", "Never"`))
	default:
		errs = append(errs, field.NotSupported(policy, spec.Template.Spec.RestartPolicy, []corev1.RestartPolicy{corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever}))
	}
	return errs
}

func validateIndexed(spec *batchv1.JobSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if !indexed(spec) {
		if spec.BackoffLimitPerIndex != nil {
			errs = append(errs, field.Invalid(at.Child("backoffLimitPerIndex"), *spec.BackoffLimitPerIndex, "requires indexed completion mode"))
		}
		if spec.MaxFailedIndexes != nil {
			errs = append(errs, field.Invalid(at.Child("maxFailedIndexes"), *spec.MaxFailedIndexes, "requires indexed completion mode"))
		}
		return errs
	}
	if spec.Completions == nil {
		return append(errs, field.Required(at.Child("completions"), "when completion mode is Indexed"))
	}
	if spec.Parallelism != nil && *spec.Parallelism > maxParallelIndexed {
		errs = append(errs, field.Invalid(at.Child("parallelism"), *spec.Parallelism, fmt.Sprintf("must be less than or equal to %d when completion mode is Indexed", maxParallelIndexed)))
	}
	if spec.MaxFailedIndexes != nil {
		path := at.Child("maxFailedIndexes")
		if spec.BackoffLimitPerIndex == nil {
			errs = append(errs, field.Required(at.Child("backoffLimitPerIndex"), "when maxFailedIndexes is specified"))
		}
		if *spec.MaxFailedIndexes > *spec.Completions {
			errs = append(errs, field.Invalid(path, *spec.MaxFailedIndexes, "must be less than or equal to completions"))
		}
		if *spec.MaxFailedIndexes > maxBackoffIndexed {
			errs = append(errs, field.Invalid(path, *spec.MaxFailedIndexes, fmt.Sprintf("must be less than or equal to %d", maxBackoffIndexed)))
		}
	}
	if *spec.Completions > manyCompletions && spec.BackoffLimitPerIndex != nil {
		switch {
		case spec.MaxFailedIndexes == nil:
			errs = append(errs, field.Required(at.Child("maxFailedIndexes"), fmt.Sprintf("must be specified when completions is above %d", manyCompletions)))
		case *spec.MaxFailedIndexes > maxParallelWithMany:
			errs = append(errs, field.Invalid(at.Child("maxFailedIndexes"), *spec.MaxFailedIndexes, fmt.Sprintf("must be less than or equal to %d when completions are above %d and used with backoff limit per index", maxParallelWithMany, manyCompletions)))
		}
		if spec.Parallelism != nil && *spec.Parallelism > maxParallelWithMany {
			errs = append(errs, field.Invalid(at.Child("parallelism"), *spec.Parallelism, fmt.Sprintf("must be less than or equal to %d when completions are above %d and used with backoff limit per index", maxParallelWithMany, manyCompletions)))
		}
	}
	return errs
}

func validateFailurePolicy(spec *batchv1.JobSpec, at *field.Path) field.ErrorList {
	policy := spec.PodFailurePolicy
	if policy == nil {
		return nil
	}
	names := map[string]bool{}
	for i := range spec.Template.Spec.Containers {
		names[spec.Template.Spec.Containers[i].Name] = true
	}
	for i := range spec.Template.Spec.InitContainers {
		names[spec.Template.Spec.InitContainers[i].Name] = true
	}
	at = at.Child("rules")
	var errs field.ErrorList
	if len(policy.Rules) > maxFailureRules {
		return field.ErrorList{field.TooMany(at, len(policy.Rules), maxFailureRules)}
	}
	for i := range policy.Rules {
		rule, at := &policy.Rules[i], at.Index(i)
		errs = append(errs, check.OneOf(at.Child("action"), rule.Action,
			batchv1.PodFailurePolicyActionFailJob, batchv1.PodFailurePolicyActionFailIndex, batchv1.PodFailurePolicyActionIgnore, batchv1.PodFailurePolicyActionCount)...)
		if rule.Action == batchv1.PodFailurePolicyActionFailIndex && spec.BackoffLimitPerIndex == nil {
			errs = append(errs, field.Invalid(at.Child("action"), rule.Action, "requires the backoffLimitPerIndex to be set"))
		}
		switch has, conditions := rule.OnExitCodes != nil, len(rule.OnPodConditions) > 0; {
		case has && conditions:
			errs = append(errs, field.Invalid(at, field.OmitValueType{}, "specifying both OnExitCodes and OnPodConditions is not supported"))
		case !has && !conditions:
			errs = append(errs, field.Invalid(at, field.OmitValueType{}, "specifying one of OnExitCodes and OnPodConditions is required"))
		}
		if rule.OnExitCodes != nil {
			errs = append(errs, validateExitCodes(rule.OnExitCodes, names, at.Child("onExitCodes"))...)
		}
		if len(rule.OnPodConditions) > maxConditionRules {
			errs = append(errs, field.TooMany(at.Child("onPodConditions"), len(rule.OnPodConditions), maxConditionRules))
			continue
		}
		for k := range rule.OnPodConditions {
			c, at := &rule.OnPodConditions[k], at.Child("onPodConditions").Index(k)
			errs = append(errs, check.RequiredText(at.Child("type"), string(c.Type), validation.IsQualifiedName)...)
			errs = append(errs, check.OneOf(at.Child("status"), c.Status, corev1.ConditionTrue, corev1.ConditionFalse, corev1.ConditionUnknown)...)
		}
	}
	return errs
}

func validateExitCodes(r *batchv1.PodFailurePolicyOnExitCodesRequirement, names map[string]bool, at *field.Path) field.ErrorList {
	errs := check.OneOf(at.Child("operator"), r.Operator, batchv1.PodFailurePolicyOnExitCodesOpIn, batchv1.PodFailurePolicyOnExitCodesOpNotIn)
	if r.ContainerName != nil && !names[*r.ContainerName] {
		errs = append(errs, field.Invalid(at.Child("containerName"), *r.ContainerName, "must be one of the container or initContainer names in the pod template"))
	}
	values := at.Child("values")
	switch {
	case len(r.Values) == 0:
		return append(errs, field.Invalid(values, r.Values, "at least one value is required"))
	case len(r.Values) > maxExitCodes:
		return append(errs, field.TooMany(values, len(r.Values), maxExitCodes))
	}
	seen := map[int32]bool{}
	for i, v := range r.Values {
		if v == 0 && r.Operator == batchv1.PodFailurePolicyOnExitCodesOpIn {
			errs = append(errs, field.Invalid(values.Index(i), v, "must not be 0 for the In operator"))
		}
		if seen[v] {
			errs = append(errs, field.Duplicate(values.Index(i), v))
		} else if i > 0 && v < r.Values[i-1] {
			errs = append(errs, field.Invalid(values, r.Values, "must be ordered"))
			break
		}
		seen[v] = true
	}
	return errs
}

func validateSuccessPolicy(spec *batchv1.JobSpec, at *field.Path) field.ErrorList {
	policy := spec.SuccessPolicy
	if policy == nil {
		return nil
	}
	if !indexed(spec) {
		return field.ErrorList{field.Invalid(at, field.OmitValueType{}, "requires indexed completion mode")}
	}
	at = at.Child("rules")
	switch {
	case len(policy.Rules) == 0:
		return field.ErrorList{field.Required(at, "at least one rules must be specified when the successPolicy is specified")}
	case len(policy.Rules) > maxSuccessRules:
		return field.ErrorList{field.TooMany(at, len(policy.Rules), maxSuccessRules)}
	}
	completions := int32(0)
	if spec.Completions != nil {
		completions = *spec.Completions
	}
	var errs field.ErrorList
	for i := range policy.Rules {
		rule, at := &policy.Rules[i], at.Index(i)
		if rule.SucceededCount == nil && rule.SucceededIndexes == nil {
			errs = append(errs, field.Required(at, "at least one of succeededCount or succeededIndexes must be specified"))
		}
		total := completions
		if rule.SucceededIndexes != nil {
			path := at.Child("succeededIndexes")
			if len(*rule.SucceededIndexes) > maxSuccessIndexes {
				errs = append(errs, field.TooLong(path, "", maxSuccessIndexes))
				continue
			}
			n, err := countIndexes(*rule.SucceededIndexes, completions)
			if err != nil {
				errs = append(errs, field.Invalid(path, *rule.SucceededIndexes, "error parsing succeededIndexes: "+err.Error()))
				continue
			}
			total = n
		}
		if n := rule.SucceededCount; n != nil {
			path := at.Child("succeededCount")
			errs = append(errs, check.NonNegative(path, int64(*n))...)
			if *n > total {
				what := "the number of indexes in the specified succeededIndexes field"
				if rule.SucceededIndexes == nil {
					what = fmt.Sprintf("%d (the number of specified completions)", completions)
				}
				errs = append(errs, field.Invalid(path, *n, fmt.Sprintf("must be less than or equal to %s", what)))
			}
		}
	}
	return errs
}

// countIndexes counts the indexes of a list like "0,2-4", which must rise and
// stay below completions.
func countIndexes(text string, completions int32) (int32, error) {
	last, total := int64(-1), int64(0)
	for part := range strings.SplitSeq(text, ",") {
		first, second, isRange := strings.Cut(part, "-")
		from, err := strconv.ParseInt(first, 10, 32)
		if err != nil {
			return 0, fmt.Errorf("cannot convert string to integer for index: %q", first)
		}
		to := from
		if isRange {
			if to, err = strconv.ParseInt(second, 10, 32); err != nil {
				return 0, fmt.Errorf("cannot convert string to integer for index: %q", second)
			}
		}
		switch {
		case to >= int64(completions):
			return 0, fmt.Errorf("too large index: %q", part)
		case from <= last:
			return 0, fmt.Errorf("non-increasing order, previous: %d, current: %d", last, from)
		case isRange && to <= from:
			return 0, fmt.Errorf("non-increasing order, previous: %d, current: %d", from, to)
		}
		total += to - from + 1
		last = to
	}
	return int32(min(total, math.MaxInt32)), nil
}

func validateJobUpdate(j, old *batchv1.Job) field.ErrorList {
	spec := field.NewPath("spec")
	errs := apivalidation.ValidateObjectMetaUpdate(&j.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	errs = append(errs, validateJobSelector(&j.Spec, spec)...)
	errs = append(errs, validateJobSpec(&j.Spec, spec)...)
	errs = append(errs, core.ValidateTemplateCost(j, &j.Spec.Template, &old.Spec.Template, spec.Child("template"))...)
	errs = append(errs, validateCompletionsUpdate(&j.Spec, &old.Spec, spec.Child("completions"))...)
	errs = append(errs, apivalidation.ValidateImmutableField(j.Spec.Selector, old.Spec.Selector, spec.Child("selector"))...)
	errs = append(errs, validateTemplateUpdate(j, old, spec.Child("template"))...)
	errs = append(errs, apivalidation.ValidateImmutableField(j.Spec.CompletionMode, old.Spec.CompletionMode, spec.Child("completionMode"))...)
	errs = append(errs, apivalidation.ValidateImmutableField(j.Spec.PodFailurePolicy, old.Spec.PodFailurePolicy, spec.Child("podFailurePolicy"))...)
	errs = append(errs, apivalidation.ValidateImmutableField(j.Spec.SuccessPolicy, old.Spec.SuccessPolicy, spec.Child("successPolicy"))...)
	errs = append(errs, apivalidation.ValidateImmutableField(j.Spec.BackoffLimitPerIndex, old.Spec.BackoffLimitPerIndex, spec.Child("backoffLimitPerIndex"))...)
	return append(errs, apivalidation.ValidateImmutableField(j.Spec.ManagedBy, old.Spec.ManagedBy, spec.Child("managedBy"))...)
}

// validateCompletionsUpdate lets an Indexed Job grow and shrink as long as all
// of it runs at once.
func validateCompletionsUpdate(spec, old *batchv1.JobSpec, at *field.Path) field.ErrorList {
	if !indexed(spec) {
		return apivalidation.ValidateImmutableField(spec.Completions, old.Completions, at)
	}
	if equality.Semantic.DeepEqual(spec.Completions, old.Completions) {
		return nil
	}
	if spec.Completions == nil || spec.Parallelism == nil || *spec.Completions != *spec.Parallelism ||
		old.Completions == nil || old.Parallelism == nil || *old.Completions != *old.Parallelism {
		return field.ErrorList{field.Invalid(at, spec.Completions, fmt.Sprintf("can only be modified in tandem with %s", at.Root().Child("parallelism").String()))}
	}
	return nil
}

// validateTemplateUpdate lets queueing systems direct a Job's pods while the
// Job is suspended and none of them runs.
func validateTemplateUpdate(j, old *batchv1.Job, at *field.Path) field.ErrorList {
	next, was := j.Spec.Template.DeepCopy(), &old.Spec.Template
	if old.Spec.Suspend != nil && *old.Spec.Suspend && old.Status.Active == 0 && old.Status.StartTime == nil {
		next.Annotations, next.Labels = was.Annotations, was.Labels
		next.Spec.NodeSelector = was.Spec.NodeSelector
		next.Spec.Affinity = was.Spec.Affinity
		next.Spec.Tolerations = was.Spec.Tolerations
		next.Spec.SchedulingGates = was.Spec.SchedulingGates
		for i := range next.Spec.Containers {
			if i < len(was.Spec.Containers) {
				next.Spec.Containers[i].Resources = was.Spec.Containers[i].Resources
			}
		}
	}
	return apivalidation.ValidateImmutableField(*next, *was, at)
}

func validateJobStatusUpdate(j, old *batchv1.Job) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&j.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	at, status := field.NewPath("status"), &j.Status
	for name, n := range map[string]int32{"active": status.Active, "succeeded": status.Succeeded, "failed": status.Failed} {
		errs = append(errs, check.NonNegative(at.Child(name), int64(n))...)
	}
	for name, n := range map[string]*int32{"ready": status.Ready, "terminating": status.Terminating} {
		if n != nil {
			errs = append(errs, check.NonNegative(at.Child(name), int64(*n))...)
		}
	}
	complete, failed := isTrue(j, batchv1.JobComplete), isTrue(j, batchv1.JobFailed)
	conditions := at.Child("conditions")
	if complete && failed {
		errs = append(errs, field.Invalid(conditions, field.OmitValueType{}, "cannot set Complete=True and Failed=true conditions"))
	}
	for _, kind := range []batchv1.JobConditionType{batchv1.JobComplete, batchv1.JobFailed, batchv1.JobSuccessCriteriaMet, batchv1.JobFailureTarget} {
		if isTrue(old, kind) && !isTrue(j, kind) {
			errs = append(errs, field.Invalid(conditions, field.OmitValueType{}, fmt.Sprintf("cannot disable the terminal %s=True condition", kind)))
		}
	}
	if (complete || failed) && status.Active > 0 {
		errs = append(errs, field.Invalid(at.Child("active"), status.Active, "active>0 is invalid for finished job"))
	}
	if complete && status.CompletionTime == nil {
		errs = append(errs, field.Required(at.Child("completionTime"), "completionTime is required for Complete jobs"))
	}
	if !complete && status.CompletionTime != nil {
		errs = append(errs, field.Invalid(at.Child("completionTime"), status.CompletionTime, "cannot set completionTime when there is no Complete=True condition"))
	}
	return errs
}
