package join

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestParseRanges(t *testing.T) {
	for text, want := range map[string]string{
		"10.244.0.0/14":                   "",
		"fd00:10:244::/48":                "",
		"10.244.0.0/14,fd00:10:244::/48":  "",
		"fd00:10:244::/48,10.244.0.0/14":  "",
		"":                                "is no range",
		"10.244.0.0":                      "is no range",
		"10.244.0.1/14":                   "10.244.0.1/14 is no range: its first address is 10.244.0.0",
		"10.0.0.0/14,10.244.0.0/14":       "are of one IP family",
		"10.0.0.0/14,fd00::/48,fd01::/48": "one range of each",
		"fe80::/64":                       "reach no other machine",
		"::ffff:10.0.0.0/104":             "reach no other machine",
		"10.244.0.0/14,fd00:10:244::1/48": "its first address is",
		"10.244.0.0/14;fd00:10:244::/48":  "is no range",
	} {
		got, err := ParseRanges(text)
		switch {
		case want == "" && (err != nil || got.String() != text):
			t.Errorf("%q: %v, %v", text, got, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

// TestRangesAsBefore: a cluster of one range writes what it always wrote, and reads
// it.
func TestRangesAsBefore(t *testing.T) {
	const former = `{"name":"c","clusterCIDR":"10.244.0.0/14","serviceCIDR":"10.96.0.0/16","created":"2026-01-02T03:04:05Z"}`
	var c Cluster
	if err := json.Unmarshal([]byte(former), &c); err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(c)
	if err != nil || string(b) != former {
		t.Errorf("%s, %v", b, err)
	}
}
