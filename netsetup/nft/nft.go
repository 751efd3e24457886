// Package nft brings the kernel's packet filter to a desired Ruleset: one
// table of ours, replaced as a whole in one transaction, so that a packet sees
// the old rules or the new ones and never a mixture. It is the one package
// that knows the nftables library.
package nft

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// DefaultTable is the name of our table in the inet family.
const DefaultTable = "clusterd"

// Config of a Filter.
type Config struct {
	// Table's name; default DefaultTable. It belongs to us alone.
	Table string
}

// Filter applies rulesets in the network namespace in which it was opened.
// Safe for concurrent use; the last Apply wins.
type Filter struct {
	table string

	mu   sync.Mutex // guards conn: it gathers a transaction
	conn *nftables.Conn
}

// Open binds a Filter to the calling thread's network namespace.
func Open(cfg Config) (*Filter, error) {
	if cfg.Table == "" {
		cfg.Table = DefaultTable
	}
	conn, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	return &Filter{table: cfg.Table, conn: conn}, nil
}

// Close gives the socket back; the rules stay.
func (f *Filter) Close() error { return f.conn.CloseLasting() }

// Apply replaces our table by the ruleset, or leaves the old one in force when
// the kernel refuses.
func (f *Filter) Apply(r Ruleset) error {
	if err := r.check(); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: f.table}
	// Adding first makes the deletion pass whether the table was there or not.
	f.conn.AddTable(table)
	f.conn.DelTable(table)
	f.conn.AddTable(table)
	for _, c := range compile(r) {
		chain := f.conn.AddChain(kernelChain(table, c))
		for _, rule := range c.rules {
			f.conn.AddRule(&nftables.Rule{
				Table:    table,
				Chain:    chain,
				Exprs:    rule.exprs(),
				UserData: userdata.AppendString(nil, userdata.TypeComment, rule.String()),
			})
		}
	}
	if err := f.conn.Flush(); err != nil {
		return fmt.Errorf("apply packet filter rules: %w", err)
	}
	return nil
}

// CleanUp removes our table; none is no error.
func (f *Filter) CleanUp() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: f.table}
	f.conn.AddTable(table)
	f.conn.DelTable(table)
	if err := f.conn.Flush(); err != nil {
		return fmt.Errorf("remove packet filter rules: %w", err)
	}
	return nil
}

// List returns the rules that the kernel holds in our table, each with its
// chain before it: "postrouting: ip saddr 10.42.1.0/24 masquerade". An absent
// table gives none.
func (f *Filter) List() ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	tables, err := f.conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, fmt.Errorf("list packet filter tables: %w", err)
	}
	var out []string
	for _, t := range tables {
		if t.Name != f.table {
			continue
		}
		chains, err := f.conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
		if err != nil {
			return nil, fmt.Errorf("list packet filter chains: %w", err)
		}
		for _, c := range chains {
			if c.Table.Name != f.table {
				continue
			}
			rules, err := f.conn.GetRules(t, c)
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return nil, fmt.Errorf("list packet filter rules: %w", err)
			}
			for _, r := range rules {
				text, _ := userdata.GetString(r.UserData, userdata.TypeComment)
				out = append(out, c.Name+": "+text)
			}
		}
	}
	return out, nil
}

// Holds reports whether the kernel's table has the ruleset's rules and no others.
func (f *Filter) Holds(r Ruleset) (bool, error) {
	have, err := f.List()
	if err != nil {
		return false, err
	}
	want := r.lines()
	slices.Sort(have)
	slices.Sort(want)
	return slices.Equal(have, want), nil
}

func kernelChain(table *nftables.Table, c chain) *nftables.Chain {
	accept := nftables.ChainPolicyAccept
	kc := &nftables.Chain{Name: c.name, Table: table, Type: nftables.ChainType(c.kind), Policy: &accept}
	switch c.hook {
	case "forward":
		kc.Hooknum, kc.Priority = nftables.ChainHookForward, nftables.ChainPriorityFilter
	case "postrouting":
		kc.Hooknum, kc.Priority = nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource
	case "prerouting":
		kc.Hooknum, kc.Priority = nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest
		if c.priority == "raw" {
			kc.Priority = nftables.ChainPriorityRaw
		}
	case "output":
		kc.Hooknum, kc.Priority = nftables.ChainHookOutput, nftables.ChainPriorityNATDest
	default:
		panic("nft: no such hook: " + c.hook)
	}
	return kc
}

// exprs is the rule in the kernel's little machine.
func (r rule) exprs() []expr.Any {
	var e []expr.Any
	if r.iif != "" {
		name := make([]byte, unix.IFNAMSIZ)
		copy(name, r.iif)
		e = append(e, &expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: name})
	}
	for _, m := range []struct {
		prefix netip.Prefix
		isDst  bool
	}{{r.src, false}, {r.dst, true}} {
		if m.prefix.IsValid() {
			e = append(e, matchPrefix(m.prefix, m.isDst)...)
		}
	}
	if r.local {
		e = append(e, &expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{nfproto(r.to.Addr())}},
			&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)})
	}
	if r.protocol != "" {
		e = append(e, &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{protocols[r.protocol]}},
			// All three have the destination port second.
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(r.port)})
	}
	if r.dnatted {
		e = append(e, &expr.Ct{Key: expr.CtKeySTATUS, Register: 1},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(ipsDstNAT), Xor: make([]byte, 4)},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)})
	}
	switch r.verdict {
	case drop:
		return append(e, &expr.Verdict{Kind: expr.VerdictDrop})
	case dnat:
		return append(e,
			&expr.Immediate{Register: 1, Data: r.to.Addr().AsSlice()},
			&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(r.to.Port())},
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(nfproto(r.to.Addr())), RegAddrMin: 1, RegProtoMin: 2})
	case accept:
		return append(e, &expr.Verdict{Kind: expr.VerdictAccept})
	case leave:
		return append(e, &expr.Verdict{Kind: expr.VerdictReturn})
	case masquerade:
		return append(e, &expr.Masq{})
	default:
		panic("nft: no such verdict: " + string(r.verdict))
	}
}

// ipsDstNAT is IPS_DST_NAT of linux/netfilter/nf_conntrack_common.h.
const ipsDstNAT = 1 << 5

func nfproto(a netip.Addr) byte {
	if a.Is4() {
		return unix.NFPROTO_IPV4
	}
	return unix.NFPROTO_IPV6
}

// matchPrefix compares one address of the packet, of the prefix's family, to
// the prefix.
func matchPrefix(p netip.Prefix, isDst bool) []expr.Any {
	proto, offset, size := byte(unix.NFPROTO_IPV4), uint32(12), uint32(net.IPv4len)
	if p.Addr().Is6() {
		proto, offset, size = unix.NFPROTO_IPV6, 8, net.IPv6len
	}
	if isDst {
		offset += size
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: size, Mask: net.CIDRMask(p.Bits(), int(size)*8), Xor: make([]byte, size)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Masked().Addr().AsSlice()},
	}
}
