package dns

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"
	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// zone answers the names of the cluster. Its answers are functions of what the
// catalog holds at the moment.
type zone struct {
	name    string // canonical
	suffix  string // of all names below: a dot and name
	servers []netip.Addr
	ranges  func() []netip.Prefix
	catalog *catalog
}

func newZone(domain string, servers []netip.Addr, ranges func() []netip.Prefix, c *catalog) *zone {
	name := dns.CanonicalName(domain)
	return &zone{name: name, suffix: "." + name, servers: servers, ranges: ranges, catalog: c}
}

// holds says whether a name is the zone's or below it.
func (z *zone) holds(name string) bool { return name == z.name || strings.HasSuffix(name, z.suffix) }

// answer is what is known about a name.
type answer struct {
	rcode         int
	addrs         []netip.Addr // the name's own; those of the asked family are records
	answer, extra []dns.RR
	// target is where an alias leads: its records are still to be added.
	target string
}

var (
	noSuchName = answer{rcode: dns.RcodeNameError}
	noSuchData = answer{} // the name exists, perhaps only as part of longer ones
	notYet     = answer{rcode: dns.RcodeServerFailure}
)

// schemaVersion is the specification that names follow.
const schemaVersion = "1.1.0"

// asked is a question for the zone.
type asked struct {
	dns.Question
	most int // SRV records that can be sent, at most
}

// An SRV record takes 20 bytes at least.
const (
	mostInDatagram = udpPayload / 20
	mostInStream   = dns.MaxMsgSize / 20
)

func askedBy(q dns.Question, stream bool) asked {
	if stream {
		return asked{q, mostInStream}
	}
	return asked{q, mostInDatagram}
}

// answer gives what is known; false: the name is not the cluster's.
func (z *zone) answer(name string, q asked) (answer, bool) {
	if name == z.name {
		return z.apex(q), true
	}
	if rest, ok := strings.CutSuffix(name, z.suffix); ok {
		if !z.catalog.synced() {
			return notYet, true // "no such name" would be a lie that resolvers remember
		}
		if strings.Contains(rest, `\`) { // a dot or another byte in a label: no name of the cluster's has that
			return noSuchName, dns.IsSubDomain(z.name, name)
		}
		labels := make([]string, 0, 8)
		for label := range strings.SplitSeq(rest, ".") {
			labels = append(labels, label)
		}
		return z.below(labels, q), true
	}
	if addr, ok := reverse(name); ok {
		return z.reverse(addr, q)
	}
	return answer{}, false
}

func (z *zone) apex(q asked) answer {
	switch q.Qtype {
	case dns.TypeSOA:
		return answer{answer: []dns.RR{z.soa(q.Name)}}
	case dns.TypeNS:
		a := answer{answer: []dns.RR{&dns.NS{Hdr: header(q.Name, dns.TypeNS), Ns: "ns.dns." + z.name}}}
		a.extra = addressRecords("ns.dns."+z.name, z.servers, dns.TypeANY)
		return a
	}
	return noSuchData
}

// below answers names below the zone's; labels are lower case.
func (z *zone) below(labels []string, q asked) answer {
	n := len(labels)
	switch top := labels[n-1]; {
	case top == "svc":
		return z.services(labels[:n-1], q)
	case top == "pod":
		return z.pods(labels[:n-1], q)
	case top == "dns" && n == 1:
		return noSuchData
	case top == "dns" && n == 2 && labels[0] == "ns":
		return answer{addrs: slices.Clone(z.servers)}
	case top == "dns-version" && n == 1:
		if q.Qtype == dns.TypeTXT {
			return answer{answer: []dns.RR{&dns.TXT{Hdr: header(q.Name, dns.TypeTXT), Txt: []string{schemaVersion}}}}
		}
		return noSuchData
	}
	return noSuchName
}

// pods answers ADDRESS.NAMESPACE.pod: the address itself, as the name is in
// use for certificates. Whether a pod has it is not looked at.
func (z *zone) pods(labels []string, q asked) answer {
	switch n := len(labels); {
	case n == 0:
		return noSuchData
	case n > 2 || !z.catalog.hasNamespace(labels[n-1]):
		return noSuchName
	case n == 1:
		return noSuchData
	}
	addr, ok := undashed(labels[0])
	if !ok {
		return noSuchName
	}
	return answer{addrs: []netip.Addr{addr}}
}

// services answers [LABEL.[LABEL.]]SERVICE.NAMESPACE.svc.
func (z *zone) services(labels []string, q asked) answer {
	n := len(labels)
	switch {
	case n == 0:
		return noSuchData
	case n == 1 && z.catalog.hasNamespace(labels[0]):
		return noSuchData
	case n == 1 || n > 4:
		return noSuchName
	}
	s := z.catalog.service(labels[n-1], labels[n-2])
	if s == nil {
		return noSuchName
	}
	if s.Spec.Type == v1.ServiceTypeExternalName {
		if n > 2 {
			return noSuchName
		}
		return external(s.Spec.ExternalName, q)
	}
	switch n {
	case 2:
		return z.service(s, q)
	case 3:
		return z.one(s, labels[0], q)
	}
	return z.ports(s, labels[0], labels[1], q)
}

// external is an alias, unless it is an address in disguise.
func external(target string, q asked) answer {
	if a, err := netip.ParseAddr(target); err == nil {
		return answer{addrs: []netip.Addr{a}}
	}
	if _, ok := dns.IsDomainName(target); !ok || target == "" {
		return noSuchData
	}
	target = dns.Fqdn(target)
	a := answer{answer: []dns.RR{&dns.CNAME{Hdr: header(q.Name, dns.TypeCNAME), Target: target}}}
	if q.Qtype != dns.TypeCNAME {
		a.target = target
	}
	return a
}

// service answers a Service's own name.
func (z *zone) service(s *v1.Service, q asked) answer {
	if q.Qtype == dns.TypeSRV {
		return z.srv(s, q, func(string, v1.Protocol) bool { return true })
	}
	if s.Spec.ClusterIP != v1.ClusterIPNone {
		return answer{addrs: clusterAddrs(s)}
	}
	return answer{addrs: addrsOf(z.catalog.endpoints(s))}
}

// one answers a name below a Service: an endpoint's, or the first part of a
// port's.
func (z *zone) one(s *v1.Service, label string, q asked) answer {
	if proto, ok := strings.CutPrefix(label, "_"); ok {
		for _, p := range s.Spec.Ports {
			if strings.EqualFold(string(p.Protocol), proto) {
				return noSuchData
			}
		}
		return noSuchName
	}
	var found []netip.Addr
	for _, e := range z.catalog.endpoints(s) {
		if e.name == label {
			found = append(found, e.addr)
		}
	}
	if found == nil {
		return noSuchName
	}
	return answer{addrs: found}
}

// ports answers _PORT._PROTOCOL.SERVICE.
func (z *zone) ports(s *v1.Service, port, proto string, q asked) answer {
	port, isPort := strings.CutPrefix(port, "_")
	proto, isProto := strings.CutPrefix(proto, "_")
	if !isPort || !isProto {
		return noSuchName
	}
	want := func(name string, p v1.Protocol) bool {
		return name != "" && strings.EqualFold(name, port) && strings.EqualFold(string(p), proto)
	}
	a := z.srv(s, q, want)
	if len(a.answer) == 0 {
		for _, p := range s.Spec.Ports {
			if want(p.Name, p.Protocol) {
				return noSuchData // headless, and no endpoint is ready
			}
		}
		return noSuchName
	}
	if q.Qtype != dns.TypeSRV {
		return noSuchData
	}
	return a
}

// srv lists the ports that want takes, with the addresses of their targets.
func (z *zone) srv(s *v1.Service, q asked, want func(name string, p v1.Protocol) bool) answer {
	base := s.Name + "." + s.Namespace + ".svc." + z.name
	var a answer
	if s.Spec.ClusterIP != v1.ClusterIPNone {
		for _, p := range s.Spec.Ports {
			if want(p.Name, p.Protocol) {
				a.answer = append(a.answer, &dns.SRV{Hdr: header(q.Name, dns.TypeSRV), Weight: 100, Port: uint16(p.Port), Target: base})
			}
		}
		if len(a.answer) > 0 {
			a.extra = addressRecords(base, clusterAddrs(s), dns.TypeANY)
		}
		return a
	}
	type target struct {
		name string
		port uint16
	}
	seen := map[target]bool{}
	addrs := map[string][]netip.Addr{}
	var targets []target
	for _, e := range z.catalog.endpoints(s) {
		named := false
		for _, ports := range e.ports {
			for i := range ports {
				p := &ports[i]
				if p.Port == nil || !want(ptr.Deref(p.Name, ""), ptr.Deref(p.Protocol, "")) {
					continue
				}
				named = true
				if t := (target{e.name, uint16(*p.Port)}); !seen[t] {
					seen[t] = true
					targets = append(targets, t)
				}
			}
		}
		if named {
			addrs[e.name] = append(addrs[e.name], e.addr)
		}
	}
	weight := uint16(max(1, 100/max(1, len(targets))))
	rand.Shuffle(len(targets), func(i, j int) { targets[i], targets[j] = targets[j], targets[i] })
	// One more than can be sent: so it is seen that some are missing.
	for _, t := range targets[:min(len(targets), q.most+1)] {
		name := t.name + "." + base
		a.answer = append(a.answer, &dns.SRV{Hdr: header(q.Name, dns.TypeSRV), Weight: weight, Port: t.port, Target: name})
		a.extra = append(a.extra, addressRecords(name, addrs[t.name], dns.TypeANY)...)
		delete(addrs, t.name) // once, however many ports it has
	}
	return a
}

// reverse answers who has an address. False: it is none of the cluster's.
func (z *zone) reverse(addr netip.Addr, q asked) (answer, bool) {
	inside := false
	for _, r := range z.ranges() {
		inside = inside || r.Contains(addr)
	}
	if !z.catalog.synced() {
		return notYet, inside
	}
	var names []string
	for _, s := range z.catalog.servicesAt(addr) {
		names = append(names, s.Name+"."+s.Namespace+".svc.")
	}
	if names == nil {
		names = z.catalog.endpointsAt(addr)
	}
	if names == nil {
		return noSuchName, inside
	}
	if q.Qtype != dns.TypePTR {
		return noSuchData, true
	}
	var a answer
	for _, n := range names {
		a.answer = append(a.answer, &dns.PTR{Hdr: header(q.Name, dns.TypePTR), Ptr: n + z.name})
	}
	return a, true
}

// soa is the zone's start of authority; it tells resolvers how long "no" holds.
func (z *zone) soa(owner string) *dns.SOA {
	return &dns.SOA{
		Hdr: header(owner, dns.TypeSOA), Ns: "ns.dns." + z.name, Mbox: "hostmaster." + z.name,
		Serial: soaSerial, Refresh: soaRefresh, Retry: soaRetry, Expire: soaExpire, Minttl: ttl,
	}
}

// What a secondary server would go by: there is none.
const (
	soaSerial  = 1
	soaRefresh = 7200
	soaRetry   = 1800
	soaExpire  = 86400
)

// message is the answer as a reply to req.
func (a answer) message(req *dns.Msg, z *zone) *dns.Msg {
	m := new(dns.Msg).SetRcode(req, a.rcode)
	m.RecursionAvailable = true
	m.Authoritative = a.rcode != dns.RcodeServerFailure
	m.Answer, m.Extra = a.answer, a.extra
	if a.addrs != nil {
		m.Answer = addressRecords(req.Question[0].Name, a.addrs, req.Question[0].Qtype)
	}
	if len(m.Answer) == 0 && m.Authoritative {
		owner := z.name
		if !dns.IsSubDomain(z.name, req.Question[0].Name) {
			owner = dns.Fqdn(req.Question[0].Name) // a reverse name is a zone of its own
		}
		m.Ns = []dns.RR{z.soa(owner)}
	}
	return m
}

func header(name string, kind uint16) dns.RR_Header {
	return dns.RR_Header{Name: name, Rrtype: kind, Class: dns.ClassINET, Ttl: ttl}
}

// addressRecords are the records of the asked type, or of both for ANY, each
// time in another order: many clients take the first.
func addressRecords(name string, addrs []netip.Addr, kind uint16) []dns.RR {
	var out []dns.RR
	for _, a := range addrs {
		switch {
		case a.Is4() && (kind == dns.TypeA || kind == dns.TypeANY):
			out = append(out, &dns.A{Hdr: header(name, dns.TypeA), A: a.AsSlice()})
		case a.Is6() && (kind == dns.TypeAAAA || kind == dns.TypeANY):
			out = append(out, &dns.AAAA{Hdr: header(name, dns.TypeAAAA), AAAA: a.AsSlice()})
		}
	}
	shuffle(out)
	return out
}

func shuffle(rrs []dns.RR) {
	if len(rrs) > 1 {
		rand.Shuffle(len(rrs), func(i, j int) { rrs[i], rrs[j] = rrs[j], rrs[i] })
	}
}

func clusterAddrs(s *v1.Service) []netip.Addr {
	out := make([]netip.Addr, 0, len(s.Spec.ClusterIPs))
	for _, text := range s.Spec.ClusterIPs {
		if a, err := netip.ParseAddr(text); err == nil {
			out = append(out, a)
		}
	}
	return out
}

func addrsOf(list []endpoint) []netip.Addr {
	if len(list) == 0 {
		return nil
	}
	out := make([]netip.Addr, 0, len(list))
	for i := range list {
		if !list[i].again {
			out = append(out, list[i].addr)
		}
	}
	return out
}
