package core

import (
	"maps"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// ReplicationController is the kind ReplicationController.
func ReplicationController() kind.Kind {
	return kind.Typed[*corev1.ReplicationController]{
		GVK:        corev1.SchemeGroupVersion.WithKind("ReplicationController"),
		Resource:   "replicationcontrollers",
		Singular:   "replicationcontroller",
		ShortNames: []string{"rc"},
		Categories: []string{"all"},
		Namespaced: true,

		New:     func() runtime.Object { return &corev1.ReplicationController{} },
		NewList: func() runtime.Object { return &corev1.ReplicationControllerList{} },

		Default: func(c *corev1.ReplicationController) {
			setDefault(&c.Spec.Replicas, 1)
			if c.Spec.Template == nil {
				return
			}
			if len(c.Spec.Selector) == 0 {
				c.Spec.Selector = maps.Clone(c.Spec.Template.Labels)
			}
			if len(c.Labels) == 0 {
				c.Labels = maps.Clone(c.Spec.Template.Labels)
			}
			DefaultPodTemplate(c.Spec.Template)
		},
		PrepareCreate: func(c *corev1.ReplicationController) {
			c.Generation = 1
			c.Status = corev1.ReplicationControllerStatus{}
		},
		PrepareUpdate: func(c, old *corev1.ReplicationController) {
			c.Status = old.Status
			c.Generation = old.Generation
			if !equality.Semantic.DeepEqual(c.Spec, old.Spec) {
				c.Generation++
			}
		},
		Validate: func(c *corev1.ReplicationController) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&c.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			errs = append(errs, ValidateTemplateCost(c, c.Spec.Template, nil, field.NewPath("spec", "template"))...)
			return append(errs, validateReplication(&c.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(c, old *corev1.ReplicationController) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, ValidateTemplateCost(c, c.Spec.Template, old.Spec.Template, field.NewPath("spec", "template"))...)
			return append(errs, validateReplication(&c.Spec, field.NewPath("spec"))...)
		},
		Warnings: func(c *corev1.ReplicationController) []string {
			if c.Spec.Template == nil {
				return nil
			}
			return PodSpecWarnings(&c.Spec.Template.Spec, "spec.template.spec")
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Number("Desired", corev1.ReplicationControllerSpec{}.SwaggerDoc()["replicas"]),
			cells.Number("Current", corev1.ReplicationControllerStatus{}.SwaggerDoc()["replicas"]),
			cells.Number("Ready", corev1.ReplicationControllerStatus{}.SwaggerDoc()["readyReplicas"]),
			cells.Age,
			cells.Wide(cells.Text("Containers", "Names of each container in the template.")),
			cells.Wide(cells.Text("Images", "Images referenced by each container in the template.")),
			cells.Wide(cells.Text("Selector", corev1.ReplicationControllerSpec{}.SwaggerDoc()["selector"])),
		},
		Row: func(c *corev1.ReplicationController, now time.Time) []any {
			names, images := "", ""
			if c.Spec.Template != nil {
				names, images = cells.Containers(c.Spec.Template.Spec.Containers)
			}
			return []any{
				c.Name, int64(wanted(c)), int64(c.Status.Replicas), int64(c.Status.ReadyReplicas), cells.Since(c.CreationTimestamp, now),
				names, images, metav1.FormatLabelSelector(metav1.SetAsLabelSelector(c.Spec.Selector)),
			}
		},
		Fields: func(c *corev1.ReplicationController) fields.Set {
			return fields.Set{"status.replicas": strconv.Itoa(int(c.Status.Replicas))}
		},

		Status: &kind.TypedStatus[*corev1.ReplicationController]{
			PrepareUpdate: func(c, old *corev1.ReplicationController) {
				c.Spec = old.Spec
				c.Generation = old.Generation
			},
			ValidateUpdate: func(c, old *corev1.ReplicationController) field.ErrorList {
				status := field.NewPath("status")
				errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
				errs = append(errs, check.NonNegative(status.Child("replicas"), int64(c.Status.Replicas))...)
				for name, n := range map[string]int32{
					"fullyLabeledReplicas": c.Status.FullyLabeledReplicas, "readyReplicas": c.Status.ReadyReplicas, "availableReplicas": c.Status.AvailableReplicas,
				} {
					errs = append(errs, check.NonNegative(status.Child(name), int64(n))...)
					if n > c.Status.Replicas {
						errs = append(errs, field.Invalid(status.Child(name), n, "cannot be greater than status.replicas"))
					}
				}
				return errs
			},
		},
		Scale: &kind.TypedScale[*corev1.ReplicationController]{
			SpecReplicas:    wanted,
			SetSpecReplicas: func(c *corev1.ReplicationController, n int32) { c.Spec.Replicas = &n },
			StatusReplicas:  func(c *corev1.ReplicationController) int32 { return c.Status.Replicas },
			Selector: func(c *corev1.ReplicationController) (string, error) {
				return labels.Set(c.Spec.Selector).AsSelector().String(), nil
			},
		},
		UnconditionalUpdate: true,
		OrphansByDefault:    true,
	}.Kind()
}

// wanted is the number asked for; left out, it is 1.
func wanted(c *corev1.ReplicationController) int32 {
	if c.Spec.Replicas == nil {
		return 1
	}
	return *c.Spec.Replicas
}

func validateReplication(spec *corev1.ReplicationControllerSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if spec.Replicas == nil {
		errs = append(errs, field.Required(at.Child("replicas"), ""))
	} else {
		errs = append(errs, check.NonNegative(at.Child("replicas"), int64(*spec.Replicas))...)
	}
	errs = append(errs, check.NonNegative(at.Child("minReadySeconds"), int64(spec.MinReadySeconds))...)
	if len(spec.Selector) == 0 {
		errs = append(errs, field.Required(at.Child("selector"), ""))
	}
	template := at.Child("template")
	if spec.Template == nil {
		return append(errs, field.Required(template, ""))
	}
	if selector := labels.Set(spec.Selector).AsSelector(); !selector.Empty() && !selector.Matches(labels.Set(spec.Template.Labels)) {
		errs = append(errs, field.Invalid(template.Child("metadata", "labels"), spec.Template.Labels, "`selector` does not match template `labels`"))
	}
	errs = append(errs, ValidatePodTemplate(spec.Template, template)...)
	if policy := spec.Template.Spec.RestartPolicy; policy != corev1.RestartPolicyAlways && policy != "" {
		errs = append(errs, field.NotSupported(template.Child("spec", "restartPolicy"), policy, []corev1.RestartPolicy{corev1.RestartPolicyAlways}))
	}
	if spec.Template.Spec.ActiveDeadlineSeconds != nil {
		errs = append(errs, field.Forbidden(template.Child("spec", "activeDeadlineSeconds"), "activeDeadlineSeconds in ReplicationController is not Supported"))
	}
	return errs
}
