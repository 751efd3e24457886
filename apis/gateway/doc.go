// Package gateway says what GatewayClasses, Gateways, HTTPRoutes, GRPCRoutes and
// ReferenceGrants mean together: which route is attached to which listener, for
// which hosts, and what of them is refused and why. It is asked by the leader,
// who writes the answers into the statuses, and by the proxies, who serve by
// them, so that both always agree. The kinds themselves are custom ones, of
// sigs.k8s.io/gateway-api. Everything here is a function of values.
package gateway
