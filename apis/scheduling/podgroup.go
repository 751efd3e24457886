package scheduling

import (
	"time"

	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// noComposite is why groups of groups are refused.
const noComposite = "groups of PodGroups (CompositePodGroup) are not served: leave it out"

// PodGroup is the kind PodGroup: pods that are scheduled as its policy says,
// which name it in spec.schedulingGroup.
func PodGroup() kind.Kind {
	return kind.Typed[*schedulingv1beta1.PodGroup]{
		GVK:        schedulingv1beta1.SchemeGroupVersion.WithKind("PodGroup"),
		Resource:   "podgroups",
		Singular:   "podgroup",
		Namespaced: true,

		New:     func() runtime.Object { return &schedulingv1beta1.PodGroup{} },
		NewList: func() runtime.Object { return &schedulingv1beta1.PodGroupList{} },

		Default: func(g *schedulingv1beta1.PodGroup) {
			if g.Spec.DisruptionMode == nil {
				g.Spec.DisruptionMode = &schedulingv1beta1.DisruptionMode{Single: &schedulingv1beta1.SingleDisruptionMode{}}
			}
		},
		PrepareCreate: func(g *schedulingv1beta1.PodGroup) {
			g.Generation = 1
			g.Status = schedulingv1beta1.PodGroupStatus{}
		},
		PrepareUpdate: func(g, old *schedulingv1beta1.PodGroup) {
			g.Status = old.Status
			g.Generation = old.Generation
			if !equality.Semantic.DeepEqual(g.Spec, old.Spec) {
				g.Generation++
			}
		},
		Validate:       validateGroup,
		ValidateUpdate: validateGroupUpdate,
		Warnings: func(g *schedulingv1beta1.PodGroup) []string {
			return ignored("spec", g.Spec.SchedulingConstraints, g.Spec.ResourceClaims, g.Spec.DisruptionMode)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Policy", "How the group's pods are scheduled: Basic, or Gang with the number that must have nodes at the same time."),
			cells.Text("Scheduled", "Whether what the policy asks for has been there once."),
			cells.Age,
			cells.Wide(cells.Text("Workload", "The Workload with the template of the group.")),
		},
		Row: func(g *schedulingv1beta1.PodGroup, now time.Time) []any {
			scheduled, workload := "Unknown", ""
			if c := meta.FindStatusCondition(g.Status.Conditions, schedulingv1beta1.PodGroupInitiallyScheduled); c != nil {
				scheduled = string(c.Status)
			}
			if ref := g.Spec.WorkloadRef; ref != nil {
				workload = ref.WorkloadName
			}
			return []any{g.Name, policyCell(&g.Spec.SchedulingPolicy), scheduled, cells.Since(g.CreationTimestamp, now), cells.None(workload)}
		},

		Status: &kind.TypedStatus[*schedulingv1beta1.PodGroup]{
			PrepareUpdate: func(g, old *schedulingv1beta1.PodGroup) {
				g.Spec = old.Spec
				metav1.ResetObjectMetaForStatus(&g.ObjectMeta, &old.ObjectMeta)
			},
			ValidateUpdate: func(g, old *schedulingv1beta1.PodGroup) field.ErrorList {
				errs := apivalidation.ValidateObjectMetaUpdate(&g.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
				return append(errs, validateGroupStatus(&g.Status, field.NewPath("status"))...)
			},
		},
		UnconditionalUpdate: true,
	}.Kind()
}

func validateGroup(g *schedulingv1beta1.PodGroup) field.ErrorList {
	spec := field.NewPath("spec")
	errs := apivalidation.ValidateObjectMeta(&g.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	if g.Spec.ParentCompositePodGroupName != nil {
		errs = append(errs, field.Forbidden(spec.Child("parentCompositePodGroupName"), noComposite))
	}
	if ref := g.Spec.WorkloadRef; ref != nil {
		at := spec.Child("workloadRef")
		errs = append(errs, check.RequiredText(at.Child("workloadName"), ref.WorkloadName, check.Subdomain)...)
		errs = append(errs, check.RequiredText(at.Child("templateName"), ref.TemplateName, validation.IsDNS1123Label)...)
	}
	errs = append(errs, validatePolicy(&g.Spec.SchedulingPolicy, spec.Child("schedulingPolicy"))...)
	errs = append(errs, validateConstraints(g.Spec.SchedulingConstraints, spec.Child("schedulingConstraints"))...)
	errs = append(errs, validateClaims(g.Spec.ResourceClaims, spec.Child("resourceClaims"))...)
	errs = append(errs, validateDisruption(g.Spec.DisruptionMode, spec.Child("disruptionMode"))...)
	return append(errs, groupRank(&g.Spec).validate(spec)...)
}

func groupRank(s *schedulingv1beta1.PodGroupSpec) rank {
	return rank{s.PriorityClassName, s.Priority, s.PreemptionPolicy}
}

func validateGroupUpdate(g, old *schedulingv1beta1.PodGroup) field.ErrorList {
	spec := field.NewPath("spec")
	errs := apivalidation.ValidateObjectMetaUpdate(&g.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	errs = append(errs, validateGroup(g)...)
	errs = append(errs, apivalidation.ValidateImmutableField(g.Spec.WorkloadRef, old.Spec.WorkloadRef, spec.Child("workloadRef"))...)
	errs = append(errs, validatePolicyUpdate(&g.Spec.SchedulingPolicy, &old.Spec.SchedulingPolicy, spec.Child("schedulingPolicy"))...)
	errs = append(errs, apivalidation.ValidateImmutableField(g.Spec.SchedulingConstraints, old.Spec.SchedulingConstraints, spec.Child("schedulingConstraints"))...)
	errs = append(errs, apivalidation.ValidateImmutableField(g.Spec.ResourceClaims, old.Spec.ResourceClaims, spec.Child("resourceClaims"))...)
	errs = append(errs, apivalidation.ValidateImmutableField(g.Spec.DisruptionMode, old.Spec.DisruptionMode, spec.Child("disruptionMode"))...)
	return append(errs, groupRank(&g.Spec).validateUpdate(groupRank(&old.Spec), spec)...)
}

func validateGroupStatus(s *schedulingv1beta1.PodGroupStatus, path *field.Path) field.ErrorList {
	errs := metav1validation.ValidateConditions(s.Conditions, path.Child("conditions"))
	claims := path.Child("resourceClaimStatuses")
	errs = append(errs, atMost(claims, len(s.ResourceClaimStatuses), schedulingv1beta1.MaxPodGroupResourceClaims)...)
	seen := sets.New[string]()
	for i, c := range s.ResourceClaimStatuses {
		errs = append(errs, uniqueName(c.Name, seen, claims.Index(i))...)
		if c.ResourceClaimName != nil {
			errs = append(errs, check.Text(claims.Index(i).Child("resourceClaimName"), *c.ResourceClaimName, check.Subdomain)...)
		}
	}
	return errs
}
