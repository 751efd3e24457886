package scheduling

import (
	"fmt"
	"strings"
	"time"

	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// Workload is the kind Workload: templates of PodGroups, from which the
// controllers of workloads make them.
func Workload() kind.Kind {
	return kind.Typed[*schedulingv1beta1.Workload]{
		GVK:        schedulingv1beta1.SchemeGroupVersion.WithKind("Workload"),
		Resource:   "workloads",
		Singular:   "workload",
		Namespaced: true,

		New:     func() runtime.Object { return &schedulingv1beta1.Workload{} },
		NewList: func() runtime.Object { return &schedulingv1beta1.WorkloadList{} },

		PrepareCreate: func(w *schedulingv1beta1.Workload) { w.Generation = 1 },
		PrepareUpdate: func(w, old *schedulingv1beta1.Workload) {
			w.Generation = old.Generation
			if !equality.Semantic.DeepEqual(w.Spec, old.Spec) {
				w.Generation++
			}
		},
		Validate:       validateWorkload,
		ValidateUpdate: validateWorkloadUpdate,
		Warnings: func(w *schedulingv1beta1.Workload) (out []string) {
			for i := range w.Spec.PodGroupTemplates {
				t := &w.Spec.PodGroupTemplates[i]
				out = append(out, ignored(fmt.Sprintf("spec.podGroupTemplates[%d]", i), t.SchedulingConstraints, t.ResourceClaims, t.DisruptionMode)...)
			}
			return out
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Templates", "The templates of PodGroups and their policies."),
			cells.Age,
			cells.Wide(cells.Text("Controller", "The object whose pods these are.")),
		},
		Row: func(w *schedulingv1beta1.Workload, now time.Time) []any {
			var templates []string
			for i := range w.Spec.PodGroupTemplates {
				t := &w.Spec.PodGroupTemplates[i]
				templates = append(templates, t.Name+":"+policyCell(&t.SchedulingPolicy))
			}
			controller := ""
			if ref := w.Spec.ControllerRef; ref != nil {
				controller = ref.Kind + "/" + ref.Name
			}
			return []any{w.Name, cells.None(strings.Join(templates, ",")), cells.Since(w.CreationTimestamp, now), cells.None(controller)}
		},
		UnconditionalUpdate: true,
	}.Kind()
}

// policyCell is a policy in a table.
func policyCell(policy *schedulingv1beta1.PodGroupSchedulingPolicy) string {
	switch {
	case policy.Gang != nil:
		return fmt.Sprintf("Gang(%d)", policy.Gang.MinCount)
	case policy.Basic != nil:
		return "Basic"
	}
	return "<none>"
}

func validateWorkload(w *schedulingv1beta1.Workload) field.ErrorList {
	spec := field.NewPath("spec")
	errs := apivalidation.ValidateObjectMeta(&w.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	if ref := w.Spec.ControllerRef; ref != nil {
		at := spec.Child("controllerRef")
		if ref.APIGroup != "" {
			errs = append(errs, check.Text(at.Child("apiGroup"), ref.APIGroup, check.Subdomain)...)
		}
		errs = append(errs, check.RequiredText(at.Child("kind"), ref.Kind, segment)...)
		errs = append(errs, check.RequiredText(at.Child("name"), ref.Name, segment)...)
	}
	if len(w.Spec.CompositePodGroupTemplates) > 0 {
		errs = append(errs, field.Forbidden(spec.Child("compositePodGroupTemplates"), noComposite))
	}
	templates := spec.Child("podGroupTemplates")
	if len(w.Spec.PodGroupTemplates) == 0 {
		errs = append(errs, field.Required(templates, "must have at least one item"))
	}
	errs = append(errs, atMost(templates, len(w.Spec.PodGroupTemplates), schedulingv1beta1.WorkloadMaxPodGroupTemplates)...)
	seen := sets.New[string]()
	for i := range w.Spec.PodGroupTemplates {
		t, at := &w.Spec.PodGroupTemplates[i], templates.Index(i)
		errs = append(errs, uniqueName(t.Name, seen, at)...)
		errs = append(errs, validatePolicy(&t.SchedulingPolicy, at.Child("schedulingPolicy"))...)
		errs = append(errs, validateConstraints(t.SchedulingConstraints, at.Child("schedulingConstraints"))...)
		errs = append(errs, validateClaims(t.ResourceClaims, at.Child("resourceClaims"))...)
		errs = append(errs, validateDisruption(t.DisruptionMode, at.Child("disruptionMode"))...)
		errs = append(errs, templateRank(t).validate(at)...)
	}
	return errs
}

func templateRank(t *schedulingv1beta1.PodGroupTemplate) rank {
	return rank{t.PriorityClassName, t.Priority, t.PreemptionPolicy}
}

// validateWorkloadUpdate: templates stay, known by their names; of one, minCount
// may change.
func validateWorkloadUpdate(w, old *schedulingv1beta1.Workload) field.ErrorList {
	spec := field.NewPath("spec")
	errs := apivalidation.ValidateObjectMetaUpdate(&w.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	errs = append(errs, validateWorkload(w)...)
	errs = append(errs, apivalidation.ValidateImmutableField(w.Spec.ControllerRef, old.Spec.ControllerRef, spec.Child("controllerRef"))...)
	templates := spec.Child("podGroupTemplates")
	before := map[string]*schedulingv1beta1.PodGroupTemplate{}
	for i := range old.Spec.PodGroupTemplates {
		before[old.Spec.PodGroupTemplates[i].Name] = &old.Spec.PodGroupTemplates[i]
	}
	for i := range w.Spec.PodGroupTemplates {
		t, at := &w.Spec.PodGroupTemplates[i], templates.Index(i)
		was := before[t.Name]
		if was == nil {
			errs = append(errs, field.Forbidden(at, "item may not be added"))
			continue
		}
		delete(before, t.Name)
		errs = append(errs, validatePolicyUpdate(&t.SchedulingPolicy, &was.SchedulingPolicy, at.Child("schedulingPolicy"))...)
		errs = append(errs, apivalidation.ValidateImmutableField(t.SchedulingConstraints, was.SchedulingConstraints, at.Child("schedulingConstraints"))...)
		errs = append(errs, apivalidation.ValidateImmutableField(t.ResourceClaims, was.ResourceClaims, at.Child("resourceClaims"))...)
		errs = append(errs, apivalidation.ValidateImmutableField(t.DisruptionMode, was.DisruptionMode, at.Child("disruptionMode"))...)
		errs = append(errs, templateRank(t).validateUpdate(templateRank(was), at)...)
	}
	if len(before) > 0 {
		errs = append(errs, field.Forbidden(templates, "item may not be removed"))
	}
	return errs
}
