package main

import (
	"strings"
	"testing"
)

func TestLoopsHealth(t *testing.T) {
	for _, test := range []struct {
		leader        string
		here, running bool
		message, err  string
	}{
		{"", false, false, "", "no leader"},
		{"id", true, false, "", "n1 leads the cluster, and has not begun"},
		{"id", true, true, "ok", ""},
		{"id", false, false, "ok: the leader, n1, is heard", ""},
	} {
		message, err := loopsHealth(test.leader, "n1", test.here, test.running)
		if message != test.message || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
			t.Errorf("%+v: %q, %v", test, message, err)
		}
	}
}
