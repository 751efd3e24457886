package endpoints

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// unmirrored are annotations that are about the Endpoints themselves.
var unmirrored = []string{corev1.LastAppliedConfigAnnotation, corev1.EndpointsLastChangeTriggerTime, corev1.EndpointsOverCapacity}

// portsKey is the same for the same ports.
func portsKey(ports []corev1.EndpointPort) string {
	b, _ := json.Marshal(ports) // numbers and strings: it cannot fail
	return string(b)
}

// mirror gives the slices that say what the Endpoints say: one for each set of
// ports and family of addresses. Its name follows from both, so that a slice
// is never made twice. leftOut counts the addresses beyond maxAddresses.
func mirror(service *corev1.Service, e *corev1.Endpoints) (out []*discoveryv1.EndpointSlice, leftOut int) {
	type group struct {
		ports  string
		family discoveryv1.AddressType
	}
	made, have := map[group]*discoveryv1.EndpointSlice{}, map[group]map[string]bool{}
	for i := range e.Subsets {
		subset := &e.Subsets[i]
		add := func(a *corev1.EndpointAddress, ready bool) {
			g := group{portsKey(subset.Ports), typeOf(a.IP)}
			s := made[g]
			if s == nil {
				s = newSlice(service, e, g.family, subset.Ports, g.ports)
				made[g], have[g] = s, map[string]bool{}
				out = append(out, s)
			}
			switch {
			case have[g][a.IP]: // ready ones come first
				return
			case len(s.Endpoints) == maxAddresses:
				leftOut++
				return
			}
			have[g][a.IP] = true
			endpoint := discoveryv1.Endpoint{
				Addresses: []string{a.IP}, NodeName: a.NodeName, TargetRef: a.TargetRef,
				Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(ready)},
			}
			if a.Hostname != "" {
				endpoint.Hostname = ptr.To(a.Hostname)
			}
			s.Endpoints = append(s.Endpoints, endpoint)
		}
		for j := range subset.Addresses {
			add(&subset.Addresses[j], true)
		}
		for j := range subset.NotReadyAddresses {
			add(&subset.NotReadyAddresses[j], false)
		}
	}
	return out, leftOut
}

func newSlice(service *corev1.Service, e *corev1.Endpoints, family discoveryv1.AddressType, ports []corev1.EndpointPort, key string) *discoveryv1.EndpointSlice {
	sum := sha256.Sum256([]byte(string(family) + key))
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: service.Name + "-mirror-" + hex.EncodeToString(sum[:5]), Namespace: service.Namespace,
			Labels: maps.Clone(e.Labels), Annotations: maps.Clone(e.Annotations),
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(e, corev1.SchemeGroupVersion.WithKind("Endpoints"))},
		},
		AddressType: family,
	}
	if s.Labels == nil {
		s.Labels = map[string]string{}
	}
	delete(s.Labels, labelManagedBy)
	s.Labels[discoveryv1.LabelServiceName] = service.Name
	s.Labels[discoveryv1.LabelManagedBy] = mirrorer
	for _, name := range unmirrored {
		delete(s.Annotations, name)
	}
	for _, p := range ports {
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: ptr.To(p.Name), Port: ptr.To(p.Port), Protocol: ptr.To(p.Protocol), AppProtocol: p.AppProtocol})
	}
	return s
}

// compare plans how the mirrored slices become those wanted.
func (p *Plan) compare(want, have []*discoveryv1.EndpointSlice) {
	for _, w := range want {
		i := slices.IndexFunc(have, func(s *discoveryv1.EndpointSlice) bool { return s.Name == w.Name })
		if i < 0 {
			p.CreateSlices = append(p.CreateSlices, w)
			continue
		}
		s := have[i].DeepCopy()
		s.Labels, s.Annotations, s.OwnerReferences, s.Endpoints, s.Ports = w.Labels, w.Annotations, w.OwnerReferences, w.Endpoints, w.Ports
		if !apiequality.Semantic.DeepEqual(s, have[i]) {
			p.UpdateSlices = append(p.UpdateSlices, s)
		}
	}
	for _, s := range have {
		if !slices.ContainsFunc(want, func(w *discoveryv1.EndpointSlice) bool { return s.Name == w.Name }) {
			p.DeleteSlices = append(p.DeleteSlices, s)
		}
	}
}
