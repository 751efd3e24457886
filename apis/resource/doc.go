// Package resource describes the kinds of the resource.k8s.io API group:
// devices, and claims to them. CEL expressions are compiled by an admission
// plugin of the server, which has the library for it.
package resource
