package loadbalancer

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/names"
)

// retryConflict is how long the cache is given to show what another wrote.
const retryConflict = 100 * time.Millisecond

// Range of addresses, both ends included.
type Range struct{ First, Last netip.Addr }

// ParsePool reads ranges. What cannot be read is left out and reported.
func ParsePool(text string) (ranges []Range, err error) {
	var errs []error
	for _, word := range strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(", \t\r\n", r) }) {
		r, err := parseRange(word)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		ranges = append(ranges, r)
	}
	return ranges, errors.Join(errs...)
}

func parseRange(word string) (Range, error) {
	bad := fmt.Errorf("addresses: %q is no range of addresses, such as 192.0.2.0/28 or 192.0.2.20-192.0.2.29", word)
	if p, err := netip.ParsePrefix(word); err == nil {
		p = p.Masked()
		r := Range{p.Addr(), last(p)}
		if p.Addr().Is4() && p.Bits() < 31 { // network and broadcast are not addresses of hosts
			r = Range{r.First.Next(), r.Last.Prev()}
		}
		return r, nil
	}
	from, to, both := strings.Cut(word, "-")
	first, err := netip.ParseAddr(from)
	if err != nil {
		return Range{}, bad
	}
	r := Range{first, first}
	if both {
		if r.Last, err = netip.ParseAddr(to); err != nil || r.Last.Less(first) || r.Last.Is4() != first.Is4() {
			return Range{}, bad
		}
	}
	return r, nil
}

func last(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

func (r Range) has(a netip.Addr) bool {
	return a.Is4() == r.First.Is4() && !a.Less(r.First) && !r.Last.Less(a)
}

// holds: packets to the addresses in the Service's status are led to it, whoever gave
// them, and also while it is deleted.
func holds(s *corev1.Service) bool { return s.Spec.Type == corev1.ServiceTypeLoadBalancer }

// nodesAddresses are the addresses of nodes, with their names. Pure.
func nodesAddresses(nodes []*corev1.Node) map[netip.Addr]string {
	out := map[netip.Addr]string{}
	for _, n := range nodes {
		for _, a := range n.Status.Addresses {
			if addr, err := netip.ParseAddr(a.Address); err == nil {
				out[addr.Unmap()] = n.Name
			}
		}
	}
	return out
}

// balanced: the Service is to have addresses from here.
func balanced(s *corev1.Service) bool {
	return holds(s) && s.Spec.LoadBalancerClass == nil && s.DeletionTimestamp == nil
}

func ingress(s *corev1.Service) (ips []string) {
	for _, in := range s.Status.LoadBalancer.Ingress {
		ips = append(ips, in.IP)
	}
	return ips
}

func setIngress(s *corev1.Service, ips []string) {
	s.Status.LoadBalancer.Ingress = nil
	for _, ip := range ips {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip, IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)})
	}
}

// Decision is what one Service gets, and why it lacks something.
type Decision struct {
	Service *corev1.Service
	IPs     []string
	// Reason and Fault: "" unless it lacks something.
	Reason, Fault string
}

// most is how many addresses of one range are looked at: an IPv6 range has more
// than there will be Services.
const most = 1 << 16

// Decide gives each Service one address of each of its families: the one it has
// while the pool holds it, else the one it asks for (spec.loadBalancerIP), else
// the first that is free. The older Service wins. What others have, which get none from
// here, is not free; nor is what nodes have, by their names, which none may keep.
func Decide(services, others []*corev1.Service, nodes map[netip.Addr]string, pool []Range) []Decision {
	services = slices.Clone(services)
	slices.SortFunc(services, func(a, b *corev1.Service) int {
		if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
			return c
		}
		return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name)
	})
	inPool := func(a netip.Addr) bool {
		return slices.ContainsFunc(pool, func(r Range) bool { return r.has(a) })
	}
	taken := map[netip.Addr]bool{}
	for a := range nodes {
		taken[a] = true
	}
	kept := make([]map[bool]netip.Addr, len(services))
	wanted := func(s *corev1.Service) (netip.Addr, bool) {
		a, err := netip.ParseAddr(s.Spec.LoadBalancerIP)
		return a, err == nil
	}
	// What each has is its own before anything is given out.
	for i, s := range services {
		kept[i] = map[bool]netip.Addr{}
		want, asks := wanted(s)
		for _, ip := range ingress(s) {
			a, err := netip.ParseAddr(ip)
			if err != nil || taken[a] || !inPool(a) || asks && want.Is4() == a.Is4() && want != a {
				continue
			}
			if _, twice := kept[i][a.Is4()]; !twice {
				kept[i][a.Is4()], taken[a] = a, true
			}
		}
	}
	for _, s := range others {
		for _, ip := range ingress(s) {
			if a, err := netip.ParseAddr(ip); err == nil {
				taken[a.Unmap()] = true
			}
		}
	}
	out := make([]Decision, len(services))
	for i, s := range services {
		out[i].Service = s
		families := s.Spec.IPFamilies
		if len(families) == 0 {
			families = []corev1.IPFamily{corev1.IPv4Protocol}
		}
		for _, family := range families {
			four := family == corev1.IPv4Protocol
			a, ok := kept[i][four]
			if want, asks := wanted(s); !ok && asks && want.Is4() == four {
				fault := ""
				switch {
				case nodes[want] != "":
					fault = fmt.Sprintf("spec.loadBalancerIP %s is the address of the node %s", want, nodes[want])
				case !inPool(want):
					fault = fmt.Sprintf("spec.loadBalancerIP %s is not in the cluster's pool", want)
				case taken[want]:
					fault = fmt.Sprintf("spec.loadBalancerIP %s belongs to another Service", want)
				}
				if fault != "" {
					out[i].Reason, out[i].Fault = core.ReasonAddressNotUsable, fault
					continue
				}
				a, ok = want, true
			} else if !ok {
				a, ok = free(pool, four, taken)
			}
			if !ok {
				out[i].Reason, out[i].Fault = core.ReasonPoolFull, fmt.Sprintf("the cluster's pool has no free %s address", family)
				continue
			}
			taken[a] = true
			out[i].IPs = append(out[i].IPs, a.String())
		}
	}
	return out
}

// condition tells in the Service's status what was decided: events go, and are sent once.
func condition(d Decision) metav1.Condition {
	c := metav1.Condition{Type: names.LoadBalancerAddress, Status: metav1.ConditionFalse, Reason: d.Reason, Message: d.Fault, ObservedGeneration: d.Service.Generation}
	if d.Fault == "" {
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, core.ReasonAddressGiven, "given from the cluster's pool: "+strings.Join(d.IPs, ", ")
	}
	return c
}

// says reports whether the Service's status has the condition.
func says(s *corev1.Service, want metav1.Condition) bool {
	c := meta.FindStatusCondition(s.Status.Conditions, want.Type)
	return c != nil && c.Status == want.Status && c.Reason == want.Reason && c.Message == want.Message
}

func free(pool []Range, four bool, taken map[netip.Addr]bool) (netip.Addr, bool) {
	for _, r := range pool {
		if r.First.Is4() != four {
			continue
		}
		a := r.First
		for range most {
			if !a.IsValid() || !r.has(a) {
				break
			}
			if !taken[a] {
				return a, true
			}
			a = a.Next()
		}
	}
	return netip.Addr{}, false
}
