// Package conformance runs Kubernetes' own conformance tests, the program of its
// test/e2e as it is, against a cluster. hack/conformance.sh builds that program and
// the images that it names; `make conformance-upstream` does both. `make test` does
// not: it takes hours.
package conformance
