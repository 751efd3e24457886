package gateway

import (
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/utils/ptr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/clusterd/clusterd/apis/names"
)

// The Services in front of the proxies: their addresses are those of the Gateways.
const (
	// ServiceNamespace is where all of them are.
	ServiceNamespace = "kube-system"
	// SharedService is the one that Ingresses have, and Gateways that ask to share it.
	SharedService = "clusterd-ingress"
)

// serviceName is that of the Service in front of a Gateway: its own, unless it asks
// for the shared one. A name is at most 63 bytes long and begins with a letter; the
// hash tells those apart of which the rest is the same.
func serviceName(g *gatewayv1.Gateway) string {
	if g.Annotations[names.SharedAddress] == "true" {
		return SharedService
	}
	whole := g.Namespace + "/" + g.Name
	readable := strings.NewReplacer("/", "-", ".", "-").Replace(whole)
	readable = strings.TrimRight(readable[:min(len(readable), 44)], "-")
	return fmt.Sprintf("gateway-%s-%x", readable, sha256.Sum256([]byte(whole)))[:len("gateway--")+len(readable)+10]
}

// asked are the addresses that a Gateway wants to have.
func asked(g *gatewayv1.Gateway, shared bool) (out []string, _ Fault) {
	for i, a := range g.Spec.Addresses {
		at := fmt.Sprintf("spec.addresses[%d]", i)
		if t := ptr.Deref(a.Type, gatewayv1.IPAddressType); t != gatewayv1.IPAddressType {
			return nil, fault(gatewayv1.GatewayReasonUnsupportedAddress, "%s.type: %q is not served; %s is", at, t, gatewayv1.IPAddressType)
		}
		if a.Value == "" { // any
			continue
		}
		if shared {
			return nil, fault(gatewayv1.GatewayReasonUnsupportedAddress, "%s.value: the Gateway shares the addresses of the Service %s/%s; take the annotation %s away for one of its own", at, ServiceNamespace, SharedService, names.SharedAddress)
		}
		ip, err := netip.ParseAddr(a.Value)
		if err != nil {
			return nil, fault(gatewayv1.GatewayReasonUnsupportedAddress, "%s.value: %q is no IP address", at, a.Value)
		}
		out = append(out, ip.String())
	}
	return out, Fault{}
}

// unusable is why the Gateway cannot have the addresses that it asks for; "": it has
// them.
func (g *Gateway) unusable(has []gatewayv1.GatewayStatusAddress) string {
	for i, a := range g.Asked {
		if slices.ContainsFunc(has, func(h gatewayv1.GatewayStatusAddress) bool { return h.Value == a }) {
			continue
		}
		if i > 0 {
			return fmt.Sprintf("spec.addresses: %s cannot be had beside %s; ask for one", a, g.Asked[0])
		}
		return fmt.Sprintf("spec.addresses: %s is not given to the Service %s/%s: it has to be in the pool (ConfigMap kube-system/clusterd-load-balancer), of the Service's IP family and no other Service's; its events say more", a, ServiceNamespace, g.Service)
	}
	return ""
}

// Shared reports whether the Gateway has the addresses of Ingresses and of all
// Gateways that ask for the same.
func (g *Gateway) Shared() bool { return g.Service == SharedService }

// Kept are the names of Services that stay, with their addresses, though nothing is
// served by them now: of Gateways whose class is not there, or is ours and was not
// accepted.
func Kept(o Objects) map[string]bool {
	others := map[string]bool{}
	for _, c := range o.Classes {
		others[c.Name] = c.Spec.ControllerName != Controller
	}
	out := map[string]bool{}
	for _, g := range o.Gateways {
		if !others[string(g.Spec.GatewayClassName)] && g.DeletionTimestamp == nil {
			out[serviceName(g)] = true
		}
	}
	return out
}
