package core

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/kind"
)

// PodTemplate is the kind PodTemplate. No controller makes pods of it, here or
// elsewhere: it is kept for those who ask for it.
func PodTemplate() kind.Kind {
	return kind.Typed[*corev1.PodTemplate]{
		GVK:        corev1.SchemeGroupVersion.WithKind("PodTemplate"),
		Resource:   "podtemplates",
		Singular:   "podtemplate",
		Namespaced: true,

		New:     func() runtime.Object { return &corev1.PodTemplate{} },
		NewList: func() runtime.Object { return &corev1.PodTemplateList{} },

		Default:       func(p *corev1.PodTemplate) { DefaultPodTemplate(&p.Template) },
		PrepareCreate: func(p *corev1.PodTemplate) { p.Generation = 1 },
		PrepareUpdate: func(p, old *corev1.PodTemplate) {
			p.Generation = old.Generation
			if !equality.Semantic.DeepEqual(p.Template, old.Template) {
				p.Generation++
			}
		},
		Validate: func(p *corev1.PodTemplate) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&p.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			errs = append(errs, ValidateTemplateCost(p, &p.Template, nil, field.NewPath("template"))...)
			return append(errs, ValidatePodTemplate(&p.Template, field.NewPath("template"))...)
		},
		ValidateUpdate: func(p, old *corev1.PodTemplate) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&p.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, ValidateTemplateCost(p, &p.Template, &old.Template, field.NewPath("template"))...)
			return append(errs, ValidatePodTemplate(&p.Template, field.NewPath("template"))...)
		},
		Warnings: func(p *corev1.PodTemplate) []string { return PodSpecWarnings(&p.Template.Spec, "template.spec") },

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Containers", "Names of each container in the template."),
			cells.Text("Images", "Images referenced by each container in the template."),
			cells.Text("Pod Labels", "The labels for the pod template."),
		},
		Row: func(p *corev1.PodTemplate, _ time.Time) []any {
			names, images := cells.Containers(p.Template.Spec.Containers)
			return []any{p.Name, names, images, metav1.FormatLabelSelector(metav1.SetAsLabelSelector(p.Template.Labels))}
		},
		UnconditionalUpdate: true,
	}.Kind()
}
