package main

import (
	"fmt"
	"net/netip"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// tlsSANs reads TLSSANs. A name or address that belongs to something else in the
// cluster is refused: whoever asks for that is not to be answered by this server.
func (c *Config) tlsSANs() (addrs []netip.Addr, names []string, err error) {
	for text := range strings.SplitSeq(c.TLSSANs, ",") {
		if text = strings.TrimSpace(text); text == "" {
			continue
		}
		no := func(format string, args ...any) error {
			return fmt.Errorf("--tls-san: %q: %s", text, fmt.Sprintf(format, args...))
		}
		if a, err := netip.ParseAddr(text); err == nil {
			if a = a.Unmap(); a.Zone() != "" || a.IsUnspecified() || a.IsMulticast() {
				return nil, nil, no("give an address that clients can call, such as 203.0.113.7")
			}
			for _, r := range c.podRanges() {
				if r.Contains(a) {
					return nil, nil, no("it is a pod's, of --cluster-cidr %s: leave it out", r)
				}
			}
			for _, r := range c.serviceRanges() {
				if r.Contains(a) {
					return nil, nil, no("it is a Service's, of --service-cidr %s: leave it out; the API's own, %s, is named anyway", r, r.Masked().Addr().Next())
				}
			}
			addrs = append(addrs, a)
			continue
		}
		switch errs := validation.IsDNS1123Subdomain(text); {
		case strings.Contains(text, "*"):
			return nil, nil, no("a name for all below a domain would be other machines' too: give each name of this server")
		case len(errs) > 0:
			return nil, nil, no("give a name such as api.example.org, or an address such as 203.0.113.7, without a port: %s", errs[0])
		case text == c.ClusterDomain || strings.HasSuffix(text, "."+c.ClusterDomain) || text == "svc" || strings.HasSuffix(text, ".svc"):
			return nil, nil, no("names below svc and --cluster-domain %s are Services' and pods': leave it out; the API's own, kubernetes.default.svc.%[1]s, is named anyway", c.ClusterDomain)
		}
		names = append(names, text)
	}
	return addrs, names, nil
}
