package conformance

import (
	"strings"
	"testing"
)

func TestReport(t *testing.T) {
	const text = `[{"SpecReports": [
		{"LeafNodeType": "SynchronizedBeforeSuite", "State": "passed"},
		{"LeafNodeType": "It", "ContainerHierarchyTexts": ["[sig-apps] Deployment"], "LeafNodeText": "rolls [Conformance]", "State": "passed"},
		{"LeafNodeType": "It", "ContainerHierarchyTexts": ["[sig-node] Pods"], "LeafNodeText": "run [Conformance]", "State": "timedout",
			"Failure": {"Message": "took too long\nafter 5m", "Location": {"FileName": "test/e2e/node/pods.go", "LineNumber": 7}}},
		{"LeafNodeType": "It", "ContainerHierarchyTexts": ["[sig-node] Pods"], "LeafNodeText": "left out", "State": "skipped"},
		{"LeafNodeType": "SynchronizedAfterSuite", "State": "failed", "Failure": {"Message": "left"}}]}]`
	r, err := parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if r.passed() != 1 || r.failed() != 2 {
		t.Errorf("%d passed, %d failed, want 1 and 2", r.passed(), r.failed())
	}
	const want = `
       SIG  passed  failed
     other       0       1
  sig-apps       1       0
  sig-node       0       1
       all       1       2

[sig-node] Pods run [Conformance]
    timedout: took too long (pods.go:7)
SynchronizedAfterSuite
    failed: left (:0)`
	if got := "\n" + r.String(); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	if _, err := parse([]byte("{")); err == nil || !strings.Contains(err.Error(), "ginkgo's report") {
		t.Errorf("no report: %v", err)
	}
}
