package nft

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Family of a table: which packets its chains see.
type Family string

// The families.
const (
	Inet   Family = ""       // IP packets of both versions
	Bridge Family = "bridge" // frames that pass a bridge
)

// String is the family by its name in nft(8).
func (f Family) String() string {
	if f == Inet {
		return "inet"
	}
	return string(f)
}

// Table is a whole table as one value: sets and maps, whose elements may change
// often, and chains, which rarely do. Sets are added in their order, chains too:
// what a rule names must come before it.
type Table struct {
	Name   string
	Family Family
	Sets   []Set
	Chains []Chain
}

// Type of a part of a set's key or data.
type Type string

// The types, by their names in nft(8).
const (
	IPv4    Type = "ipv4_addr"
	IPv6    Type = "ipv6_addr"
	Proto   Type = "inet_proto"
	Port    Type = "inet_service"
	Number  Type = "integer" // of 32 bits, in the machine's byte order
	IfName  Type = "ifname"
	Ether   Type = "ether_addr"
	Verdict Type = "verdict"
)

// Set is a set, or a map when it has Data.
type Set struct {
	Name string
	Key  []Type
	// Data is what a key leads to; nil: a set. Verdict stands alone.
	Data []Type
	// Interval: a key is a first and a last value, one after the other.
	Interval bool
	// Dynamic: rules write it, with a time after which an element goes. Its
	// elements are the kernel's.
	Dynamic bool
	// Size bounds the elements of a dynamic set.
	Size     uint32
	Elements Elements
}

// Elements of a set: keys to data, in the bytes of the kernel (see Key). Data
// of a Verdict is Drop or "goto NAME".
type Elements map[string]string

// Drop is the verdict that drops, as an element's data.
const Drop = "drop"

// GotoChain is the verdict that goes to a chain, as an element's data.
func GotoChain(name string) string { return "goto " + name }

// Chain is a base chain when it has a Hook, else one that others go to.
type Chain struct {
	Name string
	// Type is "filter" or "nat", Hook "prerouting", "input", "forward",
	// "output" or "postrouting".
	Type, Hook string
	Priority   int
	Rules      []Rule
}

// Rule is a list of statements; the first one that does not match ends it.
type Rule []Stmt

// String is the rule as nft(8) shows it.
func (r Rule) String() string {
	words := make([]string, len(r))
	for i, s := range r {
		words[i] = s.text
	}
	return strings.Join(words, " ")
}

// Key packs values in the kernel's form: addresses and ports in network order,
// each padded to whole registers. Values are netip.Addr, Protocol, uint16
// (a port), uint32 (a number), string (an interface's name, at most 15 bytes)
// and net.HardwareAddr (of Ethernet).
func Key(values ...any) string {
	var b []byte
	for _, v := range values {
		switch v := v.(type) {
		case netip.Addr:
			b = append(b, v.AsSlice()...)
		case Protocol:
			b = append(b, byte(v), 0, 0, 0)
		case uint16:
			b = append(b, byte(v>>8), byte(v), 0, 0)
		case uint32:
			b = nativeEndian.AppendUint32(b, v)
		case string:
			b = append(b, make([]byte, unix.IFNAMSIZ)...)
			copy(b[len(b)-unix.IFNAMSIZ:len(b)-1], v)
		case net.HardwareAddr:
			b = append(append(b, v...), 0, 0)
		default:
			panic(fmt.Sprintf("nft: no key of %T", v))
		}
	}
	return string(b)
}

// Protocol is an IP protocol's number.
type Protocol uint8

// ParseProtocol knows "tcp", "udp" and "sctp".
func ParseProtocol(name string) (Protocol, bool) {
	p, ok := protocols[name]
	return Protocol(p), ok
}

func (p Protocol) String() string {
	for name, n := range protocols {
		if n == byte(p) {
			return name
		}
	}
	return strconv.Itoa(int(p))
}

// unpack is the text of packed values.
func unpack(types []Type, s string) string {
	words := make([]string, 0, len(types))
	for _, t := range types {
		n := t.words() * 4
		if len(s) < n {
			return "?"
		}
		part := s[:n]
		s = s[n:]
		switch t {
		case IPv4, IPv6:
			a, _ := netip.AddrFromSlice([]byte(part))
			words = append(words, a.String())
		case Proto:
			words = append(words, Protocol(part[0]).String())
		case Port:
			words = append(words, strconv.Itoa(int(part[0])<<8|int(part[1])))
		case IfName:
			words = append(words, strconv.Quote(strings.TrimRight(part, "\x00")))
		case Ether:
			words = append(words, net.HardwareAddr(part[:6]).String())
		default:
			words = append(words, strconv.FormatUint(uint64(nativeEndian.Uint32([]byte(part))), 10))
		}
	}
	return strings.Join(words, " . ")
}

// words is how many registers of 32 bits a value takes.
func (t Type) words() int {
	switch t {
	case IPv6, IfName:
		return 4
	case Ether:
		return 2
	}
	return 1
}

func words(types []Type) (n int) {
	for _, t := range types {
		n += t.words()
	}
	return n
}

// definition is the text of a set without its elements.
func (s Set) definition() string {
	var b strings.Builder
	kind := "set"
	names := func(types []Type) string {
		texts := make([]string, len(types))
		for i, t := range types {
			texts[i] = string(t)
		}
		return strings.Join(texts, " . ")
	}
	typ := names(s.Key)
	if len(s.Data) > 0 {
		kind = "map"
		typ += " : " + names(s.Data)
	}
	fmt.Fprintf(&b, "%s %s {\n\t\ttype %s\n", kind, s.Name, typ)
	if s.Size > 0 {
		fmt.Fprintf(&b, "\t\tsize %d\n", s.Size)
	}
	switch {
	case s.Interval:
		b.WriteString("\t\tflags interval\n")
	case s.Dynamic:
		b.WriteString("\t\tflags dynamic,timeout\n")
	}
	return b.String()
}

// Text renders the table as nft(8) would show it: for people, logs and golden
// files.
func (t Table) Text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "table %s %s {\n", t.Family, t.Name)
	for _, s := range t.Sets {
		fmt.Fprintf(&b, "\t%s", s.definition())
		if len(s.Elements) > 0 {
			b.WriteString("\t\telements = {\n")
			for _, k := range slices.Sorted(maps.Keys(s.Elements)) {
				fmt.Fprintf(&b, "\t\t\t%s,\n", s.element(k))
			}
			b.WriteString("\t\t}\n")
		}
		b.WriteString("\t}\n\n")
	}
	for i, c := range t.Chains {
		if i > 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "\tchain %s {\n", c.Name)
		if c.Hook != "" {
			fmt.Fprintf(&b, "\t\ttype %s hook %s priority %d; policy accept;\n", c.Type, c.Hook, c.Priority)
		}
		for _, r := range c.Rules {
			fmt.Fprintf(&b, "\t\t%s\n", r)
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\n")
	return b.String()
}

// element is one element's text.
func (s Set) element(key string) string {
	text := ""
	if n := words(s.Key) * 4; s.Interval && len(key) == 2*n {
		text = unpack(s.Key, key[:n]) + "-" + unpack(s.Key, key[n:])
	} else {
		text = unpack(s.Key, key)
	}
	switch data := s.Elements[key]; {
	case len(s.Data) == 0:
		return text
	case s.Data[0] == Verdict:
		return text + " : " + data
	default:
		return text + " : " + unpack(s.Data, data)
	}
}

// fingerprint changes with the definitions of sets and base chains, which
// cannot be altered in a table that there is.
func (t Table) fingerprint() string {
	h := sha256.New()
	for _, s := range t.Sets {
		fmt.Fprintln(h, s.definition())
	}
	for _, c := range t.Chains {
		if c.Hook != "" {
			fmt.Fprintln(h, c.Name, c.Type, c.Hook, c.Priority)
		}
	}
	return hex.EncodeToString(h.Sum(nil))[:16]
}

// Change is what one transaction alters in a table that there is.
type Change struct {
	// Chains are added, or their rules replaced.
	Chains []Chain
	// Remove and Add are elements by their set's name. A key in both gets other
	// data.
	Remove, Add map[string]Elements
	// Drop are chains that nothing leads to any more.
	Drop []string
}

// Empty reports that there is nothing to do.
func (c Change) Empty() bool {
	return len(c.Chains) == 0 && len(c.Drop) == 0 && len(c.Remove) == 0 && len(c.Add) == 0
}

// Elements counts the elements that it adds and removes.
func (c Change) Elements() (n int) {
	for _, e := range c.Remove {
		n += len(e)
	}
	for _, e := range c.Add {
		n += len(e)
	}
	return n
}

// Put notes an element to add to a set.
func (c *Change) Put(set, key, data string) { put(&c.Add, set, key, data) }

// Take notes an element to remove from a set.
func (c *Change) Take(set, key, data string) { put(&c.Remove, set, key, data) }

func put(m *map[string]Elements, set, key, data string) {
	if *m == nil {
		*m = map[string]Elements{}
	}
	if (*m)[set] == nil {
		(*m)[set] = Elements{}
	}
	(*m)[set][key] = data
}

// State is what the kernel holds of a table.
type State struct {
	// Whole: the table is there and its definitions are those of the Table that
	// was asked for. If not, the rest is empty, and the table has to be created again.
	Whole  bool
	Chains map[string][]string // rules' texts by chain
	Sets   map[string]Elements // not the dynamic ones
}

// Diff is what brings a kernel's state to a table with the same definitions.
func Diff(have State, want Table) Change {
	var c Change
	named := map[string]bool{}
	for _, chain := range want.Chains {
		named[chain.Name] = true
		now, ok := have.Chains[chain.Name]
		if !ok || !slices.Equal(now, ruleTexts(chain)) {
			c.Chains = append(c.Chains, chain)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(have.Chains)) {
		if !named[name] && name != marker {
			c.Drop = append(c.Drop, name)
		}
	}
	for _, s := range want.Sets {
		if s.Dynamic {
			continue
		}
		now := have.Sets[s.Name]
		for key, data := range s.Elements {
			old, ok := now[key]
			if ok && old == data {
				continue
			}
			if ok {
				c.Take(s.Name, key, old)
			}
			c.Put(s.Name, key, data)
		}
		for key, data := range now {
			if _, ok := s.Elements[key]; !ok {
				c.Take(s.Name, key, data)
			}
		}
	}
	return c
}

// sameChains reports whether the chains are those of the table.
func (s State) sameChains(t Table) bool {
	c := Diff(State{Whole: true, Chains: s.Chains}, Table{Name: t.Name, Chains: t.Chains})
	return len(c.Chains) == 0 && len(c.Drop) == 0
}

// ruleTexts are the comments of a chain's rules as the kernel keeps them.
func ruleTexts(c Chain) []string {
	texts := make([]string, len(c.Rules))
	for i, r := range c.Rules {
		texts[i] = comment(r.String())
	}
	return texts
}

// comment fits a rule's text into what the kernel takes (256 bytes with its
// frame), and stays different for different texts.
func comment(text string) string {
	const most = 240
	if len(text) <= most {
		return text
	}
	sum := sha256.Sum256([]byte(text))
	return text[:most-17] + "…" + hex.EncodeToString(sum[:6])
}
