package gateway

import (
	"crypto/sha256"
	"fmt"
	"strings"

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

// Shared reports whether the Gateway has the addresses of Ingresses and of all
// Gateways that ask for the same.
func (g *Gateway) Shared() bool { return g.Service == SharedService }
