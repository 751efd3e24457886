// Package tools runs programs that others wrote for Kubernetes, as they are,
// against a cluster: helm, stern, kustomize, kwok, an operator on
// controller-runtime, Prometheus' parser, client-go's informers and leader
// election. hack/peers has their versions; `make tools-test` builds and tries them. `make test` does not:
// they take long to build. Upstream's CSI sidecars and hostpath driver, of hack/csi.sh,
// are built and tried by `make csi-test`.
package tools
