package core

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/clusterd/clusterd/apis/names"
)

// Reasons of the condition names.LoadBalancerAddress of a Service.
const (
	// ReasonAddressGiven: the Service has all its addresses of the cluster's pool.
	ReasonAddressGiven = "AddressGiven"
	// ReasonNoPool: there is no pool.
	ReasonNoPool = "NoPool"
	// ReasonPoolFull: the pool has no free address of a family.
	ReasonPoolFull = "PoolFull"
	// ReasonAddressNotUsable: the Service asks for an address that it cannot have.
	ReasonAddressNotUsable = "AddressNotUsable"
	// ReasonOtherProgram: another program has given the Service what it has.
	ReasonOtherProgram = "OtherProgram"
)

// BalancedElsewhere reports whether another program has given the Service its
// addresses, as the leader found: nodes announce those to nobody. A leader of a version
// before does not say.
func BalancedElsewhere(s *corev1.Service) bool {
	c := meta.FindStatusCondition(s.Status.Conditions, names.LoadBalancerAddress)
	return c != nil && c.Reason == ReasonOtherProgram
}
