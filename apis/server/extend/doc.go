// Package extend lets users add kinds to the API: by CustomResourceDefinitions,
// whose objects this process stores (k8s.io/apiextensions-apiserver), and by
// APIServices, whose requests it sends on to a Service (k8s.io/kube-aggregator).
//
// Three servers of the library stand one behind the other, and a request goes
// to the first that knows its path:
//
//	front (APIServices, filters) → our kinds → custom kinds → "not found"
//
// The front also merges what the others say of themselves: discovery and
// OpenAPI.
package extend
