package join

import (
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"
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

// TestJoinOfTheOtherFamily: a machine whose address is not of the cluster's first family
// is refused before it has a record, unless servers have such addresses as well.
func TestJoinOfTheOtherFamily(t *testing.T) {
	w := newWorld(t)
	six := Cluster{Name: "c", ClusterCIDR: Ranges{netip.MustParsePrefix("fd00:10:244::/48")}, ServiceCIDR: Ranges{netip.MustParsePrefix("fd00:10:96::/112")}}
	c, revision, err := clusterNow(t.Context(), w.store)
	if err != nil {
		t.Fatal(err)
	}
	c.ClusterCIDR, c.ServiceCIDR = six.ClusterCIDR, six.ServiceCIDR
	if err := putCluster(t.Context(), w.store, c, revision); err != nil {
		t.Fatal(err)
	}
	own := w.server.Servers
	w.server.Servers = func() []ServerAddr {
		return []ServerAddr{{ID: own()[0].ID, Name: "n1", Addr: netip.MustParseAddrPort("[2001:db8::1]:6443")}}
	}
	_, _, err = w.join(t, w.token(t, time.Hour), "n2")
	var no *Refusal
	if !errors.As(err, &no) || no.Code != CodeRequest || !strings.Contains(no.Message, "the address 127.0.0.1: the nodes of this cluster have addresses of IPv6, as the first range of its pods, fd00:10:244::/48: give an IPv6 address of this machine with --advertise") {
		t.Fatalf("got %v", err)
	}
	if records, _ := Records(t.Context(), w.store, false); len(records) != 1 {
		t.Errorf("a refused machine left a record: %+v", records)
	}
	w.server.Servers = own // at an address of IPv4
	if _, _, err := w.join(t, w.token(t, time.Hour), "n2"); err != nil {
		t.Errorf("beside a server of its family: %v", err)
	}
	four, servers := Cluster{ClusterCIDR: Ranges{netip.MustParsePrefix("10.244.0.0/14")}}, own()
	for addr, want := range map[string]string{"192.0.2.7": "", "::ffff:192.0.2.7": "", "2001:db8::7": "give an IPv4 address"} {
		if err := four.reached(netip.MustParseAddr(addr), servers); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", addr, err, want)
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
