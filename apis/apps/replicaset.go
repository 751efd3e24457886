package apps

import (
	"strconv"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// ReplicaSet is the kind ReplicaSet.
func ReplicaSet() kind.Kind {
	return kind.Typed[*appsv1.ReplicaSet]{
		GVK:        appsv1.SchemeGroupVersion.WithKind("ReplicaSet"),
		Resource:   "replicasets",
		Singular:   "replicaset",
		ShortNames: []string{"rs"},
		Categories: []string{"all"},
		Namespaced: true,

		New:     func() runtime.Object { return &appsv1.ReplicaSet{} },
		NewList: func() runtime.Object { return &appsv1.ReplicaSetList{} },

		Default: func(r *appsv1.ReplicaSet) {
			setDefault(&r.Spec.Replicas, 1)
			core.DefaultPodTemplate(&r.Spec.Template)
		},
		PrepareCreate: func(r *appsv1.ReplicaSet) {
			r.Generation = 1
			r.Status = appsv1.ReplicaSetStatus{}
		},
		PrepareUpdate: func(r, old *appsv1.ReplicaSet) {
			r.Status = old.Status
			r.Generation = old.Generation
			if !equality.Semantic.DeepEqual(r.Spec, old.Spec) {
				r.Generation++
			}
		},
		Validate: func(r *appsv1.ReplicaSet) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&r.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			errs = append(errs, core.ValidateTemplateCost(r, &r.Spec.Template, nil, field.NewPath("spec", "template"))...)
			return append(errs, validateReplicaSetSpec(&r.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(r, old *appsv1.ReplicaSet) field.ErrorList {
			spec := field.NewPath("spec")
			errs := apivalidation.ValidateObjectMetaUpdate(&r.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, core.ValidateTemplateCost(r, &r.Spec.Template, &old.Spec.Template, spec.Child("template"))...)
			errs = append(errs, validateReplicaSetSpec(&r.Spec, spec)...)
			return append(errs, apivalidation.ValidateImmutableField(r.Spec.Selector, old.Spec.Selector, spec.Child("selector"))...)
		},
		Warnings: func(r *appsv1.ReplicaSet) []string {
			return core.PodSpecWarnings(&r.Spec.Template.Spec, "spec.template.spec")
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Number("Desired", appsv1.ReplicaSetSpec{}.SwaggerDoc()["replicas"]),
			cells.Number("Current", appsv1.ReplicaSetStatus{}.SwaggerDoc()["replicas"]),
			cells.Number("Ready", appsv1.ReplicaSetStatus{}.SwaggerDoc()["readyReplicas"]),
			cells.Age,
			cells.Wide(cells.Text("Containers", "Names of each container in the template.")),
			cells.Wide(cells.Text("Images", "Images referenced by each container in the template.")),
			cells.Wide(cells.Text("Selector", appsv1.ReplicaSetSpec{}.SwaggerDoc()["selector"])),
		},
		Row: func(r *appsv1.ReplicaSet, now time.Time) []any {
			names, images := cells.Containers(r.Spec.Template.Spec.Containers)
			return []any{
				r.Name, int64(replicas(r.Spec.Replicas)), int64(r.Status.Replicas), int64(r.Status.ReadyReplicas),
				cells.Since(r.CreationTimestamp, now), names, images, metav1.FormatLabelSelector(r.Spec.Selector),
			}
		},
		Fields: func(r *appsv1.ReplicaSet) fields.Set {
			return fields.Set{"status.replicas": strconv.Itoa(int(r.Status.Replicas))}
		},

		Status: &kind.TypedStatus[*appsv1.ReplicaSet]{
			PrepareUpdate: func(r, old *appsv1.ReplicaSet) {
				r.Spec = old.Spec
				r.Generation = old.Generation
			},
			ValidateUpdate: func(r, old *appsv1.ReplicaSet) field.ErrorList {
				errs := apivalidation.ValidateObjectMetaUpdate(&r.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
				return append(errs, validateReplicaSetStatus(&r.Status, field.NewPath("status"))...)
			},
		},
		Scale: &kind.TypedScale[*appsv1.ReplicaSet]{
			SpecReplicas:    func(r *appsv1.ReplicaSet) int32 { return replicas(r.Spec.Replicas) },
			SetSpecReplicas: func(r *appsv1.ReplicaSet, n int32) { r.Spec.Replicas = &n },
			StatusReplicas:  func(r *appsv1.ReplicaSet) int32 { return r.Status.Replicas },
			Selector:        func(r *appsv1.ReplicaSet) (string, error) { return selectorText(r.Spec.Selector) },
		},
		UnconditionalUpdate: true,
	}.Kind()
}

func validateReplicaSetSpec(spec *appsv1.ReplicaSetSpec, at *field.Path) field.ErrorList {
	errs := check.NonNegative(at.Child("replicas"), int64(replicas(spec.Replicas)))
	errs = append(errs, check.NonNegative(at.Child("minReadySeconds"), int64(spec.MinReadySeconds))...)
	return append(errs, validateSelected(spec.Selector, &spec.Template, "replicaset", at)...)
}

func validateReplicaSetStatus(status *appsv1.ReplicaSetStatus, at *field.Path) field.ErrorList {
	errs := nonNegative(at, []count{
		{"replicas", status.Replicas},
		{"fullyLabeledReplicas", status.FullyLabeledReplicas},
		{"readyReplicas", status.ReadyReplicas},
		{"availableReplicas", status.AvailableReplicas},
	})
	errs = append(errs, check.NonNegative(at.Child("observedGeneration"), status.ObservedGeneration)...)
	return append(errs, atMost(at, []bound{
		{"fullyLabeledReplicas", status.FullyLabeledReplicas, "status.replicas", status.Replicas},
		{"readyReplicas", status.ReadyReplicas, "status.replicas", status.Replicas},
		{"availableReplicas", status.AvailableReplicas, "status.replicas", status.Replicas},
		{"availableReplicas", status.AvailableReplicas, "readyReplicas", status.ReadyReplicas},
	})...)
}
