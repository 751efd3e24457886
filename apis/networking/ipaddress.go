package networking

import (
	"net/netip"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	pathvalidation "k8s.io/apimachinery/pkg/api/validation/path"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// IPAddressManager is the value that the label ipaddress.kubernetes.io/managed-by
// has on the IPAddresses that mirror Services. One without it keeps its address
// for what it refers to.
const IPAddressManager = "ipallocator.k8s.io"

// IPAddress is the kind IPAddress. Its name is the address.
func IPAddress() kind.Kind {
	return kind.Typed[*networkingv1.IPAddress]{
		GVK:        networkingv1.SchemeGroupVersion.WithKind("IPAddress"),
		Resource:   "ipaddresses",
		Singular:   "ipaddress",
		ShortNames: []string{"ip"},

		New:     func() runtime.Object { return &networkingv1.IPAddress{} },
		NewList: func() runtime.Object { return &networkingv1.IPAddressList{} },

		Validate: validateIPAddress,
		ValidateUpdate: func(a, old *networkingv1.IPAddress) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&a.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, apivalidation.ValidateImmutableField(a.Spec.ParentRef, old.Spec.ParentRef, field.NewPath("spec", "parentRef"))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("ParentRef", networkingv1.IPAddressSpec{}.SwaggerDoc()["parentRef"]),
			cells.Age,
		},
		Row: func(a *networkingv1.IPAddress, now time.Time) []any {
			return []any{a.Name, parent(a.Spec.ParentRef), cells.Since(a.CreationTimestamp, now)}
		},
		UnconditionalUpdate: true,
	}.Kind()
}

// IsOf tells whether an IPAddress is attached to a Service.
func IsOf(a *networkingv1.IPAddress, namespace, service string) bool {
	return a.Spec.ParentRef != nil && *a.Spec.ParentRef == ServiceRef(namespace, service)
}

// ServiceRef refers to a Service, in spec.parentRef of its IPAddresses.
func ServiceRef(namespace, name string) networkingv1.ParentReference {
	return networkingv1.ParentReference{Resource: "services", Namespace: namespace, Name: name}
}

// parent is a reference as RESOURCE[.GROUP]/[NAMESPACE/]NAME.
func parent(ref *networkingv1.ParentReference) string {
	if ref == nil {
		return ""
	}
	text := ref.Resource
	if ref.Group != "" {
		text += "." + ref.Group
	}
	if ref.Namespace != "" {
		text += "/" + ref.Namespace
	}
	return text + "/" + ref.Name
}

func validateIPAddress(a *networkingv1.IPAddress) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&a.ObjectMeta, false, canonicalAddress, field.NewPath("metadata"))
	at, ref := field.NewPath("spec", "parentRef"), a.Spec.ParentRef
	if ref == nil {
		return append(errs, field.Required(at, ""))
	}
	if ref.Group != "" {
		errs = append(errs, check.Text(at.Child("group"), ref.Group, check.Subdomain)...)
	}
	segment := func(name string) []string { return pathvalidation.IsValidPathSegmentName(name) }
	errs = append(errs, check.RequiredText(at.Child("resource"), ref.Resource, segment)...)
	errs = append(errs, check.RequiredText(at.Child("name"), ref.Name, segment)...)
	if ref.Namespace != "" {
		errs = append(errs, check.Text(at.Child("namespace"), ref.Namespace, segment)...)
	}
	return errs
}

// canonicalAddress is the rule for the names of IPAddresses: with two ways of
// writing it, one address could belong to two.
func canonicalAddress(name string, _ bool) []string {
	address, err := netip.ParseAddr(name)
	switch {
	case err != nil || address.Zone() != "":
		return []string{"must be a valid IP address"}
	case address.Unmap().String() != name:
		return []string{"must be an IP address in its canonical form, like " + address.Unmap().String()}
	}
	return nil
}
