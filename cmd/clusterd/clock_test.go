package main

import (
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/clock"
	"github.com/clusterd/clusterd/member/pki"
)

// TestClockFloor: a cluster that begins now is not before its own beginning, and 1970 is.
func TestClockFloor(t *testing.T) {
	ca, err := pki.NewCA("c", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	floor, what := clockFloor(pki.NewTrust(0, ca))
	if v := clock.Judge(time.Now(), floor, what, nil, 1, true); v.Wrong() {
		t.Errorf("now: %s", v.Why)
	}
	if v := clock.Judge(time.Unix(0, 0), floor, what, nil, 1, true); !strings.Contains(v.Why, "1970-01-01T00:00:00Z, which is before the cluster began") {
		t.Errorf("in 1970: %q", v.Why)
	}
	if err := checkClockBefore("begin"); err != nil {
		t.Error(err)
	}
}
