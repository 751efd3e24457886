package gateway

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// AuthorityKey is where a ConfigMap has the certificates of authorities.
const AuthorityKey = "ca.crt"

// Clients says which clients a listener takes connections of.
type Clients struct {
	// Authorities are the ConfigMaps with those that have to have signed a client's
	// certificate.
	Authorities []types.NamespacedName
	// Any takes other clients, too, and those without a certificate.
	Any bool
}

// Authorities reads those of a ConfigMap; nil: there is none.
func Authorities(m *corev1.ConfigMap) (out []*x509.Certificate, _ error) {
	if m == nil {
		return nil, fmt.Errorf("the ConfigMap does not exist")
	}
	for rest := []byte(m.Data[AuthorityKey]); ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if block.Type != "CERTIFICATE" || err != nil {
			return nil, fmt.Errorf("%s of ConfigMap %s/%s holds something else than certificates in PEM", AuthorityKey, m.Namespace, m.Name)
		}
		out = append(out, cert)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s of ConfigMap %s/%s holds no certificate in PEM", AuthorityKey, m.Namespace, m.Name)
	}
	return out, nil
}

// clientValidation is what the Gateway says of clients of a port for HTTPS; nil: nothing.
func clientValidation(t *gatewayv1.GatewayTLSConfig, port int32) *gatewayv1.FrontendTLSValidation {
	if t == nil || t.Frontend == nil {
		return nil
	}
	for i := range t.Frontend.PerPort {
		if p := &t.Frontend.PerPort[i]; p.Port == port {
			return p.TLS.Validation
		}
	}
	return t.Frontend.Default.Validation
}

// clientCertificate is the reference to what backends are shown; nil: there is none.
func (g *Gateway) clientCertificate() *gatewayv1.SecretObjectReference {
	if t := g.Spec.TLS; t != nil && t.Backend != nil {
		return t.Backend.ClientCertificateRef
	}
	return nil
}

// shown reads which certificate backends are shown. Without a usable one they are
// shown none: those that ask for it refuse the connection.
func (g *Gateway) shown(o Objects, grants grants) {
	const at = "spec.tls.backend.clientCertificateRef"
	ref := g.clientCertificate()
	if ref == nil {
		return
	}
	name := types.NamespacedName{Namespace: string(ptr.Deref(ref.Namespace, gatewayv1.Namespace(g.Namespace))), Name: string(ref.Name)}
	if ptr.Deref(ref.Group, "") != "" || ptr.Deref(ref.Kind, "Secret") != "Secret" {
		g.Unresolved = fault(gatewayv1.GatewayReasonInvalidClientCertificateRef, "%s: is of kind %q and group %q; Secrets of the core group are read", at, ptr.Deref(ref.Kind, "Secret"), ptr.Deref(ref.Group, ""))
		return
	}
	if !grants.allow("Gateway", g.Namespace, "Secret", name.Namespace, name.Name) {
		g.Unresolved = fault(gatewayv1.GatewayReasonRefNotPermitted, "%s: no ReferenceGrant in namespace %s lets Gateways of namespace %s refer to Secret %s", at, name.Namespace, g.Namespace, name.Name)
		return
	}
	if err := o.Certificate(name.Namespace, name.Name); err != nil {
		g.Unresolved = fault(gatewayv1.GatewayReasonInvalidClientCertificateRef, "%s: %v", at, err)
		return
	}
	g.Shown = &name
}

// clients reads which client certificates an HTTPS listener asks for. A listener none
// of whose CA references can be resolved is refused: it would accept clients that its
// owner means to reject.
func (l *Listener) clients(o Objects, g grants) {
	v := clientValidation(l.Of.Spec.TLS, l.Port)
	if v == nil {
		return
	}
	out := &Clients{Any: v.Mode == gatewayv1.AllowInsecureFallback}
	l.Clients = out
	unresolved := func(reason gatewayv1.ListenerConditionReason, format string, args ...any) {
		if (l.Unresolved == Fault{}) {
			l.Unresolved = fault(reason, format, args...)
		}
	}
	for i, ref := range v.CACertificateRefs {
		at := fmt.Sprintf("spec.tls.frontend: caCertificateRefs[%d]", i)
		name := types.NamespacedName{Namespace: string(ptr.Deref(ref.Namespace, gatewayv1.Namespace(l.Of.Namespace))), Name: string(ref.Name)}
		if ref.Group != "" || ref.Kind != "ConfigMap" {
			unresolved(gatewayv1.ListenerReasonInvalidCACertificateKind, "%s: is of kind %q and group %q; ConfigMaps of the core group are read", at, ref.Kind, ref.Group)
			continue
		}
		if !g.allow("Gateway", l.Of.Namespace, "ConfigMap", name.Namespace, name.Name) {
			unresolved(gatewayv1.ListenerReasonRefNotPermitted, "%s: no ReferenceGrant in namespace %s lets Gateways of namespace %s refer to ConfigMap %s", at, name.Namespace, l.Of.Namespace, name.Name)
			continue
		}
		if _, err := Authorities(o.ConfigMap(name.Namespace, name.Name)); err != nil {
			unresolved(gatewayv1.ListenerReasonInvalidCACertificateRef, "%s: ConfigMap %s: %v", at, name, err)
			continue
		}
		out.Authorities = append(out.Authorities, name)
	}
	if len(out.Authorities) == 0 && (l.Refused == Fault{}) {
		l.Refused = fault(gatewayv1.ListenerReasonNoValidCACertificate, "no authority of clients' certificates is known: see the condition ResolvedRefs")
	}
}
