package e2e

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// TestE2ECleanup fills a cluster with everything that leaves traces on a
// machine, kills what should clean up, and removes it all.
func TestE2ECleanup(t *testing.T) {
	e := start(t)
	ns := e.namespace("cleanup")
	e.createDeployment(ns, deployment("web", 12))
	e.podsReady(ns, "app=web", 12)
	e.create(ns, pod("failed", "exit", "1"))
	// One node's clusterd was killed, another is frozen.
	if err := e.Kill("n2"); err != nil {
		t.Fatal(err)
	}
	if err := e.Pause("n3"); err != nil {
		t.Fatal(err)
	}
	marks := e.Marks()
	var data []string
	for _, n := range e.Nodes() {
		data = append(data, n.Data)
	}
	before, err := cluster.Remains(append(marks, data...)...)
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"mount", "cgroup", "interface", "process"} {
		if !strings.Contains(strings.Join(before, "\n"), kind+" ") {
			t.Errorf("there is no %s to be cleaned up: the test is blind", kind)
		}
	}
	began := time.Now()
	for _, n := range e.Nodes() {
		if n.Name != "n3" { // frozen: it stops when Down has thawed it
			if err := e.Stop(t.Context(), n.Name); err != nil {
				t.Error(err)
				e.keepLog(n)
			}
		}
	}
	if err := e.Down(context.WithoutCancel(t.Context())); err != nil {
		t.Fatal(err)
	}
	t.Logf("three nodes with 13 pods were removed in %s", time.Since(began).Round(time.Millisecond))
	left, err := cluster.Stays(append(marks, data...)...)
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %q (%v)", left, err)
	}
	for _, d := range data {
		if _, err := os.Stat(d); !os.IsNotExist(err) {
			t.Errorf("%s is left (%v)", d, err)
		}
	}
}
