package tools

import (
	"strings"
	"testing"
)

// TestE2EKustomize applies what the standalone kustomize makes of an overlay, and
// compares with what the one inside clusterctl makes.
func TestE2EKustomize(t *testing.T) {
	k := start(t, "tools-kustomize")
	const overlay = "testdata/kustomize/blue"
	manifest := k.ok("kustomize", "build", overlay)
	k.is("what clusterctl makes of it", k.ok("clusterctl", "kustomize", overlay), manifest)
	k.okIn(manifest, "clusterctl", "apply", "-f", "-")
	k.ok("clusterctl", "rollout", "status", "deployment/blue-web", "--timeout="+testTimeout.String())
	k.is("ready pods", k.field("deployment/blue-web", "{.status.readyReplicas}"), "2")
	k.has(k.ok("clusterctl", "exec", "deployment/blue-web", "--", "/hello", "env"), "MESSAGE=blue")
	k.is("pods of the label", k.ok("clusterctl", "get", "pods", "-l", "colour=blue", "-o", "go-template={{len .items}}"), "2")
	// Applied again, by file of the overlay: nothing is to be changed.
	for line := range strings.Lines(k.ok("clusterctl", "apply", "-k", overlay)) {
		k.has(line, "unchanged")
	}
	k.ok("clusterctl", "diff", "-k", overlay)
	k.okIn(manifest, "clusterctl", "delete", "-f", "-")
}
