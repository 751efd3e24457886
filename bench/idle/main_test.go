package main

import (
	"strings"
	"testing"
)

func TestBounds(t *testing.T) {
	b := bounds{rss: 10, cpu: 10, wakeups: 10, written: 10}
	if err := b.check(figure{RSS: 10, CPU: 1, Wakeups: 1, Written: 1}); err != nil {
		t.Error(err)
	}
	err := b.check(figure{Nodes: 3, Node: "n1", RSS: 11, CPU: 11, Wakeups: 11, Written: 11})
	for _, want := range []string{"3 nodes, n1: rss_mib is 11.0, at most 10.0", "cpu_pct", "wakeups_per_s", "written_mib_per_hour"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
}
