// Package node describes the kinds of the node.k8s.io API group.
package node

import (
	"time"

	nodev1 "k8s.io/api/node/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// RuntimeClass is the kind RuntimeClass: a name for one of the ways in which
// nodes can run pods, with what that way costs and where it is to be had.
func RuntimeClass() kind.Kind {
	doc := nodev1.RuntimeClass{}.SwaggerDoc()
	return kind.Typed[*nodev1.RuntimeClass]{
		GVK:      nodev1.SchemeGroupVersion.WithKind("RuntimeClass"),
		Resource: "runtimeclasses",
		Singular: "runtimeclass",

		New:     func() runtime.Object { return &nodev1.RuntimeClass{} },
		NewList: func() runtime.Object { return &nodev1.RuntimeClassList{} },

		Validate: validateRuntimeClass,
		ValidateUpdate: func(c, old *nodev1.RuntimeClass) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, validateRuntimeClass(c)...)
			// Pods that run were made by the handler of their class.
			return append(errs, apivalidation.ValidateImmutableField(c.Handler, old.Handler, field.NewPath("handler"))...)
		},

		Columns: []metav1.TableColumnDefinition{cells.Name, cells.Text("Handler", doc["handler"]), cells.Age},
		Row: func(c *nodev1.RuntimeClass, now time.Time) []any {
			return []any{c.Name, c.Handler, cells.Since(c.CreationTimestamp, now)}
		},
	}.Kind()
}

func validateRuntimeClass(c *nodev1.RuntimeClass) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&c.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	errs = append(errs, check.RequiredText(field.NewPath("handler"), c.Handler, validation.IsDNS1123Label)...)
	if o := c.Overhead; o != nil {
		errs = append(errs, core.ValidateOverhead(o.PodFixed, field.NewPath("overhead", "podFixed"))...)
	}
	if s := c.Scheduling; s != nil {
		at := field.NewPath("scheduling")
		errs = append(errs, metav1validation.ValidateLabels(s.NodeSelector, at.Child("nodeSelector"))...)
		errs = append(errs, core.ValidateTolerations(s.Tolerations, at.Child("tolerations"))...)
		for i, t := range s.Tolerations {
			for _, before := range s.Tolerations[:i] {
				if t.MatchToleration(&before) {
					errs = append(errs, field.Duplicate(at.Child("tolerations").Index(i), t))
					break
				}
			}
		}
	}
	return errs
}
