package core

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// endpointsShown is how many endpoints a table shows.
const endpointsShown = 3

// Endpoints is the kind Endpoints: all addresses behind a Service in one object.
// EndpointSlices are what the cluster itself reads; Endpoints are kept for
// clients that know nothing newer, and for writing the addresses of a Service
// without a selector.
func Endpoints() kind.Kind {
	return kind.Typed[*corev1.Endpoints]{
		GVK:        corev1.SchemeGroupVersion.WithKind("Endpoints"),
		Resource:   "endpoints",
		Singular:   "endpoints",
		ShortNames: []string{"ep"},
		Namespaced: true,

		New:     func() runtime.Object { return &corev1.Endpoints{} },
		NewList: func() runtime.Object { return &corev1.EndpointsList{} },

		Default: defaultEndpoints,
		Validate: func(e *corev1.Endpoints) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&e.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateSubsets(e.Subsets, field.NewPath("subsets"))...)
		},
		ValidateUpdate: func(e, old *corev1.Endpoints) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&e.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, validateSubsets(e.Subsets, field.NewPath("subsets"))...)
		},
		Warnings: endpointsWarnings,

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Endpoints", corev1.Endpoints{}.SwaggerDoc()["subsets"]),
			cells.Age,
		},
		Row: func(e *corev1.Endpoints, now time.Time) []any {
			return []any{e.Name, endpointsText(e), cells.Since(e.CreationTimestamp, now)}
		},
		CreateOnUpdate:      true,
		UnconditionalUpdate: true,
	}.Kind()
}

func defaultEndpoints(e *corev1.Endpoints) {
	for i := range e.Subsets {
		for j := range e.Subsets[i].Ports {
			if port := &e.Subsets[i].Ports[j]; port.Protocol == "" {
				port.Protocol = corev1.ProtocolTCP
			}
		}
	}
}

func validateSubsets(subsets []corev1.EndpointSubset, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i := range subsets {
		s, at := &subsets[i], at.Index(i)
		if len(s.Addresses)+len(s.NotReadyAddresses) == 0 {
			errs = append(errs, field.Required(at, "must specify `addresses` or `notReadyAddresses`"))
		}
		for j := range s.Addresses {
			errs = append(errs, validateEndpointAddress(&s.Addresses[j], at.Child("addresses").Index(j))...)
		}
		for j := range s.NotReadyAddresses {
			errs = append(errs, validateEndpointAddress(&s.NotReadyAddresses[j], at.Child("notReadyAddresses").Index(j))...)
		}
		errs = append(errs, validateEndpointPorts(s.Ports, at.Child("ports"))...)
	}
	return errs
}

func validateEndpointAddress(a *corev1.EndpointAddress, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	ip, err := netip.ParseAddr(a.IP)
	switch {
	case err != nil || ip.Zone() != "":
		errs = append(errs, field.Invalid(at.Child("ip"), a.IP, "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"))
	case ip.Is4In6():
		errs = append(errs, field.Invalid(at.Child("ip"), a.IP, "must not be an IPv4-mapped IPv6 address"))
	default:
		errs = append(errs, check.Reachable(at.Child("ip"), ip)...)
	}
	if a.Hostname != "" {
		errs = append(errs, check.Text(at.Child("hostname"), a.Hostname, validation.IsDNS1123Label)...)
	}
	if a.NodeName != nil {
		errs = append(errs, check.Text(at.Child("nodeName"), *a.NodeName, check.Subdomain)...)
	}
	return errs
}

func validateEndpointPorts(ports []corev1.EndpointPort, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i := range ports {
		port, at := &ports[i], at.Index(i)
		switch {
		case port.Name != "":
			errs = append(errs, check.Text(at.Child("name"), port.Name, validation.IsDNS1123Label)...)
		case len(ports) > 1:
			errs = append(errs, field.Required(at.Child("name"), "there are several ports, each needs a name"))
		}
		errs = append(errs, check.PortNumber(at.Child("port"), port.Port)...)
		errs = append(errs, check.OneOf(at.Child("protocol"), port.Protocol, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)...)
		if port.AppProtocol != nil {
			errs = append(errs, check.Text(at.Child("appProtocol"), *port.AppProtocol, validation.IsQualifiedName)...)
		}
	}
	return errs
}

// endpointsWarnings tells what is hardly meant: one address that is ready and
// not ready at once is taken as ready.
func endpointsWarnings(e *corev1.Endpoints) (out []string) {
	for i := range e.Subsets {
		ready := sets.New[string]()
		for _, a := range e.Subsets[i].Addresses {
			ready.Insert(a.IP)
		}
		for j, a := range e.Subsets[i].NotReadyAddresses {
			if ready.Has(a.IP) {
				out = append(out, fmt.Sprintf("subsets[%d].notReadyAddresses[%d].ip: %s is among the subset's addresses too: it is taken as ready", i, j, a.IP))
			}
		}
	}
	return out
}

// endpointsText shows the first of the ready endpoints and how many there are
// beside.
func endpointsText(e *corev1.Endpoints) string {
	var shown []string
	count := 0
	show := func(text string) {
		if count++; count <= endpointsShown {
			shown = append(shown, text)
		}
	}
	for i := range e.Subsets {
		s := &e.Subsets[i]
		for _, a := range s.Addresses {
			if len(s.Ports) == 0 {
				show(a.IP)
			}
			for _, port := range s.Ports {
				show(net.JoinHostPort(a.IP, strconv.Itoa(int(port.Port))))
			}
		}
	}
	text := strings.Join(shown, ",")
	if count > endpointsShown {
		text += fmt.Sprintf(" + %d more...", count-endpointsShown)
	}
	return cells.None(text)
}
