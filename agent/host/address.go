package host

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// NodeIPs reads the addresses that a node is known by: one, or one of each
// family, the first of which is the primary. Empty: none.
func NodeIPs(text string) ([]netip.Addr, error) {
	if strings.TrimSpace(text) == "" {
		return nil, nil
	}
	parts := strings.Split(text, ",")
	if len(parts) > 2 {
		return nil, fmt.Errorf("--node-ip %q: give one address, or one of IPv4 and one of IPv6", text)
	}
	var out []netip.Addr
	for _, part := range parts {
		a, err := netip.ParseAddr(strings.TrimSpace(part))
		if err != nil || a.Zone() != "" {
			return nil, fmt.Errorf("--node-ip %q: %q is no address such as 192.0.2.7 or 2001:db8::7", text, strings.TrimSpace(part))
		}
		a = a.Unmap()
		if why := unfit(a); why != "" {
			return nil, fmt.Errorf("--node-ip %q: %s is %s, by which no other machine reaches this one: give an address of one of its interfaces", text, a, why)
		}
		out = append(out, a)
	}
	if len(out) == 2 && out[0].Is4() == out[1].Is4() {
		return nil, fmt.Errorf("--node-ip %q: both are of one family: give one of IPv4 and one of IPv6", text)
	}
	return out, nil
}

// unfit says why an address cannot be a node's, "": it can.
func unfit(a netip.Addr) string {
	switch {
	case a.IsUnspecified():
		return "the unspecified address"
	case a.IsLoopback():
		return "a loopback address"
	case a.IsMulticast():
		return "a multicast address"
	case a.IsLinkLocalUnicast():
		return "a link-local address"
	case a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "the broadcast address"
	}
	return ""
}

// CheckNodeIPs holds the addresses against the machine's.
func (m Machine) CheckNodeIPs(ips []netip.Addr) error {
	for _, a := range ips {
		if !slices.Contains(m.Addrs, a) {
			return fmt.Errorf("--node-ip %s: no interface of this machine has it; `ip address` lists those there are", a)
		}
	}
	return nil
}

// Addresses reads further addresses of a node, which a cloud would tell
// elsewhere: TYPE=ADDRESS, separated by commas. Empty: none.
func Addresses(text string) ([]v1.NodeAddress, error) {
	var out []v1.NodeAddress
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		kind, value, ok := strings.Cut(part, "=")
		a := v1.NodeAddress{Type: v1.NodeAddressType(kind), Address: value}
		switch {
		case !ok:
			return nil, fmt.Errorf("--node-addresses: %q: write it as TYPE=ADDRESS, such as ExternalIP=203.0.113.7", part)
		case slices.Contains(out, a):
			return nil, fmt.Errorf("--node-addresses: %q is given twice", part)
		}
		switch a.Type {
		case v1.NodeExternalIP:
			ip, err := netip.ParseAddr(value)
			if err != nil || ip.Zone() != "" || unfit(ip.Unmap()) != "" {
				return nil, fmt.Errorf("--node-addresses: %q: give an address that others reach, such as ExternalIP=203.0.113.7", part)
			}
			a.Address = ip.Unmap().String()
		case v1.NodeExternalDNS, v1.NodeInternalDNS:
			if errs := validation.IsDNS1123Subdomain(value); len(errs) > 0 {
				return nil, fmt.Errorf("--node-addresses: %q: give a name such as %s=n1.example.org: %s", part, kind, errs[0])
			}
		default:
			return nil, fmt.Errorf("--node-addresses: %q: the type is ExternalIP, ExternalDNS or InternalDNS; InternalIP is --node-ip, Hostname is --name", part)
		}
		out = append(out, a)
	}
	return out, nil
}
