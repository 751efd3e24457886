package nft

import (
	"fmt"
	"net/netip"
	"strings"
)

// Ruleset is all that clusterd wants of the packet filter, as one value. The
// zero value is an empty table.
type Ruleset struct {
	// Forward are ranges whose packets may be forwarded, from and to them.
	// An accept here does not overrule a drop in another program's table.
	Forward []netip.Prefix
	// Masquerade hides ranges behind the node's address.
	Masquerade []Masquerade
}

// Masquerade says that packets from a range leave under the address of the
// interface they go out of, unless they go to one of the excepted ranges.
type Masquerade struct {
	From   netip.Prefix
	Except []netip.Prefix
}

// Text renders the ruleset as nft(8) would take it: for people, logs and
// golden files. It is made of the same rules that Apply sends to the kernel.
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
	return nil
}

// chain is a base chain with its rules in order.
type chain struct {
	name, kind, hook, priority string
	rules                      []rule
}

// rule matches a packet by its addresses and decides about it. An invalid
// prefix matches everything.
type rule struct {
	src, dst netip.Prefix
	verdict  verdict
}

type verdict string

const (
	accept     verdict = "accept"
	leave      verdict = "return"
	masquerade verdict = "masquerade"
)

func (r rule) String() string {
	var words []string
	if r.src.IsValid() {
		words = append(words, family(r.src), "saddr", r.src.String())
	}
	if r.dst.IsValid() {
		words = append(words, family(r.dst), "daddr", r.dst.String())
	}
	return strings.Join(append(words, string(r.verdict)), " ")
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
	for _, m := range r.Masquerade {
		from := m.From.Masked()
		for _, p := range m.Except {
			post.rules = append(post.rules, rule{src: from, dst: p.Masked(), verdict: leave})
		}
		post.rules = append(post.rules, rule{src: from, verdict: masquerade})
	}
	return []chain{forward, post}
}
