// Package policy decides which packets between addresses pass, with nftables
// sets: what a packet meets does not depend on how many addresses there are,
// and a change of one address is a change of a few elements. It takes plain
// values and knows no NetworkPolicy.
//
// It judges what the node forwards, after Services have been translated: the
// node's own packets are not judged, nor answers. Every packet of a
// connection's first direction is judged, so that a change holds for
// connections that are there already.
package policy

import (
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"

	"github.com/clusterd/clusterd/netsetup/nft"
)

// TableName is the nftables table of this package, in the inet family.
const TableName = "clusterd_policy"

// priority is after all tables that only let pass, and before none that counts
// on it.
const priority = 10

// Direction of a connection, as its isolated end sees it.
type Direction int

// The directions.
const (
	Ingress Direction = iota
	Egress
)

func (d Direction) String() string { return [...]string{"in", "out"}[d] }

// Port is a range of ports of a protocol; the zero one is every packet.
type Port struct {
	Proto       nft.Protocol
	First, Last uint16 // 0 to 65535: all
}

// Target is one port of one address.
type Target struct {
	Addr  netip.Addr
	Proto nft.Protocol
	Port  uint16
}

// Rule lets connections pass: those with one of the peers, to one of the ports.
type Rule struct {
	// AnyPeer: all peers. Else Peers and Blocks count, perhaps none.
	AnyPeer bool
	Peers   []netip.Addr
	Blocks  []netip.Prefix
	// Except is taken out of the block of the same index.
	Except map[int][]netip.Prefix
	// AnyPort: every packet, of whatever protocol. Else Ports and Targets.
	AnyPort bool
	Ports   []Port
	// Targets are what a port's name stands for: it may be another number on
	// each address.
	Targets []Target
}

// Group is one list of rules and the addresses that it isolates: what none of
// the rules lets pass is dropped.
type Group struct {
	// Name is unique and says what the rules are made of: a group that keeps its
	// name is altered, not recreated. At most 100 bytes, letters, digits and "-".
	Name      string
	Direction Direction
	Addrs     []netip.Addr
	Rules     []Rule
}

// family is one of the two sets of sets.
type family struct {
	suffix       string
	typ          nft.Type
	saddr, daddr nft.Field
	is           nft.Stmt
}

var families = []family{
	{"4", nft.IPv4, nft.Saddr4, nft.Daddr4, nft.Family4},
	{"6", nft.IPv6, nft.Saddr6, nft.Daddr6, nft.Family6},
}

func suffix(a netip.Addr) string {
	if a.Is4() {
		return "4"
	}
	return "6"
}

// Compile is the whole table. Pure: the same groups in the same order give the
// same table. Sets are the same whatever the groups, so that a change is one of
// elements and of rules.
func Compile(groups []Group) nft.Table {
	sets := map[string]nft.Elements{}
	put := func(set, key, data string) {
		if sets[set] == nil {
			sets[set] = nft.Elements{}
		}
		sets[set][key] = data
	}
	var chains []nft.Chain
	used := map[uint32]bool{}
	for _, g := range groups {
		chain := nft.Chain{Name: g.Direction.String() + "-" + g.Name}
		for _, a := range g.Addrs {
			put(g.Direction.String()+suffix(a), nft.Key(a), nft.GotoChain(chain.Name))
			put("self"+suffix(a), nft.Key(a, a), "")
		}
		for i, r := range g.Rules {
			chain.Rules = append(chain.Rules, compileRule(g.Direction, number(used, chain.Name, i), r, put)...)
		}
		chain.Rules = append(chain.Rules, nft.Rule{nft.DropPacket})
		chains = append(chains, chain)
	}
	t := nft.Table{Name: TableName}
	for _, f := range families {
		for _, s := range []nft.Set{
			{Name: "out", Key: []nft.Type{f.typ}, Data: []nft.Type{nft.Verdict}},
			{Name: "in", Key: []nft.Type{f.typ}, Data: []nft.Type{nft.Verdict}},
			{Name: "self", Key: []nft.Type{f.typ, f.typ}},
			{Name: "peers", Key: []nft.Type{nft.Number, f.typ}},
			{Name: "blocks", Key: []nft.Type{nft.Number, f.typ}, Interval: true},
			{Name: "targets", Key: []nft.Type{nft.Number, f.typ, nft.Proto, nft.Port}},
		} {
			s.Name += f.suffix
			s.Elements = sets[s.Name]
			t.Sets = append(t.Sets, s)
		}
	}
	t.Sets = append(t.Sets, nft.Set{Name: "ports", Key: []nft.Type{nft.Number, nft.Proto, nft.Port}, Interval: true, Elements: sets["ports"]})
	t.Chains = append(t.Chains, chains...)
	judge := nft.Chain{Name: "forward", Type: "filter", Hook: "forward", Priority: priority, Rules: []nft.Rule{{nft.Answers, nft.Accept}, {nft.Related, nft.Accept}}}
	// Two chains: leaving one by "return" goes on with the other's verdict map.
	for _, d := range []Direction{Egress, Ingress} {
		var rules []nft.Rule
		for _, f := range families {
			addr := f.saddr
			if d == Ingress {
				addr = f.daddr
			}
			rules = append(rules, nft.Rule{f.is, nft.In("self"+f.suffix, f.saddr, f.daddr), nft.Return}, nft.Rule{f.is, nft.VerdictMap(d.String()+f.suffix, addr)})
		}
		t.Chains = append(t.Chains, nft.Chain{Name: d.String(), Rules: rules})
		judge.Rules = append(judge.Rules, nft.Rule{nft.Jump(d.String())})
	}
	t.Chains = append(t.Chains, judge)
	return t
}

// number is a rule's in the keys of the sets: mostly the same when other groups
// come and go, and never another rule's.
func number(used map[uint32]bool, chain string, i int) uint32 {
	h := fnv.New32a()
	fmt.Fprintf(h, "%s/%d", chain, i)
	id := h.Sum32()
	for used[id] {
		id++
	}
	used[id] = true
	return id
}

// compileRule gives the rules in the kernel's sense, with the rule's number in
// the keys of the sets they ask.
func compileRule(d Direction, id uint32, r Rule, put func(set, key, data string)) []nft.Rule {
	var ports [][]nft.Stmt
	switch {
	case r.AnyPort:
		ports = [][]nft.Stmt{nil}
	default:
		if len(r.Ports) > 0 {
			for _, p := range mergePorts(r.Ports) {
				put("ports", nft.Key(id, p.Proto, p.First)+nft.Key(id, p.Proto, p.Last), "")
			}
			ports = append(ports, []nft.Stmt{nft.In("ports", nft.ConstNumber(id), nft.L4Proto, nft.Dport)})
		}
		for _, f := range families {
			some := false
			for _, t := range r.Targets {
				if suffix(t.Addr) == f.suffix {
					put("targets"+f.suffix, nft.Key(id, t.Addr, t.Proto, t.Port), "")
					some = true
				}
			}
			if some {
				ports = append(ports, []nft.Stmt{f.is, nft.In("targets"+f.suffix, nft.ConstNumber(id), f.daddr, nft.L4Proto, nft.Dport)})
			}
		}
	}
	var peers [][]nft.Stmt
	if r.AnyPeer {
		peers = [][]nft.Stmt{nil}
	} else {
		for _, f := range families {
			addr := f.saddr
			if d == Egress {
				addr = f.daddr
			}
			some := false
			for _, a := range r.Peers {
				if suffix(a) == f.suffix {
					put("peers"+f.suffix, nft.Key(id, a), "")
					some = true
				}
			}
			if some {
				peers = append(peers, []nft.Stmt{f.is, nft.In("peers"+f.suffix, nft.ConstNumber(id), addr)})
			}
			blocks := r.ranges(f)
			for _, b := range blocks {
				put("blocks"+f.suffix, nft.Key(id, b.first)+nft.Key(id, b.last), "")
			}
			if len(blocks) > 0 {
				peers = append(peers, []nft.Stmt{f.is, nft.In("blocks"+f.suffix, nft.ConstNumber(id), addr)})
			}
		}
	}
	var out []nft.Rule
	for _, who := range peers {
		for _, what := range ports {
			out = append(out, slices.Concat(who, what, []nft.Stmt{nft.Return}))
		}
	}
	return out
}

// mergePorts makes ranges of one protocol that touch or overlap one.
func mergePorts(ports []Port) []Port {
	byProto := map[nft.Protocol][]Port{}
	for _, p := range ports {
		byProto[p.Proto] = append(byProto[p.Proto], p)
	}
	var out []Port
	for _, proto := range slices.Sorted(maps.Keys(byProto)) {
		list := byProto[proto]
		slices.SortFunc(list, func(a, b Port) int { return int(a.First) - int(b.First) })
		last := list[0]
		for _, p := range list[1:] {
			if int(p.First) <= int(last.Last)+1 {
				last.Last = max(last.Last, p.Last)
				continue
			}
			out = append(out, last)
			last = p
		}
		out = append(out, last)
	}
	return out
}

// span is a range of addresses, both ends in it.
type span struct{ first, last netip.Addr }

// ranges are the rule's blocks of a family without what is excepted, in order
// and apart from each other: the kernel's set takes no overlaps.
func (r Rule) ranges(f family) []span {
	var all []span
	for i, block := range r.Blocks {
		if suffix(block.Addr()) != f.suffix {
			continue
		}
		var holes []span
		for _, e := range r.Except[i] {
			holes = append(holes, spanOf(e))
		}
		all = append(all, subtract(spanOf(block), merge(holes))...)
	}
	return merge(all)
}

func spanOf(p netip.Prefix) span {
	p = p.Masked()
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	last, _ := netip.AddrFromSlice(b)
	return span{p.Addr(), last}
}

// merge sorts spans and makes those that touch or overlap one.
func merge(spans []span) []span {
	slices.SortFunc(spans, func(a, b span) int { return a.first.Compare(b.first) })
	var out []span
	for _, s := range spans {
		if n := len(out); n > 0 {
			last := &out[n-1].last
			if next := last.Next(); !next.IsValid() || s.first.Compare(next) <= 0 {
				if s.last.Compare(*last) > 0 {
					*last = s.last
				}
				continue
			}
		}
		out = append(out, s)
	}
	return out
}

// subtract takes holes, merged, out of s.
func subtract(s span, holes []span) []span {
	var out []span
	for _, h := range holes {
		if h.last.Compare(s.first) < 0 || h.first.Compare(s.last) > 0 {
			continue
		}
		if h.first.Compare(s.first) > 0 {
			out = append(out, span{s.first, h.first.Prev()})
		}
		next := h.last.Next()
		if !next.IsValid() || next.Compare(s.last) > 0 {
			return out
		}
		s.first = next
	}
	return append(out, s)
}
