package resource

import (
	"encoding/json"
	"fmt"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

// setRequestDefaults fills what a request for devices left out.
func setRequestDefaults(claim *resourcev1.DeviceClaim) {
	one := func(mode *resourcev1.DeviceAllocationMode, count *int64, tolerations []resourcev1.DeviceToleration) {
		if *mode == "" {
			*mode = resourcev1.DeviceAllocationModeExactCount
		}
		if *mode == resourcev1.DeviceAllocationModeExactCount && *count == 0 {
			*count = 1
		}
		for i := range tolerations {
			if tolerations[i].Operator == "" {
				tolerations[i].Operator = resourcev1.DeviceTolerationOpEqual
			}
		}
	}
	for i := range claim.Requests {
		request := &claim.Requests[i]
		if e := request.Exactly; e != nil {
			one(&e.AllocationMode, &e.Count, e.Tolerations)
		}
		for j := range request.FirstAvailable {
			sub := &request.FirstAvailable[j]
			one(&sub.AllocationMode, &sub.Count, sub.Tolerations)
		}
	}
}

func validateClaimSpec(spec *resourcev1.ResourceClaimSpec, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	at := path.Child("devices")
	requests := at.Child("requests")
	errs = append(errs, atMost(requests, len(spec.Devices.Requests), resourcev1.DeviceRequestsMaxSize)...)
	names := requestNames(&spec.Devices)
	seen := sets.New[string]()
	for i := range spec.Devices.Requests {
		request := &spec.Devices.Requests[i]
		errs = append(errs, validateName(request.Name, seen, requests.Index(i).Child("name"))...)
		errs = append(errs, validateRequest(request, requests.Index(i))...)
	}
	constraints := at.Child("constraints")
	errs = append(errs, atMost(constraints, len(spec.Devices.Constraints), resourcev1.DeviceConstraintsMaxSize)...)
	for i, c := range spec.Devices.Constraints {
		errs = append(errs, validateReferences(c.Requests, names, constraints.Index(i).Child("requests"))...)
		switch match, distinct := c.MatchAttribute, c.DistinctAttribute; {
		case match != nil && distinct != nil:
			errs = append(errs, field.Invalid(constraints.Index(i), *match, "exactly one of `matchAttribute` and `distinctAttribute` is required"))
		case match != nil:
			errs = append(errs, validateFullName(*match, constraints.Index(i).Child("matchAttribute"))...)
		case distinct != nil:
			errs = append(errs, validateFullName(*distinct, constraints.Index(i).Child("distinctAttribute"))...)
		default:
			errs = append(errs, field.Required(constraints.Index(i).Child("matchAttribute"), ""))
		}
	}
	config := at.Child("config")
	errs = append(errs, atMost(config, len(spec.Devices.Config), resourcev1.DeviceConfigMaxSize)...)
	for i, c := range spec.Devices.Config {
		errs = append(errs, validateReferences(c.Requests, names, config.Index(i).Child("requests"))...)
		errs = append(errs, validateConfiguration(c.DeviceConfiguration, config.Index(i))...)
	}
	return errs
}

// requestNames are the names by which constraints, configurations and results
// refer to requests: "gpu", and "gpu/large" for one of its alternatives.
func requestNames(claim *resourcev1.DeviceClaim) sets.Set[string] {
	names := sets.New[string]()
	for _, request := range claim.Requests {
		names.Insert(request.Name)
		for _, sub := range request.FirstAvailable {
			names.Insert(request.Name + "/" + sub.Name)
		}
	}
	return names
}

func validateReferences(requests []string, names sets.Set[string], at *field.Path) field.ErrorList {
	errs := atMost(at, len(requests), resourcev1.DeviceRequestsMaxSize)
	seen := sets.New[string]()
	for i, name := range requests {
		if !names.Has(name) {
			errs = append(errs, field.Invalid(at.Index(i), name, "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'"))
		} else if seen.Has(name) {
			errs = append(errs, field.Duplicate(at.Index(i), name))
		}
		seen.Insert(name)
	}
	return errs
}

func validateRequest(request *resourcev1.DeviceRequest, at *field.Path) field.ErrorList {
	exactly, alternatives := request.Exactly, request.FirstAvailable
	switch {
	case exactly != nil && len(alternatives) > 0:
		return field.ErrorList{field.Invalid(at, request.Name, "exactly one of `exactly` or `firstAvailable` is required")}
	case exactly != nil:
		return validateAsked(resourcev1.DeviceSubRequest{
			DeviceClassName: exactly.DeviceClassName, Selectors: exactly.Selectors, AllocationMode: exactly.AllocationMode, Count: exactly.Count,
			Tolerations: exactly.Tolerations, Capacity: exactly.Capacity, DerivedAttributes: exactly.DerivedAttributes,
		}, at.Child("exactly"))
	case len(alternatives) == 0:
		return field.ErrorList{field.Required(at, "exactly one of `exactly` or `firstAvailable` is required")}
	}
	at = at.Child("firstAvailable")
	errs := atMost(at, len(alternatives), resourcev1.FirstAvailableDeviceRequestMaxSize)
	seen := sets.New[string]()
	for i, sub := range alternatives {
		errs = append(errs, validateName(sub.Name, seen, at.Index(i).Child("name"))...)
		errs = append(errs, validateAsked(sub, at.Index(i))...)
	}
	return errs
}

// validateAsked judges what a request and an alternative of one have in common.
func validateAsked(r resourcev1.DeviceSubRequest, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at.Child("deviceClassName"), r.DeviceClassName, check.Subdomain)
	errs = append(errs, validateSelectors(r.Selectors, at.Child("selectors"))...)
	errs = append(errs, check.OneOf(at.Child("allocationMode"), r.AllocationMode, resourcev1.DeviceAllocationModeAll, resourcev1.DeviceAllocationModeExactCount)...)
	switch {
	case r.AllocationMode == resourcev1.DeviceAllocationModeAll && r.Count != 0:
		errs = append(errs, field.Invalid(at.Child("count"), r.Count, "must not be specified when allocationMode is 'All'"))
	case r.AllocationMode == resourcev1.DeviceAllocationModeExactCount && r.Count <= 0:
		errs = append(errs, field.Invalid(at.Child("count"), r.Count, "must be greater than zero"))
	}
	errs = append(errs, validateTolerations(r.Tolerations, at.Child("tolerations"))...)
	if r.Capacity != nil {
		requests := at.Child("capacity", "requests")
		for name, amount := range r.Capacity.Requests {
			errs = append(errs, validateQualifiedName(name, requests)...)
			if amount.Sign() < 0 {
				errs = append(errs, field.Invalid(requests.Key(string(name)), amount.String(), "must be greater than or equal to 0"))
			}
		}
	}
	derived := at.Child("derivedAttributes")
	errs = append(errs, atMost(derived, len(r.DerivedAttributes), resourcev1.DeviceDerivedAttributesMaxSize)...)
	for i, attribute := range r.DerivedAttributes {
		errs = append(errs, validateFullName(attribute.Name, derived.Index(i).Child("name"))...)
		errs = append(errs, validateExpression(attribute.Expression, derived.Index(i).Child("expression"))...)
	}
	return errs
}

func validateSelectors(selectors []resourcev1.DeviceSelector, at *field.Path) field.ErrorList {
	errs := atMost(at, len(selectors), resourcev1.DeviceSelectorsMaxSize)
	for i, selector := range selectors {
		if selector.CEL == nil {
			errs = append(errs, field.Required(at.Index(i).Child("cel"), ""))
			continue
		}
		errs = append(errs, validateExpression(selector.CEL.Expression, at.Index(i).Child("cel", "expression"))...)
	}
	return errs
}

func validateExpression(expression string, at *field.Path) field.ErrorList {
	if expression == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	if len(expression) > resourcev1.CELSelectorExpressionMaxLength {
		return field.ErrorList{field.TooLong(at, "", resourcev1.CELSelectorExpressionMaxLength)}
	}
	return nil
}

func validateTolerations(tolerations []resourcev1.DeviceToleration, at *field.Path) field.ErrorList {
	errs := atMost(at, len(tolerations), resourcev1.DeviceTolerationsMaxLength)
	for i, t := range tolerations {
		at := at.Index(i)
		if t.Key != "" {
			errs = append(errs, check.Text(at.Child("key"), t.Key, validation.IsQualifiedName)...)
		}
		errs = append(errs, check.OneOf(at.Child("operator"), t.Operator, resourcev1.DeviceTolerationOpEqual, resourcev1.DeviceTolerationOpExists)...)
		switch {
		case t.Operator == resourcev1.DeviceTolerationOpExists && t.Value != "":
			errs = append(errs, field.Invalid(at.Child("value"), t.Value, "must be empty for operator `Exists`"))
		case t.Operator == resourcev1.DeviceTolerationOpEqual && t.Key == "":
			errs = append(errs, field.Required(at.Child("key"), "must not be empty for operator `Equal`"))
		case t.Operator == resourcev1.DeviceTolerationOpEqual:
			errs = append(errs, check.Text(at.Child("value"), t.Value, validation.IsValidLabelValue)...)
		}
		errs = append(errs, check.OneOfOrEmpty(at.Child("effect"), t.Effect, resourcev1.DeviceTaintEffectNone, resourcev1.DeviceTaintEffectNoExecute, resourcev1.DeviceTaintEffectNoSchedule)...)
	}
	return errs
}

func validateConfiguration(config resourcev1.DeviceConfiguration, at *field.Path) field.ErrorList {
	at = at.Child("opaque")
	if config.Opaque == nil {
		return field.ErrorList{field.Required(at, "")}
	}
	errs := validateDriver(config.Opaque.Driver, at.Child("driver"))
	return append(errs, validateParameters(config.Opaque.Parameters.Raw, at.Child("parameters"))...)
}

// validateParameters: what a driver alone understands has to be an object.
func validateParameters(raw []byte, at *field.Path) field.ErrorList {
	var object map[string]any
	switch err := json.Unmarshal(raw, &object); {
	case len(raw) == 0:
		return field.ErrorList{field.Required(at, "")}
	case len(raw) > resourcev1.OpaqueParametersMaxLength:
		return field.ErrorList{field.TooLong(at, "", resourcev1.OpaqueParametersMaxLength)}
	case err != nil:
		return field.ErrorList{field.Invalid(at, "<value omitted>", fmt.Sprintf("must be a valid JSON object: %v", err))}
	case object == nil:
		return field.ErrorList{field.Required(at, "must be a valid JSON object")}
	}
	return nil
}

func validateDriver(driver string, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at, strings.ToLower(driver), check.Subdomain)
	if len(driver) > resourcev1.DriverNameMaxLength {
		errs = append(errs, field.TooLong(at, "", resourcev1.DriverNameMaxLength))
	}
	return errs
}

// validatePool: a pool is named by subdomains with slashes in between.
func validatePool(pool string, at *field.Path) field.ErrorList {
	if pool == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	if len(pool) > resourcev1.PoolNameMaxLength {
		return field.ErrorList{field.TooLong(at, "", resourcev1.PoolNameMaxLength)}
	}
	var errs field.ErrorList
	for part := range strings.SplitSeq(pool, "/") {
		errs = append(errs, check.Text(at, part, check.Subdomain)...)
	}
	return errs
}

// validateName: a label that is in seen but once.
func validateName(name string, seen sets.Set[string], at *field.Path) field.ErrorList {
	errs := check.RequiredText(at, name, validation.IsDNS1123Label)
	if name != "" && seen.Has(name) {
		errs = append(errs, field.Duplicate(at, name))
	}
	seen.Insert(name)
	return errs
}

// validateQualifiedName: an identifier, with or without the domain of who
// defines it.
func validateQualifiedName(name resourcev1.QualifiedName, at *field.Path) field.ErrorList {
	domain, id, qualified := strings.Cut(string(name), "/")
	if !qualified {
		domain, id = "", string(name)
	}
	var errs field.ErrorList
	if qualified {
		errs = append(errs, check.RequiredText(at, domain, check.Subdomain)...)
		if len(domain) > resourcev1.DeviceMaxDomainLength {
			errs = append(errs, field.TooLong(at, "", resourcev1.DeviceMaxDomainLength))
		}
	}
	errs = append(errs, check.RequiredText(at, id, validation.IsCIdentifier)...)
	if len(id) > resourcev1.DeviceMaxIDLength {
		errs = append(errs, field.TooLong(at, "", resourcev1.DeviceMaxIDLength))
	}
	return errs
}

func validateFullName(name resourcev1.FullyQualifiedName, at *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(at, "name required")}
	}
	errs := validateQualifiedName(resourcev1.QualifiedName(name), at)
	if !strings.Contains(string(name), "/") {
		errs = append(errs, field.Invalid(at, name, "must include a domain"))
	}
	return errs
}

func atMost(at *field.Path, n, most int) field.ErrorList {
	if n > most {
		return field.ErrorList{field.TooMany(at, n, most)}
	}
	return nil
}
