// Package check holds the small validations that many kinds share. Each
// returns the faults of one value, naming the field it was found in.
package check

import (
	"net/netip"

	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Text returns one Invalid for each message that rule has about value.
func Text(path *field.Path, value string, rule func(string) []string) field.ErrorList {
	var errs field.ErrorList
	for _, msg := range rule(value) {
		errs = append(errs, field.Invalid(path, value, msg))
	}
	return errs
}

// RequiredText is Text for a value that must not be empty.
func RequiredText(path *field.Path, value string, rule func(string) []string) field.ErrorList {
	if value == "" {
		return field.ErrorList{field.Required(path, "")}
	}
	if rule == nil {
		return nil
	}
	return Text(path, value, rule)
}

// Subdomain is the rule for names of most objects.
func Subdomain(name string) []string { return validation.IsDNS1123Subdomain(name) }

// OneOf wants value to be one of allowed; an empty value is Required.
func OneOf[T ~string](path *field.Path, value T, allowed ...T) field.ErrorList {
	if value == "" {
		return field.ErrorList{field.Required(path, "")}
	}
	return OneOfOrEmpty(path, value, allowed...)
}

// OneOfOrEmpty wants value to be empty or one of allowed.
func OneOfOrEmpty[T ~string](path *field.Path, value T, allowed ...T) field.ErrorList {
	if value == "" || slices.Contains(allowed, value) {
		return nil
	}
	slices.Sort(allowed)
	return field.ErrorList{field.NotSupported(path, value, allowed)}
}

// OneOfOrNil is OneOf for a field that may be left out.
func OneOfOrNil[T ~string](path *field.Path, value *T, allowed ...T) field.ErrorList {
	if value == nil {
		return nil
	}
	return OneOf(path, *value, allowed...)
}

// NonNegative wants value to be at least 0.
func NonNegative(path *field.Path, value int64) field.ErrorList {
	if value < 0 {
		return field.ErrorList{field.Invalid(path, value, "must be greater than or equal to 0")}
	}
	return nil
}

// PortNumber wants a port between 1 and 65535.
func PortNumber(path *field.Path, port int32) field.ErrorList {
	var errs field.ErrorList
	for _, msg := range validation.IsValidPortNum(int(port)) {
		errs = append(errs, field.Invalid(path, port, msg))
	}
	return errs
}

// Port wants a port number or the name of a port.
func Port(path *field.Path, port intstr.IntOrString) field.ErrorList {
	if port.Type == intstr.String {
		return Text(path, port.StrVal, validation.IsValidPortName)
	}
	return PortNumber(path, port.IntVal)
}

// ID wants a valid user or group number, if any.
func ID(path *field.Path, id *int64, rule func(int64) []string) field.ErrorList {
	if id == nil {
		return nil
	}
	var errs field.ErrorList
	for _, msg := range rule(*id) {
		errs = append(errs, field.Invalid(path, *id, msg))
	}
	return errs
}

// LabelSelector wants a well-formed selector; nil is well-formed.
func LabelSelector(path *field.Path, selector *metav1.LabelSelector) field.ErrorList {
	return metav1validation.ValidateLabelSelector(selector, metav1validation.LabelSelectorValidationOptions{}, path)
}

// Reachable refuses addresses that mean another machine to everyone who reads
// them: traffic to such an endpoint would stay on the node or go to its
// neighbours.
func Reachable(path *field.Path, ip netip.Addr) field.ErrorList {
	for _, reserved := range []struct {
		is   bool
		what string
	}{
		{ip.IsUnspecified(), "may not be unspecified (" + ip.String() + ")"},
		{ip.IsLoopback(), "may not be in the loopback range (127.0.0.0/8, ::1/128)"},
		{ip.IsLinkLocalUnicast(), "may not be in the link-local range (169.254.0.0/16, fe80::/10)"},
		{ip.IsLinkLocalMulticast(), "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)"},
	} {
		if reserved.is {
			return field.ErrorList{field.Invalid(path, ip.String(), reserved.what)}
		}
	}
	return nil
}
