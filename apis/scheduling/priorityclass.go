// Package scheduling describes the kinds of the scheduling.k8s.io API group.
package scheduling

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

const (
	// highest is the highest priority a user can give.
	highest = 1_000_000_000
	// systemPrefix starts the names of the cluster's own classes.
	systemPrefix = "system-"
)

// systemClasses are the cluster's own classes and their priorities.
var systemClasses = map[string]int32{
	"system-cluster-critical": 2 * highest,
	"system-node-critical":    2*highest + 1000,
}

// PriorityClass is the kind PriorityClass.
func PriorityClass() kind.Kind {
	doc := schedulingv1.PriorityClass{}.SwaggerDoc()
	return kind.Typed[*schedulingv1.PriorityClass]{
		GVK:        schedulingv1.SchemeGroupVersion.WithKind("PriorityClass"),
		Resource:   "priorityclasses",
		Singular:   "priorityclass",
		ShortNames: []string{"pc"},

		New:     func() runtime.Object { return &schedulingv1.PriorityClass{} },
		NewList: func() runtime.Object { return &schedulingv1.PriorityClassList{} },

		Default: func(c *schedulingv1.PriorityClass) {
			if c.PreemptionPolicy == nil {
				lower := corev1.PreemptLowerPriority
				c.PreemptionPolicy = &lower
			}
		},
		PrepareCreate: func(c *schedulingv1.PriorityClass) { c.Generation = 1 },
		Validate:      validatePriorityClass,
		ValidateUpdate: func(c, old *schedulingv1.PriorityClass) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			// Pods carry the number: changing it here would not change it there.
			if c.Value != old.Value {
				errs = append(errs, field.Forbidden(field.NewPath("value"), "may not be changed in an update."))
			}
			return append(errs, apivalidation.ValidateImmutableField(c.PreemptionPolicy, old.PreemptionPolicy, field.NewPath("preemptionPolicy"))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Number("Value", doc["value"]),
			{Name: "Global-Default", Type: "boolean", Description: doc["globalDefault"]},
			cells.Age,
			cells.Text("PreemptionPolicy", doc["preemptionPolicy"]),
		},
		Row: func(c *schedulingv1.PriorityClass, now time.Time) []any {
			policy := ""
			if c.PreemptionPolicy != nil {
				policy = string(*c.PreemptionPolicy)
			}
			return []any{c.Name, int64(c.Value), c.GlobalDefault, cells.Since(c.CreationTimestamp, now), policy}
		},
		UnconditionalUpdate: true,
	}.Kind()
}

func validatePriorityClass(c *schedulingv1.PriorityClass) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&c.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	own, known := systemClasses[c.Name]
	switch {
	case known && (c.Value != own || c.GlobalDefault):
		errs = append(errs, field.Forbidden(field.NewPath("value"), fmt.Sprintf("%s is a system class: its value is %d, and it is not the default", c.Name, own)))
	case known:
	case strings.HasPrefix(c.Name, systemPrefix):
		errs = append(errs, field.Forbidden(field.NewPath("metadata", "name"), "priority class names with '"+systemPrefix+"' prefix are reserved for system use only."))
	case c.Value > highest:
		errs = append(errs, field.Forbidden(field.NewPath("value"), fmt.Sprintf("maximum allowed value of a user defined priority is %v", highest)))
	}
	return append(errs, check.OneOfOrNil(field.NewPath("preemptionPolicy"), c.PreemptionPolicy, corev1.PreemptLowerPriority, corev1.PreemptNever)...)
}
