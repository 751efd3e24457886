package endpoints

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// maxAddresses of one Endpoints, and of one mirrored set of ports.
	maxAddresses = 1000
	// labelManagedBy marks Endpoints that are written here.
	labelManagedBy = "endpoints.kubernetes.io/managed-by"
	managedBy      = "endpoint-controller"
	// mirrorer marks slices that mirror Endpoints.
	mirrorer = "endpointslicemirroring-controller.k8s.io"
	// leaderAnnotation: such Endpoints are an election's, not a Service's.
	leaderAnnotation = "control-plane.alpha.kubernetes.io/leader"
	truncated        = "truncated"
)

// sources are who writes slices that Endpoints are made from: the loop for
// Services with selectors, and the one for the Service "kubernetes".
var sources = []string{"endpointslice-controller.k8s.io", "clusterd"}

// Plan is what brings a Service's Endpoints and its mirrored slices in line.
type Plan struct {
	Create, Update, Delete                   *corev1.Endpoints
	CreateSlices, UpdateSlices, DeleteSlices []*discoveryv1.EndpointSlice
	// Mirrored are the Endpoints of which LeftOut addresses were too many.
	Mirrored *corev1.Endpoints
	LeftOut  int
}

// Decide compares. service and endpoints are nil where there are none; all are
// the slices with the Service's name; gone: the Service was there before.
func Decide(service *corev1.Service, endpoints *corev1.Endpoints, all []*discoveryv1.EndpointSlice, gone bool) (plan Plan) {
	var from, mirrored []*discoveryv1.EndpointSlice
	for _, s := range all {
		switch by := s.Labels[discoveryv1.LabelManagedBy]; {
		case s.DeletionTimestamp != nil:
		case by == mirrorer:
			mirrored = append(mirrored, s)
		case slices.Contains(sources, by):
			from = append(from, s)
		}
	}
	var want []*discoveryv1.EndpointSlice
	switch {
	case endpoints != nil && endpoints.DeletionTimestamp != nil:
	case service == nil || service.DeletionTimestamp != nil:
		if endpoints != nil && (gone || endpoints.Labels[labelManagedBy] == managedBy) && !elects(endpoints) {
			plan.Delete = endpoints
		}
	case service.Spec.Type == corev1.ServiceTypeExternalName:
	case len(service.Spec.Selector) > 0 || isKubernetes(service):
		plan.fromSlices(service, endpoints, from)
	case endpoints != nil && mirrors(endpoints):
		want, plan.LeftOut = mirror(service, endpoints)
		plan.Mirrored = endpoints
	}
	plan.compare(want, mirrored)
	return plan
}

// isKubernetes: the API's own Service has no selector, and its slices are ours.
func isKubernetes(s *corev1.Service) bool {
	return s.Namespace == metav1.NamespaceDefault && s.Name == "kubernetes"
}

func elects(e *corev1.Endpoints) bool {
	_, ok := e.Annotations[leaderAnnotation]
	return ok
}

func mirrors(e *corev1.Endpoints) bool {
	return e.Labels[discoveryv1.LabelSkipMirror] != "true" && !elects(e)
}

// fromSlices plans the Endpoints that say what the slices say.
func (p *Plan) fromSlices(service *corev1.Service, have *corev1.Endpoints, from []*discoveryv1.EndpointSlice) {
	subsets, over := Subsets(family(service), from)
	want := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: service.Name, Namespace: service.Namespace}}
	if have != nil {
		want = have.DeepCopy()
	}
	want.Subsets = subsets
	want.Labels = maps.Clone(service.Labels)
	if want.Labels == nil {
		want.Labels = map[string]string{}
	}
	want.Labels[labelManagedBy] = managedBy
	delete(want.Labels, corev1.IsHeadlessService)
	if service.Spec.ClusterIP == corev1.ClusterIPNone {
		want.Labels[corev1.IsHeadlessService] = ""
	}
	if isKubernetes(service) {
		want.Labels[discoveryv1.LabelSkipMirror] = "true"
	}
	delete(want.Annotations, corev1.EndpointsOverCapacity)
	if over {
		metav1.SetMetaDataAnnotation(&want.ObjectMeta, corev1.EndpointsOverCapacity, truncated)
	}
	switch {
	case have == nil:
		p.Create = want
	case !apiequality.Semantic.DeepEqual(have, want):
		p.Update = want
	}
}

// family of addresses: Endpoints have one, the Service's first.
func family(service *corev1.Service) discoveryv1.AddressType {
	if len(service.Spec.IPFamilies) > 0 {
		return discoveryv1.AddressType(service.Spec.IPFamilies[0])
	}
	return typeOf(service.Spec.ClusterIP)
}

// typeOf an address; IPv4 if it is none.
func typeOf(address string) discoveryv1.AddressType {
	if ip, err := netip.ParseAddr(address); err == nil && ip.Is6() {
		return discoveryv1.AddressTypeIPv6
	}
	return discoveryv1.AddressTypeIPv4
}

// Subsets of Endpoints, one for each set of ports, in an order that only what
// they hold decides. Beyond maxAddresses they are cut, those that are not ready
// first, and over is true. Endpoints that end are left out, unless they are to
// be published in any case.
func Subsets(family discoveryv1.AddressType, from []*discoveryv1.EndpointSlice) (subsets []corev1.EndpointSubset, over bool) {
	byPorts := map[string]*corev1.EndpointSubset{}
	for _, s := range from {
		if s.AddressType != family {
			continue
		}
		ports := portsOf(s.Ports)
		key := portsKey(ports)
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			ready := e.Conditions.Ready == nil || *e.Conditions.Ready
			if len(e.Addresses) == 0 || !ready && e.Conditions.Terminating != nil && *e.Conditions.Terminating {
				continue
			}
			subset := byPorts[key]
			if subset == nil {
				subset = &corev1.EndpointSubset{Ports: ports}
				byPorts[key] = subset
			}
			a := corev1.EndpointAddress{IP: e.Addresses[0], NodeName: e.NodeName, TargetRef: e.TargetRef}
			if e.Hostname != nil {
				a.Hostname = *e.Hostname
			}
			if ready {
				subset.Addresses = append(subset.Addresses, a)
			} else {
				subset.NotReadyAddresses = append(subset.NotReadyAddresses, a)
			}
		}
	}
	keys := slices.Sorted(maps.Keys(byPorts))
	room := maxAddresses
	cut := func(list []corev1.EndpointAddress) []corev1.EndpointAddress {
		slices.SortFunc(list, compareAddress)
		// A pod that moved from one slice to another may be in both for a moment.
		list = slices.CompactFunc(list, func(a, b corev1.EndpointAddress) bool { return compareAddress(a, b) == 0 })
		if len(list) > room {
			list, over = list[:room], true
		}
		room -= len(list)
		return list
	}
	for _, key := range keys {
		byPorts[key].Addresses = cut(byPorts[key].Addresses)
	}
	for _, key := range keys {
		byPorts[key].NotReadyAddresses = cut(byPorts[key].NotReadyAddresses)
	}
	for _, key := range keys {
		if s := byPorts[key]; len(s.Addresses)+len(s.NotReadyAddresses) > 0 {
			subsets = append(subsets, *s)
		}
	}
	return subsets, over
}

func compareAddress(a, b corev1.EndpointAddress) int {
	uid := func(a corev1.EndpointAddress) string {
		if a.TargetRef == nil {
			return ""
		}
		return string(a.TargetRef.UID)
	}
	return cmp.Or(cmp.Compare(a.IP, b.IP), cmp.Compare(uid(a), uid(b)))
}

// portsOf a slice, in order of their names. A port without a number, which
// means all of them, has no counterpart.
func portsOf(ports []discoveryv1.EndpointPort) (out []corev1.EndpointPort) {
	for _, p := range ports {
		if p.Port == nil {
			continue
		}
		port := corev1.EndpointPort{Port: *p.Port, Protocol: corev1.ProtocolTCP, AppProtocol: p.AppProtocol}
		if p.Name != nil {
			port.Name = *p.Name
		}
		if p.Protocol != nil {
			port.Protocol = *p.Protocol
		}
		out = append(out, port)
	}
	slices.SortFunc(out, func(a, b corev1.EndpointPort) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
	})
	return out
}
