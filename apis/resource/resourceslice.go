package resource

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// ResourceSlice is the kind ResourceSlice: devices that a driver has, or a part
// of them.
func ResourceSlice() kind.Kind {
	doc := resourcev1.ResourceSliceSpec{}.SwaggerDoc()
	return kind.Typed[*resourcev1.ResourceSlice]{
		GVK:      resourcev1.SchemeGroupVersion.WithKind("ResourceSlice"),
		Resource: "resourceslices",
		Singular: "resourceslice",

		New:     func() runtime.Object { return &resourcev1.ResourceSlice{} },
		NewList: func() runtime.Object { return &resourcev1.ResourceSliceList{} },

		PrepareCreate: func(s *resourcev1.ResourceSlice) {
			s.Generation = 1
			stampDevices(s, nil, metav1.Now())
		},
		PrepareUpdate: func(s, old *resourcev1.ResourceSlice) {
			stampDevices(s, old, metav1.Now())
			s.Generation = old.Generation
			if !equality.Semantic.DeepEqual(s.Spec, old.Spec) {
				s.Generation++
			}
		},
		Validate: validateSlice,
		ValidateUpdate: func(s, old *resourcev1.ResourceSlice) field.ErrorList {
			spec := field.NewPath("spec")
			errs := apivalidation.ValidateObjectMetaUpdate(&s.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, validateSlice(s)...)
			errs = append(errs, apivalidation.ValidateImmutableField(s.Spec.Driver, old.Spec.Driver, spec.Child("driver"))...)
			errs = append(errs, apivalidation.ValidateImmutableField(s.Spec.Pool.Name, old.Spec.Pool.Name, spec.Child("pool", "name"))...)
			return append(errs, apivalidation.ValidateImmutableField(s.Spec.NodeName, old.Spec.NodeName, spec.Child("nodeName"))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Node", doc["nodeName"]),
			cells.Text("Driver", doc["driver"]),
			cells.Text("Pool", doc["pool"]),
			cells.Age,
		},
		Row: func(s *resourcev1.ResourceSlice, now time.Time) []any {
			node := "<none>"
			if s.Spec.NodeName != nil {
				node = *s.Spec.NodeName
			} else if s.Spec.AllNodes != nil && *s.Spec.AllNodes {
				node = "<all>"
			}
			return []any{s.Name, node, s.Spec.Driver, s.Spec.Pool.Name, cells.Since(s.CreationTimestamp, now)}
		},
		Fields: func(s *resourcev1.ResourceSlice) fields.Set {
			node := ""
			if s.Spec.NodeName != nil {
				node = *s.Spec.NodeName
			}
			return fields.Set{
				resourcev1.ResourceSliceSelectorNodeName: node,
				resourcev1.ResourceSliceSelectorDriver:   s.Spec.Driver,
				resourcev1.ResourceSliceSelectorPoolName: s.Spec.Pool.Name,
			}
		},

		UnconditionalUpdate: true,
	}.Kind()
}

func validateSlice(s *resourcev1.ResourceSlice) field.ErrorList {
	spec := field.NewPath("spec")
	errs := apivalidation.ValidateObjectMeta(&s.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	errs = append(errs, validateDriver(s.Spec.Driver, spec.Child("driver"))...)
	pool := spec.Child("pool")
	errs = append(errs, validatePool(s.Spec.Pool.Name, pool.Child("name"))...)
	errs = append(errs, check.NonNegative(pool.Child("generation"), s.Spec.Pool.Generation)...)
	if s.Spec.Pool.ResourceSliceCount <= 0 {
		errs = append(errs, field.Invalid(pool.Child("resourceSliceCount"), s.Spec.Pool.ResourceSliceCount, "must be greater than zero"))
	}
	perDevice := s.Spec.PerDeviceNodeSelection
	chosen := validatePlace(s.Spec.NodeName, s.Spec.NodeSelector, s.Spec.AllNodes, perDevice, spec, &errs)
	if chosen != 1 {
		errs = append(errs, field.Invalid(spec, chosen, "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required"))
	}
	if len(s.Spec.Devices) > 0 && len(s.Spec.SharedCounters) > 0 {
		errs = append(errs, field.Invalid(spec, "devices, sharedCounters", "only one of `sharedCounters` or `devices` is allowed"))
	}
	devices := spec.Child("devices")
	errs = append(errs, atMost(devices, len(s.Spec.Devices), resourcev1.ResourceSliceMaxDevices)...)
	seen := sets.New[string]()
	for i := range s.Spec.Devices {
		device := &s.Spec.Devices[i]
		errs = append(errs, validateName(device.Name, seen, devices.Index(i).Child("name"))...)
		errs = append(errs, validateOffer(device, perDevice != nil && *perDevice, devices.Index(i))...)
	}
	counters, names := spec.Child("sharedCounters"), sets.New[string]()
	errs = append(errs, atMost(counters, len(s.Spec.SharedCounters), resourcev1.ResourceSliceMaxCounterSets)...)
	for i, set := range s.Spec.SharedCounters {
		errs = append(errs, validateName(set.Name, names, counters.Index(i).Child("name"))...)
		errs = append(errs, validateCounters(set.Counters, resourcev1.ResourceSliceMaxCountersPerCounterSet, counters.Index(i).Child("counters"))...)
	}
	return errs
}

// validatePlace counts the ways in which nodes are chosen, and judges each.
func validatePlace(name *string, selector *corev1.NodeSelector, all, perDevice *bool, at *field.Path, errs *field.ErrorList) int {
	chosen := 0
	if name != nil {
		chosen++
		*errs = append(*errs, check.RequiredText(at.Child("nodeName"), *name, check.Subdomain)...)
	}
	if selector != nil {
		chosen++
		*errs = append(*errs, core.ValidateNodeSelector(selector, at.Child("nodeSelector"))...)
		if n := len(selector.NodeSelectorTerms); n > 1 { // drivers find nodes by one
			*errs = append(*errs, field.Invalid(at.Child("nodeSelector", "nodeSelectorTerms"), n, "must have exactly one node selector term"))
		}
	}
	for _, flag := range []struct {
		name  string
		value *bool
	}{{"allNodes", all}, {"perDeviceNodeSelection", perDevice}} {
		if flag.value == nil {
			continue
		}
		chosen++
		if !*flag.value {
			*errs = append(*errs, field.Invalid(at.Child(flag.name), false, "must be either unset or set to true"))
		}
	}
	return chosen
}

// validateOffer judges what a driver says of one device, but its name.
func validateOffer(d *resourcev1.Device, choosesNodes bool, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	chosen := validatePlace(d.NodeName, d.NodeSelector, d.AllNodes, nil, at, &errs)
	switch {
	case choosesNodes && chosen != 1:
		errs = append(errs, field.Invalid(at, chosen, "exactly one of `nodeName`, `nodeSelector`, or `allNodes` is required when `perDeviceNodeSelection` is set to true in the slice spec"))
	case !choosesNodes && chosen > 0:
		errs = append(errs, field.Forbidden(at, "`nodeName`, `nodeSelector` and `allNodes` can only be set when `perDeviceNodeSelection` is set to true in the slice spec"))
	}
	errs = append(errs, atMost(at, len(d.Attributes)+len(d.Capacity), resourcev1.ResourceSliceMaxAttributesAndCapacitiesPerDevice)...)
	for name, attribute := range d.Attributes {
		errs = append(errs, validateQualifiedName(name, at.Child("attributes"))...)
		errs = append(errs, validateAttribute(attribute, at.Child("attributes").Key(string(name)))...)
	}
	for name, capacity := range d.Capacity {
		errs = append(errs, validateQualifiedName(name, at.Child("capacity"))...)
		if capacity.Value.Sign() < 0 {
			errs = append(errs, field.Invalid(at.Child("capacity").Key(string(name)).Child("value"), capacity.Value.String(), "must be greater than or equal to 0"))
		}
	}
	taints := at.Child("taints")
	errs = append(errs, atMost(taints, len(d.Taints), resourcev1.DeviceTaintsMaxLength)...)
	for i, taint := range d.Taints {
		errs = append(errs, validateTaint(taint, taints.Index(i))...)
	}
	consumes, seen := at.Child("consumesCounters"), sets.New[string]()
	errs = append(errs, atMost(consumes, len(d.ConsumesCounters), resourcev1.ResourceSliceMaxDeviceCounterConsumptionsPerDevice)...)
	for i, c := range d.ConsumesCounters {
		errs = append(errs, validateName(c.CounterSet, seen, consumes.Index(i).Child("counterSet"))...)
		errs = append(errs, validateCounters(c.Counters, resourcev1.ResourceSliceMaxCountersPerDeviceCounterConsumption, consumes.Index(i).Child("counters"))...)
	}
	errs = append(errs, atMost(at.Child("bindingConditions"), len(d.BindingConditions), resourcev1.BindingConditionsMaxSize)...)
	errs = append(errs, atMost(at.Child("bindingFailureConditions"), len(d.BindingFailureConditions), resourcev1.BindingFailureConditionsMaxSize)...)
	return errs
}

// validateAttribute: one value, or one list of values.
func validateAttribute(a resourcev1.DeviceAttribute, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	values := 0
	for _, set := range []bool{
		a.IntValue != nil, a.BoolValue != nil, a.StringValue != nil, a.VersionValue != nil,
		a.IntValues != nil, a.BoolValues != nil, a.StringValues != nil, a.VersionValues != nil,
	} {
		if set {
			values++
		}
	}
	switch {
	case values == 0:
		errs = append(errs, field.Required(at, "exactly one value must be specified"))
	case values > 1:
		errs = append(errs, field.Invalid(at, values, "exactly one value must be specified"))
	}
	word := func(value string, at *field.Path) {
		if len(value) > resourcev1.DeviceAttributeMaxValueLength {
			errs = append(errs, field.TooLong(at, "", resourcev1.DeviceAttributeMaxValueLength))
		}
	}
	number := func(value string, at *field.Path) {
		word(value, at)
		if _, err := version.ParseSemantic(value); err != nil {
			errs = append(errs, field.Invalid(at, value, "must be a string compatible with semver.org spec 2.0.0"))
		}
	}
	if a.StringValue != nil {
		word(*a.StringValue, at.Child("string"))
	}
	for i, value := range a.StringValues {
		word(value, at.Child("strings").Index(i))
	}
	if a.VersionValue != nil {
		number(*a.VersionValue, at.Child("version"))
	}
	for i, value := range a.VersionValues {
		number(value, at.Child("versions").Index(i))
	}
	return errs
}

func validateCounters(counters map[string]resourcev1.Counter, most int, at *field.Path) field.ErrorList {
	errs := atMost(at, len(counters), most)
	if len(counters) == 0 {
		errs = append(errs, field.Required(at, ""))
	}
	for name := range counters {
		errs = append(errs, check.Text(at.Key(name), name, validation.IsDNS1123Label)...)
	}
	return errs
}
