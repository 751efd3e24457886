package nodeipam

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func prefixes(text string) (out []netip.Prefix) {
	for _, s := range strings.Fields(text) {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func TestNext(t *testing.T) {
	tests := []struct {
		name, cluster string
		bits          int
		last, used    string
		want          string // "" if none is free
	}{
		{"first", "10.244.0.0/16", 24, "", "", "10.244.0.0/24"},
		{"second", "10.244.0.0/16", 24, "10.244.0.0/24", "10.244.0.0/24", "10.244.1.0/24"},
		{"not the one just freed", "10.244.0.0/16", 24, "10.244.3.0/24", "10.244.0.0/24", "10.244.4.0/24"},
		{"gap after a new leader", "10.244.0.0/16", 24, "", "10.244.0.0/24 10.244.2.0/24", "10.244.1.0/24"},
		{"around the end", "10.0.0.0/22", 24, "10.0.3.0/24", "10.0.0.0/24", "10.0.1.0/24"},
		{"the last one free is the last given", "10.0.0.0/23", 24, "10.0.1.0/24", "10.0.0.0/24", "10.0.1.0/24"},
		{"full", "10.0.0.0/23", 24, "10.0.0.0/24", "10.0.0.0/24 10.0.1.0/24", ""},
		{"full from the beginning", "10.0.0.0/23", 24, "", "10.0.0.0/24 10.0.1.0/24", ""},
		{"a larger one in the way", "10.0.0.0/22", 24, "", "10.0.0.0/23", "10.0.2.0/24"},
		{"a larger one around everything", "10.0.0.0/22", 24, "10.0.1.0/24", "10.0.0.0/8", ""},
		{"smaller ones in the way", "10.0.0.0/22", 24, "", "10.0.0.128/25 10.0.1.7/32", "10.0.2.0/24"},
		{"at the end of all addresses", "255.255.254.0/23", 24, "255.255.255.0/24", "", "255.255.254.0/24"},
		{"one network", "10.0.0.0/24", 24, "", "", "10.0.0.0/24"},
		{"one network, taken", "10.0.0.0/24", 24, "10.0.0.0/24", "10.0.0.0/24", ""},
		{"IPv6", "fd00::/48", 64, "fd00::/64", "fd00:0:0:1::/64", "fd00:0:0:2::/64"},
		{"last of another cluster", "10.0.0.0/16", 24, "10.9.9.0/24", "10.0.0.0/24", "10.0.1.0/24"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var last netip.Prefix
			if test.last != "" {
				last = netip.MustParsePrefix(test.last)
			}
			got, ok := next(netip.MustParsePrefix(test.cluster), test.bits, last, prefixes(test.used))
			if ok != (test.want != "") || ok && got.String() != test.want {
				t.Errorf("got %v %v, want %q", got, ok, test.want)
			}
		})
	}
}

// Every network is given exactly once until none is left.
func TestNextFillsTheCluster(t *testing.T) {
	cluster := netip.MustParsePrefix("10.244.0.0/20")
	var used []netip.Prefix
	last := netip.Prefix{}
	for {
		p, ok := next(cluster, 24, last, used)
		if !ok {
			break
		}
		if _, twice := overlap(p, used); twice || !cluster.Overlaps(p) {
			t.Fatalf("%v is taken or outside", p)
		}
		used, last = append(used, p), p
	}
	if len(used) != 16 {
		t.Errorf("%d networks, want 16", len(used))
	}
}

func TestLacks(t *testing.T) {
	four, six := Range{netip.MustParsePrefix("10.244.0.0/14"), 24}, Range{netip.MustParsePrefix("fd00:10:244::/48"), 64}
	for _, tt := range []struct {
		name   string
		have   []string
		ranges []Range
		want   []int
	}{
		{"new", nil, []Range{four}, []int{0}},
		{"new, two", nil, []Range{four, six}, []int{0, 1}},
		{"one of one", []string{"10.244.1.0/24"}, []Range{four}, nil},
		{"one of two", []string{"10.244.1.0/24"}, []Range{four, six}, []int{1}},
		{"both", []string{"10.244.1.0/24", "fd00:10:244:1::/64"}, []Range{four, six}, nil},
		{"in the other order", []string{"10.244.1.0/24"}, []Range{six, four}, nil},
		{"of former ranges", []string{"10.1.0.0/24"}, []Range{four}, nil},
	} {
		if got := lacks(tt.have, tt.ranges); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}
