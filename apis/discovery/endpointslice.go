// Package discovery describes the kinds of the discovery.k8s.io API group.
package discovery

import (
	"net/netip"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

const (
	maxEndpoints  = 1000
	maxAddresses  = 100
	maxPorts      = 20000
	maxTopologies = 16
	maxHints      = 8 // of each sort
	// shown is how many ports and addresses a table shows.
	shown = 3
)

// EndpointSlice is the kind EndpointSlice: some of the addresses behind a
// service.
func EndpointSlice() kind.Kind {
	doc := discoveryv1.EndpointSlice{}.SwaggerDoc()
	return kind.Typed[*discoveryv1.EndpointSlice]{
		GVK:        discoveryv1.SchemeGroupVersion.WithKind("EndpointSlice"),
		Resource:   "endpointslices",
		Singular:   "endpointslice",
		Namespaced: true,

		New:     func() runtime.Object { return &discoveryv1.EndpointSlice{} },
		NewList: func() runtime.Object { return &discoveryv1.EndpointSliceList{} },

		Default:       defaultEndpointSlice,
		PrepareCreate: func(s *discoveryv1.EndpointSlice) { s.Generation = 1 },
		PrepareUpdate: prepareUpdate,
		Validate: func(s *discoveryv1.EndpointSlice) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&s.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateEndpointSlice(s)...)
		},
		ValidateUpdate: func(s, old *discoveryv1.EndpointSlice) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&s.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, validateEndpointSlice(s)...)
			return append(errs, apivalidation.ValidateImmutableField(s.AddressType, old.AddressType, field.NewPath("addressType"))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("AddressType", doc["addressType"]),
			cells.Text("Ports", doc["ports"]),
			cells.Text("Endpoints", doc["endpoints"]),
			cells.Age,
		},
		Row: func(s *discoveryv1.EndpointSlice, now time.Time) []any {
			return []any{s.Name, string(s.AddressType), ports(s), addresses(s), cells.Since(s.CreationTimestamp, now)}
		},
		UnconditionalUpdate: true,
	}.Kind()
}

func defaultEndpointSlice(s *discoveryv1.EndpointSlice) {
	for i := range s.Ports {
		port := &s.Ports[i]
		if port.Name == nil {
			port.Name = new(string)
		}
		if port.Protocol == nil {
			tcp := corev1.ProtocolTCP
			port.Protocol = &tcp
		}
	}
}

// prepareUpdate counts changes of what proxies read: the endpoints, and the
// labels by which a slice belongs to its service.
func prepareUpdate(s, old *discoveryv1.EndpointSlice) {
	s.Generation = old.Generation
	if !equality.Semantic.DeepEqual(s.Endpoints, old.Endpoints) || !equality.Semantic.DeepEqual(s.Ports, old.Ports) ||
		!equality.Semantic.DeepEqual(s.Labels, old.Labels) || s.AddressType != old.AddressType {
		s.Generation++
	}
}

func validateEndpointSlice(s *discoveryv1.EndpointSlice) field.ErrorList {
	errs := check.OneOf(field.NewPath("addressType"), s.AddressType, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN)
	endpoints := field.NewPath("endpoints")
	if len(s.Endpoints) > maxEndpoints {
		return append(errs, field.TooMany(endpoints, len(s.Endpoints), maxEndpoints))
	}
	for i := range s.Endpoints {
		errs = append(errs, validateEndpoint(&s.Endpoints[i], s.AddressType, endpoints.Index(i))...)
	}
	return append(errs, validatePorts(s.Ports, field.NewPath("ports"))...)
}

func validateEndpoint(e *discoveryv1.Endpoint, addressType discoveryv1.AddressType, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	list := at.Child("addresses")
	switch {
	case len(e.Addresses) == 0:
		errs = append(errs, field.Required(list, "must contain at least 1 address"))
	case len(e.Addresses) > maxAddresses:
		errs = append(errs, field.TooMany(list, len(e.Addresses), maxAddresses))
	}
	for i, address := range e.Addresses {
		errs = append(errs, validateAddress(address, addressType, list.Index(i))...)
	}
	if e.NodeName != nil {
		errs = append(errs, check.Text(at.Child("nodeName"), *e.NodeName, check.Subdomain)...)
	}
	if e.Hostname != nil {
		errs = append(errs, check.Text(at.Child("hostname"), *e.Hostname, validation.IsDNS1123Label)...)
	}
	if e.Hints != nil {
		errs = append(errs, validateHints(e.Hints, at.Child("hints"))...)
	}
	if len(e.DeprecatedTopology) > maxTopologies {
		errs = append(errs, field.TooMany(at.Child("deprecatedTopology"), len(e.DeprecatedTopology), maxTopologies))
	}
	return append(errs, metav1validation.ValidateLabels(e.DeprecatedTopology, at.Child("deprecatedTopology"))...)
}

// validateHints checks which zones and nodes an endpoint is meant for: nodes compare the
// names with those of Nodes and of their label for the zone.
func validateHints(h *discoveryv1.EndpointHints, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	names := func(list *field.Path, count int, name func(int) string, valid func(string) []string) {
		if count > maxHints {
			errs = append(errs, field.TooMany(list, count, maxHints))
			return
		}
		seen := sets.New[string]()
		for i := range count {
			at := list.Index(i).Child("name")
			if seen.Has(name(i)) {
				errs = append(errs, field.Duplicate(at, name(i)))
				continue
			}
			seen.Insert(name(i))
			errs = append(errs, check.Text(at, name(i), valid)...)
		}
	}
	names(at.Child("forZones"), len(h.ForZones), func(i int) string { return h.ForZones[i].Name }, validation.IsValidLabelValue)
	names(at.Child("forNodes"), len(h.ForNodes), func(i int) string { return h.ForNodes[i].Name }, check.Subdomain)
	return errs
}

// validateAddress refuses addresses that mean another machine to everyone who
// reads them: traffic to them would stay on the node or go to its neighbours.
func validateAddress(address string, addressType discoveryv1.AddressType, at *field.Path) field.ErrorList {
	if addressType == discoveryv1.AddressTypeFQDN {
		return validation.IsFullyQualifiedDomainName(at, address)
	}
	ip, err := netip.ParseAddr(address)
	if err != nil {
		return field.ErrorList{field.Invalid(at, address, "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)")}
	}
	if ip.Is4In6() {
		return field.ErrorList{field.Invalid(at, address, "must not be an IPv4-mapped IPv6 address")}
	}
	if ip.Is4() != (addressType == discoveryv1.AddressTypeIPv4) {
		return field.ErrorList{field.Invalid(at, address, "must be an "+string(addressType)+" address")}
	}
	return check.Reachable(at, ip)
}

func validatePorts(list []discoveryv1.EndpointPort, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(list) > maxPorts {
		return field.ErrorList{field.TooMany(at, len(list), maxPorts)}
	}
	names := sets.New[string]()
	for i, port := range list {
		at := at.Index(i)
		name := ""
		if port.Name != nil {
			name = *port.Name
		}
		if name != "" {
			errs = append(errs, check.Text(at.Child("name"), name, validation.IsDNS1123Label)...)
		}
		if names.Has(name) {
			errs = append(errs, field.Duplicate(at.Child("name"), name))
		}
		names.Insert(name)
		if port.Protocol == nil {
			errs = append(errs, field.Required(at.Child("protocol"), ""))
		} else {
			errs = append(errs, check.OneOf(at.Child("protocol"), *port.Protocol, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)...)
		}
		if port.Port != nil {
			errs = append(errs, check.PortNumber(at.Child("port"), *port.Port)...)
		}
		if port.AppProtocol != nil {
			errs = append(errs, check.Text(at.Child("appProtocol"), *port.AppProtocol, validation.IsQualifiedName)...)
		}
	}
	return errs
}

func ports(s *discoveryv1.EndpointSlice) string {
	if len(s.Ports) == 0 {
		return "<unset>"
	}
	texts := make([]string, len(s.Ports))
	for i, port := range s.Ports {
		switch {
		case port.Port != nil:
			texts[i] = strconv.Itoa(int(*port.Port))
		case port.Name != nil && *port.Name != "":
			texts[i] = *port.Name
		default:
			texts[i] = "*"
		}
	}
	return some(texts)
}

func addresses(s *discoveryv1.EndpointSlice) string {
	var texts []string
	for i := range s.Endpoints {
		texts = append(texts, s.Endpoints[i].Addresses...)
	}
	if len(texts) == 0 {
		return "<unset>"
	}
	return some(texts)
}

// some shows the first of texts and how many there are beside.
func some(texts []string) string {
	if len(texts) <= shown {
		return strings.Join(texts, ",")
	}
	return strings.Join(texts[:shown], ",") + " + " + strconv.Itoa(len(texts)-shown) + " more..."
}
