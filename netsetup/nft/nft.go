// Package nft keeps tables of the kernel's packet filter equal to values: each
// change is one transaction, so that a packet sees the old rules or the new ones
// and never a mixture, and changes of other programs are undone. It is the one
// package that knows the nftables library.
package nft

import (
	"net"
	"net/netip"

	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// DefaultTable is the name of the table of a Ruleset, in the inet family.
const DefaultTable = "clusterd"

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
