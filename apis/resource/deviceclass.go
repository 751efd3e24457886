package resource

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// DeviceClass is the kind DeviceClass: a name for devices with the same
// properties, by which claims ask for them.
func DeviceClass() kind.Kind {
	return kind.Typed[*resourcev1.DeviceClass]{
		GVK:      resourcev1.SchemeGroupVersion.WithKind("DeviceClass"),
		Resource: "deviceclasses",
		Singular: "deviceclass",

		New:     func() runtime.Object { return &resourcev1.DeviceClass{} },
		NewList: func() runtime.Object { return &resourcev1.DeviceClassList{} },

		PrepareCreate: func(c *resourcev1.DeviceClass) { c.Generation = 1 },
		PrepareUpdate: func(c, old *resourcev1.DeviceClass) {
			c.Generation = old.Generation
			if !equality.Semantic.DeepEqual(c.Spec, old.Spec) {
				c.Generation++
			}
		},
		Validate: validateClass,
		ValidateUpdate: func(c, old *resourcev1.DeviceClass) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, validateClass(c)...)
		},

		Columns: []metav1.TableColumnDefinition{cells.Name, cells.Age},
		Row: func(c *resourcev1.DeviceClass, now time.Time) []any {
			return []any{c.Name, cells.Since(c.CreationTimestamp, now)}
		},

		UnconditionalUpdate: true,
	}.Kind()
}

func validateClass(c *resourcev1.DeviceClass) field.ErrorList {
	spec := field.NewPath("spec")
	errs := apivalidation.ValidateObjectMeta(&c.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	errs = append(errs, validateSelectors(c.Spec.Selectors, spec.Child("selectors"))...)
	errs = append(errs, atMost(spec.Child("config"), len(c.Spec.Config), resourcev1.DeviceConfigMaxSize)...)
	for i, config := range c.Spec.Config {
		errs = append(errs, validateConfiguration(config.DeviceConfiguration, spec.Child("config").Index(i))...)
	}
	if name := c.Spec.ExtendedResourceName; name != nil {
		faults := check.RequiredText(spec.Child("extendedResourceName"), *name, validation.IsQualifiedName)
		if len(faults) == 0 && (!core.IsExtended(corev1.ResourceName(*name)) || strings.HasPrefix(*name, resourcev1.ResourceDeviceClassPrefix)) {
			faults = append(faults, field.Invalid(spec.Child("extendedResourceName"), *name, "must be the name of an extended resource, such as example.com/gpu"))
		}
		errs = append(errs, faults...)
	}
	return errs
}
