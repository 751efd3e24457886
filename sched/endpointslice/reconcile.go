package endpointslice

import (
	"cmp"
	"encoding/json"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/sched/internal/pods"
)

// maxEndpoints of one slice. A change of one pod rewrites one slice, and every
// node reads it: slices are kept small.
const maxEndpoints = 100

// managedBy marks the slices of this controller; those of others are theirs.
const managedBy = "endpointslice-controller.k8s.io"

// Plan is what brings a Service's slices in line with its pods.
type Plan struct {
	Create, Update, Delete []*discoveryv1.EndpointSlice
	// NoHints is why the endpoints of a Service that asks for it are not shared out to
	// zones; "": they are, or it does not ask.
	NoHints string
}

// group is one set of slices: one address family and one set of resolved ports.
// A named target port may resolve to other numbers in other pods.
type group struct {
	family discoveryv1.AddressType
	ports  string // encoded
}

// Decide compares slices with pods. All pods are of the Service's namespace and
// match its selector; zone gives those of nodes; all slices carry the Service's name
// and are ours. nodes are all there are, for a Service that has its endpoints shared out.
func Decide(service *corev1.Service, all []*corev1.Pod, zone func(node string) string, nodes []*corev1.Node, slicesNow []*discoveryv1.EndpointSlice) Plan {
	wanted := map[group][]discoveryv1.Endpoint{}
	ports := map[group][]discoveryv1.EndpointPort{}
	for _, family := range families(service) {
		for _, pod := range all {
			e, ok := endpoint(service, pod, family, zone)
			if !ok {
				continue
			}
			resolved := resolve(service, pod)
			g := group{family, encode(resolved)}
			ports[g] = resolved
			wanted[g] = append(wanted[g], e)
		}
	}
	// A Service without endpoints has one empty slice: "no endpoints" is an answer,
	// "unknown" is none.
	if len(wanted) == 0 {
		for _, family := range families(service) {
			g := group{family, encode(nil)}
			wanted[g], ports[g] = nil, nil
		}
	}

	var plan Plan
	if auto(service) {
		plan.NoHints = shareOut(service, nodes, wanted)
	}
	have := map[group][]*discoveryv1.EndpointSlice{}
	for _, s := range slicesNow {
		if s.DeletionTimestamp != nil {
			continue
		}
		g := group{s.AddressType, encode(s.Ports)}
		if _, ok := wanted[g]; !ok {
			plan.Delete = append(plan.Delete, s)
			continue
		}
		have[g] = append(have[g], s)
	}
	for g, endpoints := range wanted {
		plan.fill(service, g, ports[g], endpoints, have[g])
	}
	return plan
}

// fill distributes a group's endpoints: each stays in the slice it is in, new
// ones fill the slices that change anyway, then others with room, then new ones.
func (p *Plan) fill(service *corev1.Service, g group, ports []discoveryv1.EndpointPort, endpoints []discoveryv1.Endpoint, have []*discoveryv1.EndpointSlice) {
	left := map[types.UID]discoveryv1.Endpoint{}
	for _, e := range endpoints {
		left[e.TargetRef.UID] = e
	}
	slices.SortFunc(have, func(a, b *discoveryv1.EndpointSlice) int { return cmp.Compare(a.Name, b.Name) })
	drafts := make([]*discoveryv1.EndpointSlice, len(have))
	changed := make([]bool, len(have))
	for i, s := range have {
		draft := s.DeepCopy()
		draft.Endpoints = draft.Endpoints[:0]
		for _, old := range s.Endpoints {
			if old.TargetRef == nil {
				changed[i] = true
				continue
			}
			e, ok := left[old.TargetRef.UID]
			if !ok {
				changed[i] = true
				continue
			}
			delete(left, old.TargetRef.UID)
			draft.Endpoints = append(draft.Endpoints, e)
			changed[i] = changed[i] || !apiequality.Semantic.DeepEqual(e, old)
		}
		label(draft, service)
		changed[i] = changed[i] || !maps.Equal(draft.Labels, s.Labels)
		drafts[i] = draft
	}
	rest := slices.SortedFunc(maps.Values(left), func(a, b discoveryv1.Endpoint) int {
		return cmp.Compare(a.TargetRef.Name, b.TargetRef.Name)
	})
	for _, onlyChanged := range []bool{true, false} {
		for i, draft := range drafts {
			if n := min(len(rest), maxEndpoints-len(draft.Endpoints)); n > 0 && (changed[i] || !onlyChanged) {
				draft.Endpoints = append(draft.Endpoints, rest[:n]...)
				rest, changed[i] = rest[n:], true
			}
		}
	}
	for len(rest) > 0 || len(drafts) == 0 {
		n := min(len(rest), maxEndpoints)
		s := newSlice(service, g.family, ports)
		s.Endpoints = slices.Clone(rest[:n])
		rest = rest[n:]
		p.Create = append(p.Create, s)
		if len(rest) == 0 {
			break
		}
	}
	kept := len(p.Create) // one slice stays even if it is empty
	for i, draft := range drafts {
		switch {
		case len(draft.Endpoints) == 0 && (kept > 0 || i < len(drafts)-1 || holdsSome(drafts)):
			p.Delete = append(p.Delete, have[i])
		case changed[i]:
			p.Update = append(p.Update, draft)
		}
	}
}

func holdsSome(drafts []*discoveryv1.EndpointSlice) bool {
	return slices.ContainsFunc(drafts, func(s *discoveryv1.EndpointSlice) bool { return len(s.Endpoints) > 0 })
}

// families of addresses that the Service has.
func families(service *corev1.Service) (out []discoveryv1.AddressType) {
	for _, f := range service.Spec.IPFamilies {
		switch f {
		case corev1.IPv4Protocol:
			out = append(out, discoveryv1.AddressTypeIPv4)
		case corev1.IPv6Protocol:
			out = append(out, discoveryv1.AddressTypeIPv6)
		}
	}
	if len(out) > 0 {
		return out
	}
	if ip, err := netip.ParseAddr(service.Spec.ClusterIP); err == nil && ip.Is6() {
		return []discoveryv1.AddressType{discoveryv1.AddressTypeIPv6}
	}
	return []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4}
}

// endpoint is what a pod contributes; none if it has no address of the family,
// no node or has ended.
func endpoint(service *corev1.Service, pod *corev1.Pod, family discoveryv1.AddressType, zone func(string) string) (discoveryv1.Endpoint, bool) {
	address := addressOf(pod, family)
	if address == "" || pod.Spec.NodeName == "" || pods.Finished(pod) {
		return discoveryv1.Endpoint{}, false
	}
	serving, terminating := pods.Ready(pod), pod.DeletionTimestamp != nil
	e := discoveryv1.Endpoint{
		Addresses: []string{address},
		Conditions: discoveryv1.EndpointConditions{
			Ready:       ptr.To(service.Spec.PublishNotReadyAddresses || serving && !terminating),
			Serving:     ptr.To(serving),
			Terminating: ptr.To(terminating),
		},
		NodeName:  ptr.To(pod.Spec.NodeName),
		TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
	}
	if z := zone(pod.Spec.NodeName); z != "" {
		e.Zone = &z
	}
	if !auto(service) {
		e.Hints = hints(service.Spec.TrafficDistribution, e)
	}
	if pod.Spec.Hostname != "" && pod.Spec.Subdomain == service.Name {
		e.Hostname = ptr.To(pod.Spec.Hostname)
	}
	return e, true
}

func addressOf(pod *corev1.Pod, family discoveryv1.AddressType) string {
	fits := func(text string) bool {
		ip, err := netip.ParseAddr(text)
		return err == nil && ip.Is4() == (family == discoveryv1.AddressTypeIPv4)
	}
	for _, ip := range pod.Status.PodIPs {
		if fits(ip.IP) {
			return ip.IP
		}
	}
	if fits(pod.Status.PodIP) {
		return pod.Status.PodIP
	}
	return ""
}

// resolve turns the Service's target ports into numbers for one pod. A named
// port that the pod does not have is left out.
func resolve(service *corev1.Service, pod *corev1.Pod) (out []discoveryv1.EndpointPort) {
	for i := range service.Spec.Ports {
		p := &service.Spec.Ports[i]
		protocol := cmp.Or(p.Protocol, corev1.ProtocolTCP)
		number := p.TargetPort.IntVal
		switch {
		case p.TargetPort.Type == intstr.String:
			number = named(pod, p.TargetPort.StrVal, protocol)
		case number == 0:
			number = p.Port
		}
		if number == 0 {
			continue
		}
		out = append(out, discoveryv1.EndpointPort{
			Name: ptr.To(p.Name), Port: &number, Protocol: &protocol, AppProtocol: p.AppProtocol,
		})
	}
	return out
}

// named finds a container port by name, in containers and sidecars.
func named(pod *corev1.Pod, name string, protocol corev1.Protocol) int32 {
	find := func(c *corev1.Container) int32 {
		for _, p := range c.Ports {
			if p.Name == name && cmp.Or(p.Protocol, corev1.ProtocolTCP) == protocol {
				return p.ContainerPort
			}
		}
		return 0
	}
	for i := range pod.Spec.Containers {
		if n := find(&pod.Spec.Containers[i]); n != 0 {
			return n
		}
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		if core.IsSidecar(c) {
			if n := find(c); n != 0 {
				return n
			}
		}
	}
	return 0
}

// encode makes ports comparable, whatever their order.
func encode(ports []discoveryv1.EndpointPort) string {
	words := make([]string, len(ports))
	for i := range ports {
		b, err := json.Marshal(ports[i])
		if err != nil {
			panic("endpoint port cannot be encoded: " + err.Error()) // plain values always can
		}
		words[i] = string(b)
	}
	slices.Sort(words)
	b, _ := json.Marshal(words)
	return string(b)
}

// newSlice returns an empty slice without a name.
func newSlice(service *corev1.Service, family discoveryv1.AddressType, ports []discoveryv1.EndpointPort) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: service.Name + "-", Namespace: service.Namespace,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(service, Kind)},
		},
		AddressType: family,
		Ports:       ports,
	}
	label(s, service)
	return s
}

// label copies the Service's labels and adds those that readers look for.
func label(s *discoveryv1.EndpointSlice, service *corev1.Service) {
	labels := maps.Clone(service.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	labels[discoveryv1.LabelServiceName] = service.Name
	labels[discoveryv1.LabelManagedBy] = managedBy
	delete(labels, corev1.IsHeadlessService)
	if service.Spec.ClusterIP == corev1.ClusterIPNone {
		labels[corev1.IsHeadlessService] = ""
	}
	s.Labels = labels
}
