// Package gatewayconformance is the conformance suite of the Gateway API as a test
// program: it takes the suite's own flags and tries the cluster of KUBECONFIG.
// `make gateway-conformance` builds it and runs it on a cluster (e2e/gateway).
package gatewayconformance

import (
	"bytes"
	"io/fs"
	"regexp"
	"testing"
	"testing/fstest"

	"sigs.k8s.io/gateway-api/conformance"
)

// base is where the suite has the objects that all its tests share.
const base = "base/manifests.yaml"

// dns is the Deployment of a DNS server among them, which tests of UDPRoutes alone
// ask. Its image is no part of the suite's module.
var dns = regexp.MustCompile(`(?m)^kind: Deployment\nmetadata:\n  name: coredns$`)

// manifests are the suite's own, without that Deployment.
type manifests struct{ fs.FS }

// Open implements fs.FS.
func (m manifests) Open(name string) (fs.File, error) {
	if name != base {
		return m.FS.Open(name)
	}
	all, err := fs.ReadFile(m.FS, name)
	if err != nil {
		return nil, err
	}
	var kept [][]byte
	for _, one := range bytes.Split(all, []byte("\n---\n")) {
		if !dns.Match(one) {
			kept = append(kept, one)
		}
	}
	return fstest.MapFS{name: {Data: bytes.Join(kept, []byte("\n---\n"))}}.Open(name)
}

func TestConformance(t *testing.T) {
	o := conformance.DefaultOptions(t)
	o.ManifestFS = []fs.FS{manifests{&conformance.Manifests}}
	conformance.RunConformanceWithOptions(t, o)
}
