package apps

import (
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

const (
	defaultHistory         = 10
	defaultProgressSeconds = 600
	// defaultBurst is how many pods more, and fewer, a rolling update may have.
	defaultBurst = "25%"
)

// Deployment is the kind Deployment.
func Deployment() kind.Kind {
	return kind.Typed[*appsv1.Deployment]{
		GVK:        appsv1.SchemeGroupVersion.WithKind("Deployment"),
		Resource:   "deployments",
		Singular:   "deployment",
		ShortNames: []string{"deploy"},
		Categories: []string{"all"},
		Namespaced: true,

		New:     func() runtime.Object { return &appsv1.Deployment{} },
		NewList: func() runtime.Object { return &appsv1.DeploymentList{} },

		Default: defaultDeployment,
		PrepareCreate: func(d *appsv1.Deployment) {
			d.Generation = 1
			d.Status = appsv1.DeploymentStatus{}
		},
		PrepareUpdate:  prepareDeploymentUpdate,
		Validate:       validateDeployment,
		ValidateUpdate: validateDeploymentUpdate,
		Warnings: func(d *appsv1.Deployment) []string {
			return core.PodSpecWarnings(&d.Spec.Template.Spec, "spec.template.spec")
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Ready", "Number of the pod with ready state"),
			cells.Number("Up-to-date", appsv1.DeploymentStatus{}.SwaggerDoc()["updatedReplicas"]),
			cells.Number("Available", appsv1.DeploymentStatus{}.SwaggerDoc()["availableReplicas"]),
			cells.Age,
			cells.Wide(cells.Text("Containers", "Names of each container in the template.")),
			cells.Wide(cells.Text("Images", "Images referenced by each container in the template.")),
			cells.Wide(cells.Text("Selector", appsv1.DeploymentSpec{}.SwaggerDoc()["selector"])),
		},
		Row: func(d *appsv1.Deployment, now time.Time) []any {
			names, images := cells.Containers(d.Spec.Template.Spec.Containers)
			return []any{
				d.Name, fmt.Sprintf("%d/%d", d.Status.ReadyReplicas, replicas(d.Spec.Replicas)),
				int64(d.Status.UpdatedReplicas), int64(d.Status.AvailableReplicas),
				cells.Since(d.CreationTimestamp, now), names, images, metav1.FormatLabelSelector(d.Spec.Selector),
			}
		},

		Status: &kind.TypedStatus[*appsv1.Deployment]{
			PrepareUpdate: func(d, old *appsv1.Deployment) {
				d.Spec, d.Labels = old.Spec, old.Labels
				d.Generation = old.Generation
			},
			ValidateUpdate: validateDeploymentStatusUpdate,
		},
		Scale: &kind.TypedScale[*appsv1.Deployment]{
			SpecReplicas:    func(d *appsv1.Deployment) int32 { return replicas(d.Spec.Replicas) },
			SetSpecReplicas: func(d *appsv1.Deployment, n int32) { d.Spec.Replicas = &n },
			StatusReplicas:  func(d *appsv1.Deployment) int32 { return d.Status.Replicas },
			Selector:        func(d *appsv1.Deployment) (string, error) { return selectorText(d.Spec.Selector) },
		},
		UnconditionalUpdate: true,
	}.Kind()
}

func defaultDeployment(d *appsv1.Deployment) {
	spec := &d.Spec
	setDefault(&spec.Replicas, 1)
	setDefault(&spec.RevisionHistoryLimit, defaultHistory)
	setDefault(&spec.ProgressDeadlineSeconds, defaultProgressSeconds)
	if spec.Strategy.Type == "" {
		spec.Strategy.Type = appsv1.RollingUpdateDeploymentStrategyType
	}
	if spec.Strategy.Type == appsv1.RollingUpdateDeploymentStrategyType {
		setDefault(&spec.Strategy.RollingUpdate, appsv1.RollingUpdateDeployment{})
		setDefault(&spec.Strategy.RollingUpdate.MaxUnavailable, intstr.FromString(defaultBurst))
		setDefault(&spec.Strategy.RollingUpdate.MaxSurge, intstr.FromString(defaultBurst))
	}
	core.DefaultPodTemplate(&spec.Template)
}

// prepareDeploymentUpdate counts annotations as part of the wish: the
// controller copies them to the replica sets.
func prepareDeploymentUpdate(d, old *appsv1.Deployment) {
	d.Status = old.Status
	d.Generation = old.Generation
	if !equality.Semantic.DeepEqual(d.Spec, old.Spec) || !equality.Semantic.DeepEqual(d.Annotations, old.Annotations) {
		d.Generation++
	}
}

func validateDeployment(d *appsv1.Deployment) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&d.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	errs = append(errs, core.ValidateTemplateCost(d, &d.Spec.Template, nil, field.NewPath("spec", "template"))...)
	return append(errs, validateDeploymentSpec(&d.Spec, field.NewPath("spec"))...)
}

func validateDeploymentUpdate(d, old *appsv1.Deployment) field.ErrorList {
	spec := field.NewPath("spec")
	errs := apivalidation.ValidateObjectMetaUpdate(&d.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	errs = append(errs, core.ValidateTemplateCost(d, &d.Spec.Template, &old.Spec.Template, spec.Child("template"))...)
	errs = append(errs, validateDeploymentSpec(&d.Spec, spec)...)
	return append(errs, apivalidation.ValidateImmutableField(d.Spec.Selector, old.Spec.Selector, spec.Child("selector"))...)
}

func validateDeploymentSpec(spec *appsv1.DeploymentSpec, at *field.Path) field.ErrorList {
	errs := check.NonNegative(at.Child("replicas"), int64(replicas(spec.Replicas)))
	errs = append(errs, validateSelected(spec.Selector, &spec.Template, "deployment", at)...)
	errs = append(errs, validateStrategy(&spec.Strategy, at.Child("strategy"))...)
	errs = append(errs, check.NonNegative(at.Child("minReadySeconds"), int64(spec.MinReadySeconds))...)
	if limit := spec.RevisionHistoryLimit; limit != nil {
		errs = append(errs, check.NonNegative(at.Child("revisionHistoryLimit"), int64(*limit))...)
	}
	if deadline := spec.ProgressDeadlineSeconds; deadline != nil {
		errs = append(errs, check.NonNegative(at.Child("progressDeadlineSeconds"), int64(*deadline))...)
		if *deadline <= spec.MinReadySeconds {
			errs = append(errs, field.Invalid(at.Child("progressDeadlineSeconds"), *deadline, "must be greater than minReadySeconds"))
		}
	}
	return errs
}

func validateStrategy(strategy *appsv1.DeploymentStrategy, at *field.Path) field.ErrorList {
	rolling := at.Child("rollingUpdate")
	switch strategy.Type {
	case appsv1.RecreateDeploymentStrategyType:
		if strategy.RollingUpdate != nil {
			return field.ErrorList{field.Forbidden(rolling, "may not be specified when strategy `type` is 'Recreate'")}
		}
		return nil
	case appsv1.RollingUpdateDeploymentStrategyType:
		if strategy.RollingUpdate == nil {
			return field.ErrorList{field.Required(rolling, "this should be defaulted and never be nil")}
		}
		return validateRollingUpdate(strategy.RollingUpdate, rolling)
	}
	return field.ErrorList{field.NotSupported(at.Child("type"), strategy.Type,
		[]appsv1.DeploymentStrategyType{appsv1.RecreateDeploymentStrategyType, appsv1.RollingUpdateDeploymentStrategyType})}
}

func validateRollingUpdate(r *appsv1.RollingUpdateDeployment, at *field.Path) field.ErrorList {
	errs := append(
		validateShare(r.MaxUnavailable, at.Child("maxUnavailable")),
		validateShare(r.MaxSurge, at.Child("maxSurge"))...)
	if len(errs) == 0 && isNone(r.MaxUnavailable) && isNone(r.MaxSurge) {
		errs = append(errs, field.Invalid(at.Child("maxUnavailable"), r.MaxUnavailable, "may not be 0 when `maxSurge` is 0"))
	}
	// More than all of them cannot be unavailable.
	if share := r.MaxUnavailable; len(errs) == 0 && share != nil && share.Type == intstr.String {
		if n, err := intstr.GetScaledValueFromIntOrPercent(share, 100, false); err == nil && n > 100 {
			errs = append(errs, field.Invalid(at.Child("maxUnavailable"), share, "must not be greater than 100%"))
		}
	}
	return errs
}

func validateDeploymentStatusUpdate(d, old *appsv1.Deployment) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&d.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	at, status := field.NewPath("status"), &d.Status
	errs = append(errs, check.NonNegative(at.Child("observedGeneration"), status.ObservedGeneration)...)
	errs = append(errs, nonNegative(at, []count{
		{"replicas", status.Replicas},
		{"updatedReplicas", status.UpdatedReplicas},
		{"readyReplicas", status.ReadyReplicas},
		{"availableReplicas", status.AvailableReplicas},
		{"unavailableReplicas", status.UnavailableReplicas},
	})...)
	errs = append(errs, atMost(at, []bound{
		{"updatedReplicas", status.UpdatedReplicas, "status.replicas", status.Replicas},
		{"readyReplicas", status.ReadyReplicas, "status.replicas", status.Replicas},
		{"availableReplicas", status.AvailableReplicas, "status.replicas", status.Replicas},
		{"availableReplicas", status.AvailableReplicas, "readyReplicas", status.ReadyReplicas},
	})...)
	return append(errs, validateCollisions(status.CollisionCount, old.Status.CollisionCount, at.Child("collisionCount"))...)
}
