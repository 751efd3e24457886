// Package gateway runs the conformance suite of the Gateway API, as its project
// wrote it, against a cluster. hack/peers has its version; `make
// gateway-conformance` builds and runs it. `make test` does not: it takes long.
package gateway
