// Package lb spreads connections to virtual addresses over endpoints, with
// nftables maps: the number of rules a packet meets does not depend on how many
// addresses there are, and a change of one endpoint is a change of a few
// elements. It takes plain values and knows no Service.
//
// The path of a connection: its address, protocol and port lead to a class, which
// says how many endpoints there are and how they are chosen; all addresses of a
// class share one chain, which draws a number and asks one map for the endpoint
// of that address and number.
package lb

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/clusterd/clusterd/netsetup/nft"
)

// TableName is the nftables table of this package, in the inet family.
const TableName = "clusterd_services"

// MarkHide is the bit of a packet's mark that this package uses, from one hook
// to the next, for what is to leave under the node's address.
const MarkHide = 0x4000

// Frontend is an address that connections are made to.
type Frontend struct {
	// Addr; unspecified (0.0.0.0 or ::): every address of the node but its
	// loopback.
	Addr  netip.Addr
	Proto nft.Protocol
	Port  uint16 // not 0
}

func (f Frontend) String() string {
	return fmt.Sprintf("%s %s", f.Proto, netip.AddrPortFrom(f.Addr, f.Port))
}

// key is the frontend's, of sets of address, protocol and port.
func (f Frontend) key() string { return nft.Key(f.Addr, f.Proto, f.Port) }

// everywhere: it is a port of the node.
func (f Frontend) everywhere() bool { return f.Addr.IsUnspecified() }

// Endpoint is where a connection goes.
type Endpoint struct {
	Addr netip.AddrPort
	// Own: it is behind this node, and may ask itself through a Frontend.
	Own bool
}

// Backend is what is behind a Frontend.
type Backend struct {
	// Endpoints for all who ask; none: they are refused.
	Endpoints []Endpoint
	// Silent drops instead of refusing.
	Silent bool
	// Local: connections from outside go to Near alone, with the client's
	// address, and are dropped when there is none.
	Local bool
	Near  []Endpoint
	// Affinity sends a client to the endpoint it had before, if that was not
	// longer ago; 0: no.
	Affinity time.Duration
	// Sources are the only clients from other machines; none: all.
	Sources []netip.Prefix
	// Virtual: no machine has the address for itself, so that its other ports
	// are refused. Not with an unspecified address.
	Virtual bool
}

// Base is what does not belong to one frontend.
type Base struct {
	// Inside are the ranges whose packets come back by themselves: pods'.
	// All others' are hidden behind the node's address.
	Inside []netip.Prefix
	// Ranges hold frontends and nothing else: what is not one is refused.
	Ranges []netip.Prefix

	clients uint32 // that are remembered of each family; 0: affinityElements
}

// family is one of the two sets of sets and chains.
type family struct {
	suffix       string
	typ          nft.Type
	saddr, daddr nft.Field
	is           nft.Stmt
	any          netip.Addr
}

var families = []family{
	{"4", nft.IPv4, nft.Saddr4, nft.Daddr4, nft.Family4, netip.IPv4Unspecified()},
	{"6", nft.IPv6, nft.Saddr6, nft.Daddr6, nft.Family6, netip.IPv6Unspecified()},
}

func familyOf(a netip.Addr) family {
	if a.Is4() {
		return families[0]
	}
	return families[1]
}

func (f family) has(p netip.Prefix) bool { return p.Addr().Is4() == (f.typ == nft.IPv4) }

// path is one of the four ways to a frontend.
type path struct {
	name    string // of its map of classes
	outside bool   // for those outside, of frontends that keep their address
	ports   bool   // by a port of the node
}

var paths = []path{{"services", false, false}, {"ports", false, true}, {"outside", true, false}, {"outside_ports", true, true}}

func pathOf(f Frontend, outside bool) path {
	for _, p := range paths {
		if p.outside == outside && p.ports == f.everywhere() {
			return p
		}
	}
	panic("lb: no such path")
}

func (p path) scope() uint32 {
	if p.outside {
		return 1
	}
	return 0
}

// class says how the connections to a frontend are spread: 14 bits of how many
// endpoints, one bit whether strangers are hidden, 17 bits of seconds of
// affinity. Without endpoints they are dropped.
type class uint32

// MaxEndpoints is how many endpoints of one frontend get connections.
const MaxEndpoints = 1<<14 - 1

const maxAffinity = 1<<17 - 1

func classOf(endpoints int, affinity time.Duration, hide bool) class {
	c := class(min(endpoints, MaxEndpoints)) | class(min(int64(affinity/time.Second), maxAffinity))<<15
	if hide && endpoints > 0 {
		c |= 1 << 14
	}
	if endpoints == 0 {
		return 0
	}
	return c
}

func (c class) endpoints() uint32       { return uint32(c) & MaxEndpoints }
func (c class) hides() bool             { return c&(1<<14) != 0 }
func (c class) affinity() time.Duration { return time.Duration(c>>15) * time.Second }

// classKey names a class's chain.
type classKey struct {
	family string
	path   path
	class  class
}

func (k classKey) chain() string {
	name := fmt.Sprintf("%s%s-%d", k.path.name, k.family, k.class.endpoints())
	if a := k.class.affinity(); a > 0 {
		name += fmt.Sprintf("-for%d", int(a.Seconds()))
	}
	if k.class.hides() {
		name += "-hide"
	}
	return name
}

func (k classKey) verdict() string {
	if k.class == 0 {
		return nft.Drop
	}
	return nft.GotoChain(k.chain())
}

// rules of the class's chain.
func (k classKey) rules() []nft.Rule {
	var f family
	for _, f = range families {
		if f.suffix == k.family {
			break
		}
	}
	daddr := f.daddr
	if k.path.ports {
		daddr = nft.Const(f.any)
	}
	var out []nft.Rule
	if k.class.hides() {
		out = append(out, nft.Rule{nft.Jump("hide" + f.suffix)})
	}
	var remember *nft.Remember
	if a := k.class.affinity(); a > 0 {
		remember = &nft.Remember{Set: affinitySet + f.suffix, Key: []nft.Field{f.saddr, daddr, nft.L4Proto, nft.Dport}, Timeout: a}
		out = append(out, nft.Rule{nft.DNATRemembered(f.typ, *remember)})
	}
	fields := []nft.Field{daddr, nft.L4Proto, nft.Dport, nft.ConstNumber(k.path.scope()), nft.Random(k.class.endpoints())}
	choose := func(r *nft.Remember) nft.Rule { return nft.Rule{nft.DNATTo("endpoints"+f.suffix, fields, f.typ, r)} }
	if remember != nil {
		// It ends before its DNAT when the set is full: then the client gets an endpoint
		// that is not remembered.
		out = append(out, choose(remember))
	}
	return append(out, choose(nil))
}

// element of a set.
type element struct{ set, key, data string }

// contribution is what one frontend adds to the table.
type contribution struct {
	elements []element
	classes  []classKey
	own      []netip.Addr // endpoints that may meet themselves
	virtual  netip.Addr
}

// contribute is pure: a frontend's part of the table depends on nothing else.
func contribute(f Frontend, b Backend) contribution {
	var c contribution
	fam := familyOf(f.Addr)
	put := func(set, key, data string) {
		c.elements = append(c.elements, element{set + fam.suffix, key, data})
	}
	full := f.key()
	short := full
	if f.everywhere() {
		short = nft.Key(f.Proto, f.Port)
	}
	lead := func(outside bool, endpoints []Endpoint, hide bool) {
		p := pathOf(f, outside)
		if len(endpoints) > MaxEndpoints {
			endpoints = endpoints[:MaxEndpoints]
		}
		k := classKey{fam.suffix, p, classOf(len(endpoints), b.Affinity, hide)}
		c.classes = append(c.classes, k)
		put(p.name, short, nft.Key(uint32(k.class)))
		for i, e := range endpoints {
			put("endpoints", full+nft.Key(p.scope(), uint32(i)), nft.Key(e.Addr.Addr(), e.Addr.Port()))
			if e.Own {
				c.own = append(c.own, e.Addr.Addr())
			}
		}
	}
	switch {
	case len(b.Endpoints) > 0 || b.Silent:
		lead(false, b.Endpoints, true)
	case !f.everywhere():
		put("refused", full, "")
	}
	if b.Local && len(b.Endpoints) > 0 {
		lead(true, b.Near, false)
	}
	if !f.everywhere() {
		if b.Virtual {
			c.virtual = f.Addr
		}
		if len(b.Sources) > 0 {
			put("ranged", full, "")
		}
		for _, p := range merge(b.Sources, fam) {
			put("allowed", full+nft.Key(p.Addr())+full+nft.Key(last(p)), "")
		}
	}
	return c
}

// merge drops ranges of the other family and those within others: the kernel's
// set takes no overlaps.
func merge(ranges []netip.Prefix, f family) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range slices.SortedFunc(slices.Values(ranges), comparePrefix) {
		p = p.Masked()
		if f.has(p) && !slices.ContainsFunc(out, func(q netip.Prefix) bool { return q.Overlaps(p) }) {
			out = append(out, p)
		}
	}
	return out
}

// comparePrefix puts the wider of two ranges first.
func comparePrefix(a, b netip.Prefix) int {
	return cmp.Or(cmp.Compare(a.Bits(), b.Bits()), a.Addr().Compare(b.Addr()))
}

// last address of a range.
func last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// affinitySet holds which client has which endpoint.
const affinitySet = "affinity"

// affinityElements bounds how many clients are remembered: what a flood of
// clients can take of the kernel's memory. Those beyond are served and not
// remembered.
const affinityElements = 1 << 18

// skeleton is the table without frontends. Pure.
func skeleton(base Base) nft.Table {
	t := nft.Table{Name: TableName}
	for _, f := range families {
		full := []nft.Type{f.typ, nft.Proto, nft.Port}
		short := []nft.Type{nft.Proto, nft.Port}
		set := func(s nft.Set) {
			s.Name += f.suffix
			t.Sets = append(t.Sets, s)
		}
		set(nft.Set{Name: "endpoints", Key: append(slices.Clone(full), nft.Number, nft.Number), Data: []nft.Type{f.typ, nft.Port}})
		for _, p := range paths {
			key := full
			if p.ports {
				key = short
			}
			set(nft.Set{Name: p.name, Key: key, Data: []nft.Type{nft.Number}})
			set(nft.Set{Name: "class_" + p.name, Key: []nft.Type{nft.Number}, Data: []nft.Type{nft.Verdict}})
		}
		set(nft.Set{Name: "refused", Key: full})
		set(nft.Set{Name: "ranged", Key: full})
		set(nft.Set{Name: "allowed", Key: append(slices.Clone(full), f.typ), Interval: true})
		set(nft.Set{Name: "hairpin", Key: []nft.Type{f.typ, f.typ}})
		set(nft.Set{Name: "virtual", Key: []nft.Type{f.typ}})
		set(nft.Set{Name: affinitySet, Key: []nft.Type{f.typ, f.typ, nft.Proto, nft.Port}, Data: []nft.Type{f.typ, nft.Port}, Dynamic: true, Size: cmp.Or(base.clients, affinityElements)})
	}
	t.Chains = append(t.Chains, nft.Chain{Name: "refuse", Rules: []nft.Rule{{nft.ProtoIs(tcp), nft.RefuseTCP}, {nft.Refuse}}})
	for _, f := range families {
		t.Chains = append(t.Chains, familyChains(f, base)...)
	}
	both := func(prefix string) []nft.Rule {
		return []nft.Rule{{families[0].is, nft.Goto(prefix + "4")}, {families[1].is, nft.Goto(prefix + "6")}}
	}
	const beforeDNAT, dstnat, srcnat = -110, -100, 100
	t.Chains = append(t.Chains,
		nft.Chain{Name: "admit", Type: "filter", Hook: "prerouting", Priority: beforeDNAT, Rules: append([]nft.Rule{{nft.Started, nft.Return}}, both("source")...)},
		nft.Chain{Name: "admit_own", Type: "filter", Hook: "output", Priority: beforeDNAT, Rules: append([]nft.Rule{{nft.Started, nft.Return}}, both("known")...)},
		nft.Chain{Name: "prerouting", Type: "nat", Hook: "prerouting", Priority: dstnat, Rules: both("comes")},
		nft.Chain{Name: "output", Type: "nat", Hook: "output", Priority: dstnat, Rules: both("inside")},
		nft.Chain{Name: "postrouting", Type: "nat", Hook: "postrouting", Priority: srcnat, Rules: []nft.Rule{
			{nft.Marked(MarkHide), nft.Unmark(MarkHide), nft.Hide},
			{families[0].is, nft.In("hairpin4", nft.Saddr4, nft.Daddr4), nft.Hide},
			{families[1].is, nft.In("hairpin6", nft.Saddr6, nft.Daddr6), nft.Hide},
		}})
	return t
}

var (
	tcp, _   = nft.ParseProtocol("tcp")
	udp, _   = nft.ParseProtocol("udp")
	sctp, _  = nft.ParseProtocol("sctp")
	loopback = map[nft.Type]netip.Prefix{nft.IPv4: netip.MustParsePrefix("127.0.0.0/8"), nft.IPv6: netip.MustParsePrefix("::1/128")}
)

func familyChains(f family, base Base) []nft.Chain {
	full := []nft.Field{f.daddr, nft.L4Proto, nft.Dport}
	short := []nft.Field{nft.L4Proto, nft.Dport}
	name := func(s string) string { return s + f.suffix }
	choose := func(p path, fields ...nft.Field) nft.Stmt {
		return nft.Choose(name(p.name), name("class_"+p.name), fields...)
	}
	// source: may this client ask? known: is there such a frontend?
	known := nft.Chain{Name: name("known"), Rules: []nft.Rule{
		{nft.Found(name("services"), full...), nft.Return},
		{nft.In(name("refused"), full...), nft.Goto("refuse")},
	}}
	for _, p := range []nft.Protocol{tcp, udp, sctp} { // a virtual address may be pinged
		known.Rules = append(known.Rules, nft.Rule{nft.ProtoIs(p), nft.In(name("virtual"), f.daddr), nft.Goto("refuse")})
	}
	hide := nft.Chain{Name: name("hide")}
	comes := nft.Chain{Name: name("comes")}
	for _, p := range merge(base.Inside, f) {
		hide.Rules = append(hide.Rules, nft.Rule{nft.From(p), nft.Return})
		comes.Rules = append(comes.Rules, nft.Rule{nft.From(p), nft.Goto(name("inside"))})
	}
	hide.Rules = append(hide.Rules, nft.Rule{nft.Mark(MarkHide)})
	comes.Rules = append(comes.Rules,
		nft.Rule{choose(paths[2], full...)},
		nft.Rule{nft.ToLocal, choose(paths[3], short...)},
		nft.Rule{nft.Goto(name("inside"))})
	// The node may have an address of the range for itself: cluster DNS.
	known.Rules = append(known.Rules, nft.Rule{nft.ToLocal, nft.Return})
	for _, p := range merge(base.Ranges, f) {
		known.Rules = append(known.Rules, nft.Rule{nft.To(p), nft.Goto("refuse")})
	}
	return []nft.Chain{
		known,
		{Name: name("source"), Rules: []nft.Rule{
			{nft.In(name("ranged"), full...), nft.NotIn(name("allowed"), append(slices.Clone(full), f.saddr)...), nft.DropPacket},
			{nft.Goto(name("known"))},
		}},
		hide,
		{Name: name("inside"), Rules: []nft.Rule{
			{choose(paths[0], full...)},
			{nft.To(loopback[f.typ]), nft.Return},
			{nft.ToLocal, choose(paths[1], short...)},
		}},
		comes,
	}
}

// Compile is the whole table. Pure.
func Compile(base Base, frontends map[Frontend]Backend) nft.Table {
	t := skeleton(base)
	sets := map[string]nft.Elements{}
	put := func(set, key, data string) {
		if sets[set] == nil {
			sets[set] = nft.Elements{}
		}
		sets[set][key] = data
	}
	classes := map[classKey]bool{}
	for f, b := range frontends {
		c := contribute(f, b)
		for _, e := range c.elements {
			put(e.set, e.key, e.data)
		}
		for _, k := range c.classes {
			classes[k] = true
		}
		for _, a := range c.own {
			put(hairpin(a))
		}
		if c.virtual.IsValid() {
			put(virtual(c.virtual))
		}
	}
	var chains []nft.Chain
	for _, k := range slices.SortedFunc(maps.Keys(classes), func(a, b classKey) int { return cmp.Compare(a.chain(), b.chain()) }) {
		put(k.element())
		if k.class != 0 {
			chains = append(chains, k.nftChain())
		}
	}
	t.Chains = append(chains, t.Chains...)
	// A class's chain jumps to "hide", which is made with all others before the
	// first rule is.
	for i, s := range t.Sets {
		t.Sets[i].Elements = sets[s.Name]
	}
	return t
}

func (k classKey) nftChain() nft.Chain { return nft.Chain{Name: k.chain(), Rules: k.rules()} }

func (k classKey) element() (set, key, data string) {
	return "class_" + k.path.name + k.family, nft.Key(uint32(k.class)), k.verdict()
}

func hairpin(a netip.Addr) (set, key, data string) {
	return "hairpin" + familyOf(a).suffix, nft.Key(a, a), ""
}

func virtual(a netip.Addr) (set, key, data string) {
	return "virtual" + familyOf(a).suffix, nft.Key(a), ""
}
