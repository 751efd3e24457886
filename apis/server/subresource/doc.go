// Package subresource serves what can be asked of an object beyond reading and
// writing it: binding and evicting a pod, its log, its terminals and ports,
// the HTTP API of a node's agent, the end of a namespace. Terminals, ports and
// logs are proxied to the agent of the pod's node; nothing here keeps state.
package subresource
