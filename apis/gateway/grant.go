package gateway

import (
	"slices"

	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// group is that of the kinds that refer to others.
const group = gatewayv1.GroupName

// grants are ReferenceGrants by the namespace that they open.
type grants map[string][]*gatewayv1.ReferenceGrant

func index(all []*gatewayv1.ReferenceGrant) grants {
	g := grants{}
	for _, one := range all {
		g[one.Namespace] = append(g[one.Namespace], one)
	}
	return g
}

// allow reports whether an object of our group may refer to one of the core
// group in another namespace.
func (g grants) allow(kind, namespace, toKind, toNamespace, toName string) bool {
	if namespace == toNamespace {
		return true
	}
	return slices.ContainsFunc(g[toNamespace], func(one *gatewayv1.ReferenceGrant) bool {
		return slices.ContainsFunc(one.Spec.From, func(f gatewayv1.ReferenceGrantFrom) bool {
			return string(f.Group) == group && string(f.Kind) == kind && string(f.Namespace) == namespace
		}) && slices.ContainsFunc(one.Spec.To, func(t gatewayv1.ReferenceGrantTo) bool {
			return t.Group == "" && string(t.Kind) == toKind && (t.Name == nil || *t.Name == "" || string(*t.Name) == toName)
		})
	})
}
