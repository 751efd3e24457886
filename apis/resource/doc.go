// Package resource describes the kinds of the resource.k8s.io API group:
// devices, and claims to them. CEL expressions are stored as they are written.
package resource

// noDevices is what users of these kinds wait for in vain.
const noDevices = "allocate devices"
