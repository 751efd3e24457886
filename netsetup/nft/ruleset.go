package nft

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Ruleset is all that clusterd wants of the packet filter, as one value. The
// zero value is an empty table.
type Ruleset struct {
	// Forward are ranges whose packets may be forwarded, from and to them.
	// An accept here does not overrule a drop in another program's table.
	Forward []netip.Prefix
	// Masquerade hides ranges behind the node's address.
	Masquerade []Masquerade
	// Publish makes ports of the node lead to addresses of Inside.
	Publish []Publish
	// Inside is where the targets of Publish are; required with it.
	Inside Inside
}

// Publish sends what comes to a port of the node on to another address.
type Publish struct {
	Protocol string // "tcp", "udp" or "sctp"
	// Addr is the address of the node; invalid: every one it has.
	Addr netip.Addr
	Port uint16
	To   netip.AddrPort
}

// Inside are ranges of addresses behind an interface of the node, one of each
// family at most.
type Inside struct {
	Ranges    []netip.Prefix
	Interface string
}

// Contains reports whether an address is of one of the ranges.
func (i Inside) Contains(a netip.Addr) bool {
	return slices.ContainsFunc(i.Ranges, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Masquerade says that packets from a range leave under the address of the
// interface they go out of, unless they go to one of the excepted ranges.
type Masquerade struct {
	From   netip.Prefix
	Except []netip.Prefix
}

// Text renders the ruleset as nft(8) would take it: for people, logs and
// golden files. It is made of the same rules as Table.
func (r Ruleset) Text(table string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "table inet %s {\n", table)
	for i, c := range compile(r) {
		if i > 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "\tchain %s {\n\t\ttype %s hook %s priority %s; policy accept;\n", c.name, c.kind, c.hook, c.priority)
		for _, rule := range c.rules {
			fmt.Fprintf(&b, "\t\t%s\n", rule)
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\n")
	return b.String()
}

// Table is the ruleset as a table, for a Keeper. It refuses what cannot be turned
// into rules.
func (r Ruleset) Table(name string) (Table, error) {
	if err := r.check(); err != nil {
		return Table{}, err
	}
	t := Table{Name: name}
	for _, c := range compile(r) {
		k := Chain{Name: c.name, Type: c.kind, Hook: c.hook, Priority: priorities[c.priority]}
		for _, rule := range c.rules {
			k.Rules = append(k.Rules, Rule{{rule.String(), rule.exprs()}})
		}
		t.Chains = append(t.Chains, k)
	}
	return t, nil
}

// priorities by their names in nft(8).
var priorities = map[string]int{"raw": -300, "dstnat": -100, "filter": 0, "srcnat": 100}

// check refuses what cannot be turned into rules.
func (r Ruleset) check() error {
	for _, p := range r.Forward {
		if !p.IsValid() {
			return fmt.Errorf("ruleset: forward: invalid range %q", p)
		}
	}
	for _, m := range r.Masquerade {
		for _, p := range append([]netip.Prefix{m.From}, m.Except...) {
			if !p.IsValid() || p.Addr().Is4() != m.From.Addr().Is4() {
				return fmt.Errorf("ruleset: masquerade %s: invalid range %q", m.From, p)
			}
		}
	}
	for _, p := range r.Publish {
		if protocols[p.Protocol] == 0 || p.Port == 0 || p.To.Port() == 0 || !r.Inside.Contains(p.To.Addr()) {
			return fmt.Errorf("ruleset: publish %s port %d to %s: a protocol, two ports and a target in %s are required", p.Protocol, p.Port, p.To, r.Inside.Ranges)
		}
		if p.Addr.IsValid() && p.Addr.Is4() != p.To.Addr().Is4() {
			return fmt.Errorf("ruleset: publish %s: its target %s is of another family", p.Addr, p.To)
		}
	}
	if len(r.Publish) > 0 && r.Inside.Interface == "" || len(r.Inside.Interface) >= unix.IFNAMSIZ {
		return fmt.Errorf("ruleset: invalid interface %q", r.Inside.Interface)
	}
	return nil
}

// protocols are those with ports, by their numbers.
var protocols = map[string]byte{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP}

// chain is a base chain with its rules in order.
type chain struct {
	name, kind, hook, priority string
	rules                      []rule
}

// rule matches a packet and decides about it. What is left empty matches
// everything.
type rule struct {
	iif      string // interface it came in by
	src, dst netip.Prefix
	local    bool   // it is for an address of the node's own
	protocol string // with port: what it is for
	port     uint16
	dnatted  bool // its destination was changed by a rule of ours
	verdict  verdict
	to       netip.AddrPort // of dnat
}

type verdict string

const (
	accept     verdict = "accept"
	leave      verdict = "return"
	masquerade verdict = "masquerade"
	drop       verdict = "drop"
	dnat       verdict = "dnat"
)

func (r rule) String() string {
	var words []string
	if r.iif != "" {
		words = append(words, "iifname", strconv.Quote(r.iif))
	}
	if r.src.IsValid() {
		words = append(words, family(r.src), "saddr", r.src.String())
	}
	if r.dst.IsValid() {
		words = append(words, family(r.dst), "daddr", r.dst.String())
	}
	if r.local {
		words = append(words, "fib daddr type local")
	}
	if r.protocol != "" {
		words = append(words, r.protocol, "dport", strconv.Itoa(int(r.port)))
	}
	if r.dnatted {
		words = append(words, "ct status dnat")
	}
	words = append(words, string(r.verdict))
	if r.verdict == dnat {
		kind := "ip"
		if r.to.Addr().Is6() {
			kind = "ip6"
		}
		words = append(words, kind, "to", r.to.String())
	}
	return strings.Join(words, " ")
}

func family(p netip.Prefix) string {
	if p.Addr().Is4() {
		return "ip"
	}
	return "ip6"
}

// compile turns the values into chains. It is pure: the order of the rules is
// that of the input.
func compile(r Ruleset) []chain {
	forward := chain{name: "forward", kind: "filter", hook: "forward", priority: "filter"}
	for _, p := range r.Forward {
		p = p.Masked()
		forward.rules = append(forward.rules, rule{src: p, verdict: accept}, rule{dst: p, verdict: accept})
	}
	post := chain{name: "postrouting", kind: "nat", hook: "postrouting", priority: "srcnat"}
	published := publish(r)
	if len(published) > 0 {
		// One of Inside that asks itself by a port of the node would not take its
		// own address for a stranger's, nor the node's loopback for anyone's.
		for _, p := range r.Inside.Ranges {
			if p.Addr().Is4() {
				post.rules = append(post.rules, rule{src: loopback, dst: p.Masked(), dnatted: true, verdict: masquerade})
			}
		}
		seen := map[netip.Addr]bool{}
		for _, p := range r.Publish {
			if to := p.To.Addr(); !seen[to] {
				seen[to] = true
				alone := netip.PrefixFrom(to, to.BitLen())
				post.rules = append(post.rules, rule{src: alone, dst: alone, dnatted: true, verdict: masquerade})
			}
		}
	}
	for _, m := range r.Masquerade {
		from := m.From.Masked()
		for _, p := range m.Except {
			post.rules = append(post.rules, rule{src: from, dst: p.Masked(), verdict: leave})
		}
		post.rules = append(post.rules, rule{src: from, verdict: masquerade})
	}
	return append(append(guard(r.Inside), published...), forward, post)
}

// guard keeps what is inside from the node's loopback. For that to lead to published
// ports the inner interface takes packets of such addresses (route_localnet), from when
// the first port is published to when the interface goes; no program inside may use
// that (CVE-2020-8558). It is in force before, and stays. Answers are still addressed to
// the node here.
func guard(inside Inside) []chain {
	if inside.Interface == "" {
		return nil
	}
	return []chain{{name: "guard", kind: "filter", hook: "prerouting", priority: "raw",
		rules: []rule{{iif: inside.Interface, dst: loopback, verdict: drop}}}}
}

var (
	loopback  = netip.MustParsePrefix("127.0.0.0/8")
	loopback6 = netip.MustParsePrefix("::1/128")
)

// publish are the chains of published ports: none without one.
func publish(r Ruleset) []chain {
	if len(r.Publish) == 0 {
		return nil
	}
	pre := chain{name: "prerouting", kind: "nat", hook: "prerouting", priority: "dstnat"}
	out := chain{name: "output", kind: "nat", hook: "output", priority: "dstnat"}
	if slices.ContainsFunc(r.Publish, func(p Publish) bool { return p.To.Addr().Is6() }) {
		// A packet from ::1 gets no further than the loopback: it is refused at once.
		out.rules = append(out.rules, rule{dst: loopback6, verdict: leave})
	}
	for _, p := range r.Publish {
		to := rule{protocol: p.Protocol, port: p.Port, verdict: dnat, to: p.To, local: !p.Addr.IsValid()}
		if p.Addr.IsValid() {
			to.dst = netip.PrefixFrom(p.Addr, p.Addr.BitLen())
		}
		pre.rules, out.rules = append(pre.rules, to), append(out.rules, to)
	}
	return []chain{pre, out}
}
