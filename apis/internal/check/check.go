// Package check holds the small validations that many kinds share. Each
// returns the faults of one value, naming the field it was found in.
package check

import (
	"net/netip"
	"slices"
	"strings"

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

// maxSigner is the length of a domain, a slash and a namespaced name.
const maxSigner = validation.DNS1123SubdomainMaxLength + 1 + validation.DNS1123LabelMaxLength

// Signer wants the name of a signer of certificates: DOMAIN/PATH.
func Signer(path *field.Path, name string) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(path, "")}
	}
	domain, rest, ok := strings.Cut(name, "/")
	if !ok {
		return field.ErrorList{field.Invalid(path, name, "must be a fully qualified domain and path of the form 'example.com/signer-name'")}
	}
	errs := Text(path, domain, Subdomain)
	if !strings.Contains(domain, ".") {
		errs = append(errs, field.Invalid(path, domain, "should be a domain with at least two segments separated by dots"))
	}
	if rest == "" {
		return append(errs, field.Invalid(path, name, "must have a path after the domain: 'example.com/signer-name'"))
	}
	errs = append(errs, Text(path, rest, Subdomain)...)
	if len(name) > maxSigner {
		errs = append(errs, field.TooLong(path, "", maxSigner))
	}
	return errs
}

// The bounds of the lifetime of a pod's certificate, in seconds: an hour, 91
// days, and a day for signers of Kubernetes' own.
const (
	MinPodCertificate = 3600
	MaxPodCertificate = 7862400
	maxOfKubernetes   = 86400
)

// MaxPodCertificateOf is the longest lifetime of a certificate that a signer
// may be asked for, in seconds.
func MaxPodCertificateOf(signer string) int32 {
	domain, _, _ := strings.Cut(signer, "/")
	if domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io") {
		return maxOfKubernetes
	}
	return MaxPodCertificate
}

// maxAnnotations is the size of all of a map of annotations.
const maxAnnotations = 256 << 10

// SignerAnnotations wants what a pod's author tells a signer to be annotations,
// each with a domain before its name.
func SignerAnnotations(path *field.Path, annotations map[string]string) field.ErrorList {
	var errs field.ErrorList
	size := 0
	for key, value := range annotations {
		errs = append(errs, validation.IsDomainPrefixedKey(path, strings.ToLower(key))...)
		size += len(key) + len(value)
	}
	if size > maxAnnotations {
		errs = append(errs, field.TooLong(path, "", maxAnnotations))
	}
	return errs
}

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
