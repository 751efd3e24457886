package ipaddress

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/networking"
)

// Step is what has to be done about one address; at most one field is set.
type Step struct {
	Create *networkingv1.IPAddress
	Delete bool
	// Stolen is the Service that has an address which is reserved for
	// something else.
	Stolen *corev1.Service
}

// Decide compares the Services that have an address with its IPAddress, which
// may be nil. What is not ours by its label is left alone. Pure.
func Decide(address string, holders []*corev1.Service, have *networkingv1.IPAddress) Step {
	ours := have != nil && have.Labels[networkingv1.LabelManagedBy] == networking.IPAddressManager
	if len(holders) == 0 {
		return Step{Delete: ours && have.DeletionTimestamp == nil}
	}
	if have == nil {
		return Step{Create: newAddress(address, oldest(holders))}
	}
	if slices.ContainsFunc(holders, func(s *corev1.Service) bool { return networking.IsOf(have, s.Namespace, s.Name) }) {
		return Step{}
	}
	if ours {
		return Step{Delete: have.DeletionTimestamp == nil} // the reference cannot be altered
	}
	return Step{Stolen: oldest(holders)}
}

// oldest is the Service that came first: during a deletion the cache may show
// two with one address.
func oldest(holders []*corev1.Service) *corev1.Service {
	return slices.MinFunc(holders, func(a, b *corev1.Service) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
}

func newAddress(address string, s *corev1.Service) *networkingv1.IPAddress {
	family := corev1.IPv6Protocol
	if ip, err := netip.ParseAddr(address); err == nil && ip.Is4() {
		family = corev1.IPv4Protocol
	}
	ref := networking.ServiceRef(s.Namespace, s.Name)
	return &networkingv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Name: address, Labels: map[string]string{
			networkingv1.LabelIPAddressFamily: string(family),
			networkingv1.LabelManagedBy:       networking.IPAddressManager,
		}},
		Spec: networkingv1.IPAddressSpec{ParentRef: &ref},
	}
}

// addressesOf are the cluster addresses of a Service, canonical, as names of
// IPAddresses.
func addressesOf(s *corev1.Service) []string {
	var addresses []string
	for _, text := range s.Spec.ClusterIPs {
		if ip, err := netip.ParseAddr(text); err == nil { // "None"
			addresses = append(addresses, ip.String())
		}
	}
	return addresses
}
