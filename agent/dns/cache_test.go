package dns

import (
	"testing"
	"time"

	"github.com/miekg/dns"
)

// The bug: that a name has no such data, or does not exist, was remembered by the alias
// that led to it: for an hour where the zone says a minute, or for the zone's minutes
// where the alias holds a second (RFC 2308, sections 2 and 5).
func TestLifetimes(t *testing.T) {
	const soa = "example.com. 900 IN SOA ns.example.com. root.example.com. 1 2 3 4 60"
	for name, tt := range map[string]struct {
		kind    uint16
		rcode   int
		records []string
		want    time.Duration
		denied  bool
	}{
		"an address":                      {dns.TypeA, dns.RcodeSuccess, []string{"www.example.com. 100 IN A 192.0.2.1"}, 100 * time.Second, false},
		"behind an alias":                 {dns.TypeA, dns.RcodeSuccess, []string{"www.example.com. 3600 IN CNAME a.example.com.", "a.example.com. 20 IN A 192.0.2.1"}, 20 * time.Second, false},
		"the alias itself":                {dns.TypeCNAME, dns.RcodeSuccess, []string{"www.example.com. 300 IN CNAME a.example.com."}, 5 * time.Minute, false},
		"anything":                        {dns.TypeANY, dns.RcodeSuccess, []string{"www.example.com. 300 IN CNAME a.example.com."}, 5 * time.Minute, false},
		"no data":                         {dns.TypeAAAA, dns.RcodeSuccess, []string{soa}, time.Minute, true},
		"no data behind an alias":         {dns.TypeAAAA, dns.RcodeSuccess, []string{"www.example.com. 3600 IN CNAME a.example.com.", soa}, time.Minute, true},
		"no data behind a short alias":    {dns.TypeAAAA, dns.RcodeSuccess, []string{"www.example.com. 2 IN CNAME a.example.com.", soa}, 2 * time.Second, true},
		"no name behind a short alias":    {dns.TypeA, dns.RcodeNameError, []string{"www.example.com. 1 IN CNAME a.example.com.", soa}, time.Second, true},
		"an alias, and no word of a zone": {dns.TypeA, dns.RcodeSuccess, []string{"www.example.com. 3600 IN CNAME a.example.com."}, failedTTL, true},
		"no name, and no word of a zone":  {dns.TypeA, dns.RcodeNameError, nil, failedTTL, true},
		"no name, for long":               {dns.TypeA, dns.RcodeNameError, []string{"example.com. 9000 IN SOA ns.example.com. root.example.com. 1 2 3 4 9000"}, maxDenied, true},
		"a failure":                       {dns.TypeA, dns.RcodeServerFailure, nil, failedTTL, true},
	} {
		s := newTestServer(t)
		start := time.Now()
		s.forward.cache.now = func() time.Time { return start }
		remember(t, s, tt.rcode, tt.kind, "www.example.com.", tt.records...)
		if got := s.forward.cache.denied.Len() == 1; got != tt.denied || s.forward.cache.found.Len()+s.forward.cache.denied.Len() != 1 {
			t.Errorf("%s: among the denials: %v", name, got)
		}
		k := key{name: "www.example.com.", kind: tt.kind}
		for age, want := range map[time.Duration]bool{tt.want - time.Millisecond: true, tt.want: false} {
			s.forward.cache.now = func() time.Time { return start.Add(age) }
			if fresh, _ := s.forward.cache.get(k, false); fresh != want {
				t.Errorf("%s: after %s it is to be given: %v", name, age, fresh)
			}
		}
	}
}
