package nft

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

var nativeEndian = binary.NativeEndian

// Stmt is one statement of a Rule: what nft(8) shows, and what is sent to the
// kernel.
type Stmt struct {
	text  string
	exprs []expr.Any
}

// register is the n-th register of 32 bits.
func register(n int) uint32 { return uint32(unix.NFT_REG32_00 + n) }

// Field is a value of the packet that is being looked at, or a constant: a part
// of a key.
type Field struct {
	text string
	typ  Type
	load func(reg uint32) []expr.Any
}

// The fields.
var (
	Saddr4  = Field{"ip saddr", IPv4, payload(expr.PayloadBaseNetworkHeader, 12, 4)}
	Daddr4  = Field{"ip daddr", IPv4, payload(expr.PayloadBaseNetworkHeader, 16, 4)}
	Saddr6  = Field{"ip6 saddr", IPv6, payload(expr.PayloadBaseNetworkHeader, 8, 16)}
	Daddr6  = Field{"ip6 daddr", IPv6, payload(expr.PayloadBaseNetworkHeader, 24, 16)}
	L4Proto = Field{"meta l4proto", Proto, meta(expr.MetaKeyL4PROTO)}
	// Dport is the destination port of TCP, UDP and SCTP alike.
	Dport = Field{"th dport", Port, payload(expr.PayloadBaseTransportHeader, 2, 2)}
	// Iif is the name of the interface that it came in by, Oif of the one that it
	// leaves by.
	Iif = Field{"iifname", IfName, meta(expr.MetaKeyIIFNAME)}
	Oif = Field{"oifname", IfName, meta(expr.MetaKeyOIFNAME)}
	// EtherSaddr is the frame's sender; ARPEther and ARPSaddr are what an ARP
	// packet says of its sender, NDTarget whom a neighbour message of ICMPv6 is
	// about.
	EtherSaddr = Field{"ether saddr", Ether, payload(expr.PayloadBaseLLHeader, 6, 6)}
	ARPEther   = Field{"arp saddr ether", Ether, payload(expr.PayloadBaseNetworkHeader, 8, 6)}
	ARPSaddr   = Field{"arp saddr ip", IPv4, payload(expr.PayloadBaseNetworkHeader, 14, 4)}
	NDTarget   = Field{"icmpv6 taddr", IPv6, payload(expr.PayloadBaseTransportHeader, 8, 16)}
)

// Const is an address in the place of a field.
func Const(a netip.Addr) Field {
	t := IPv4
	if a.Is6() {
		t = IPv6
	}
	return Field{a.String(), t, func(reg uint32) []expr.Any {
		return []expr.Any{&expr.Immediate{Register: reg, Data: a.AsSlice()}}
	}}
}

// ConstNumber is a number in the place of a field.
func ConstNumber(n uint32) Field {
	return Field{strconv.Itoa(int(n)), Number, func(reg uint32) []expr.Any {
		return []expr.Any{&expr.Immediate{Register: reg, Data: binaryutil.NativeEndian.PutUint32(n)}}
	}}
}

// Random is a number below n by chance.
func Random(n uint32) Field {
	return Field{fmt.Sprintf("numgen random mod %d", n), Number, func(reg uint32) []expr.Any {
		return []expr.Any{&expr.Numgen{Register: reg, Modulus: n, Type: unix.NFT_NG_RANDOM}}
	}}
}

func payload(base expr.PayloadBase, offset, size uint32) func(uint32) []expr.Any {
	return func(reg uint32) []expr.Any {
		return []expr.Any{&expr.Payload{DestRegister: reg, Base: base, Offset: offset, Len: size}}
	}
}

func meta(key expr.MetaKey) func(uint32) []expr.Any {
	return func(reg uint32) []expr.Any { return []expr.Any{&expr.Meta{Key: key, Register: reg}} }
}

// load puts the fields into registers from the first-th on.
func load(first int, fields []Field) (e []expr.Any, next int) {
	for _, f := range fields {
		e = append(e, f.load(register(first))...)
		first += f.typ.words()
	}
	return e, first
}

func concat(fields []Field) string {
	texts := make([]string, len(fields))
	for i, f := range fields {
		texts[i] = f.text
	}
	return strings.Join(texts, " . ")
}

// In matches when a set holds the fields.
func In(set string, fields ...Field) Stmt {
	e, _ := load(0, fields)
	return Stmt{concat(fields) + " @" + set, append(e, &expr.Lookup{SourceRegister: register(0), SetName: set})}
}

// NotIn matches when a set does not hold the fields.
func NotIn(set string, fields ...Field) Stmt {
	e, _ := load(0, fields)
	return Stmt{concat(fields) + " != @" + set, append(e, &expr.Lookup{SourceRegister: register(0), SetName: set, Invert: true})}
}

// Found matches when a map leads from the fields to anything.
func Found(set string, fields ...Field) Stmt {
	e, _ := load(0, fields)
	return Stmt{concat(fields) + " map @" + set + " exists", append(e, &expr.Lookup{SourceRegister: register(0), DestRegister: register(0), IsDestRegSet: true, SetName: set})}
}

// Choose asks a map for a number, and a map of verdicts what to do with it.
// It does not match when either has no answer.
func Choose(numbers, verdicts string, fields ...Field) Stmt {
	e, _ := load(0, fields)
	return Stmt{concat(fields) + " map @" + numbers + " vmap @" + verdicts, append(e,
		&expr.Lookup{SourceRegister: register(0), DestRegister: register(0), IsDestRegSet: true, SetName: numbers},
		&expr.Lookup{SourceRegister: register(0), DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: verdicts})}
}

// Remember says which element of a dynamic map a choice is kept in, and for how
// long after its last use.
type Remember struct {
	Set     string
	Key     []Field
	Timeout time.Duration
}

// DNATTo changes the destination to the address and port that a map leads to.
// With a Remember the choice is written there.
func DNATTo(set string, fields []Field, addr Type, r *Remember) Stmt {
	e, _ := load(0, fields)
	e = append(e, &expr.Lookup{SourceRegister: register(0), DestRegister: register(0), IsDestRegSet: true, SetName: set})
	text := fmt.Sprintf("dnat %s to %s map @%s", familyName(addr), concat(fields), set)
	if r != nil {
		first := words([]Type{addr, Port})
		key, _ := load(first, r.Key)
		e = append(append(e, key...), dynset(r, register(first), register(0)))
		text = fmt.Sprintf("update @%s { %s timeout %s : chosen } %s", r.Set, concat(r.Key), r.Timeout, text)
	}
	return Stmt{text, append(e, natTo(addr, 0))}
}

// DNATRemembered changes the destination to what was remembered, if anything,
// and remembers it for longer.
func DNATRemembered(addr Type, r Remember) Stmt {
	e, next := load(0, r.Key)
	e = append(e,
		&expr.Lookup{SourceRegister: register(0), DestRegister: register(next), IsDestRegSet: true, SetName: r.Set},
		dynset(&r, register(0), register(next)),
		natTo(addr, next))
	return Stmt{fmt.Sprintf("dnat %s to %s map @%s update timeout %s", familyName(addr), concat(r.Key), r.Set, r.Timeout), e}
}

func dynset(r *Remember, key, data uint32) expr.Any {
	return &expr.Dynset{SrcRegKey: key, SrcRegData: data, SetName: r.Set, Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: r.Timeout}
}

func natTo(addr Type, first int) expr.Any {
	family := uint32(unix.NFPROTO_IPV4)
	if addr == IPv6 {
		family = unix.NFPROTO_IPV6
	}
	port := register(first + addr.words())
	return &expr.NAT{Type: expr.NATTypeDestNAT, Family: family, RegAddrMin: register(first), RegProtoMin: port, Specified: true}
}

func familyName(t Type) string {
	if t == IPv6 {
		return "ip6"
	}
	return "ip"
}

// Family4 and Family6 match packets of the family.
var (
	Family4 = Stmt{"meta nfproto ipv4", nfprotoIs(unix.NFPROTO_IPV4)}
	Family6 = Stmt{"meta nfproto ipv6", nfprotoIs(unix.NFPROTO_IPV6)}
)

func nfprotoIs(p byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: register(0)}, &expr.Cmp{Op: expr.CmpOpEq, Register: register(0), Data: []byte{p}}}
}

// ProtoIs matches packets of the protocol.
func ProtoIs(p Protocol) Stmt {
	return Stmt{"meta l4proto " + p.String(), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register(0)}, &expr.Cmp{Op: expr.CmpOpEq, Register: register(0), Data: []byte{byte(p)}}}}
}

// EtherType matches frames of that type; a frame with a VLAN tag has the tag's.
func EtherType(t uint16) Stmt {
	return Stmt{fmt.Sprintf("ether type 0x%04x", t), payloadIs(expr.PayloadBaseLLHeader, 12, binaryutil.BigEndian.PutUint16(t))}
}

// ARPOfIP matches ARP that maps an IPv4 address to one of Ethernet; EtherType
// comes before it.
var ARPOfIP = Stmt{"arp htype 1 arp ptype ip arp hlen 6 arp plen 4", payloadIs(expr.PayloadBaseNetworkHeader, 0, []byte{0, 1, 8, 0, 6, 4})}

// ICMPv6 matches such messages of a type.
func ICMPv6(typ byte) Stmt {
	return Stmt{fmt.Sprintf("icmpv6 type %d", typ), append(ProtoIs(unix.IPPROTO_ICMPV6).exprs, payloadIs(expr.PayloadBaseTransportHeader, 0, []byte{typ})...)}
}

// IifGroup matches packets that came in by an interface of the group.
func IifGroup(group uint32) Stmt {
	return Stmt{fmt.Sprintf("iifgroup 0x%x", group), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFGROUP, Register: register(0)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: register(0), Data: binaryutil.NativeEndian.PutUint32(group)}}}
}

func payloadIs(base expr.PayloadBase, offset uint32, data []byte) []expr.Any {
	return append(payload(base, offset, uint32(len(data)))(register(0)), &expr.Cmp{Op: expr.CmpOpEq, Register: register(0), Data: data})
}

// Is matches when a field has a value, one that Key takes. It asks nothing about
// the packet's family, which the rule has to know.
func Is(f Field, value any) Stmt {
	e, _ := load(0, []Field{f})
	key := Key(value)
	return Stmt{f.text + " " + unpack([]Type{f.typ}, key), append(e, &expr.Cmp{Op: expr.CmpOpEq, Register: register(0), Data: []byte(key)})}
}

// From and To match packets whose source, or destination, is of the range.
func From(p netip.Prefix) Stmt {
	return Stmt{family(p) + " saddr " + p.String(), matchPrefix(p, false)}
}

// To is described at From.
func To(p netip.Prefix) Stmt {
	return Stmt{family(p) + " daddr " + p.String(), matchPrefix(p, true)}
}

// ToLocal matches packets for an address of the node's own.
var ToLocal = Stmt{"fib daddr type local", []expr.Any{
	&expr.Fib{Register: register(0), FlagDADDR: true, ResultADDRTYPE: true},
	&expr.Cmp{Op: expr.CmpOpEq, Register: register(0), Data: binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)},
}}

// Started matches packets of connections that are under way.
var Started = Stmt{"ct state established,related", []expr.Any{
	&expr.Ct{Key: expr.CtKeySTATE, Register: register(0)},
	&expr.Bitwise{SourceRegister: register(0), DestRegister: register(0), Len: 4,
		Mask: binaryutil.NativeEndian.PutUint32(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED), Xor: make([]byte, 4)},
	&expr.Cmp{Op: expr.CmpOpNeq, Register: register(0), Data: make([]byte, 4)},
}}

// Marked matches packets with all bits of the mark.
func Marked(bits uint32) Stmt {
	return Stmt{fmt.Sprintf("meta mark and 0x%x != 0", bits), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: register(0)},
		&expr.Bitwise{SourceRegister: register(0), DestRegister: register(0), Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: register(0), Data: make([]byte, 4)},
	}}
}

// Mark sets bits of the packet's mark, Unmark clears them.
func Mark(bits uint32) Stmt {
	return Stmt{fmt.Sprintf("meta mark set mark or 0x%x", bits), setMark(^bits, bits)}
}

// Unmark is described at Mark.
func Unmark(bits uint32) Stmt {
	return Stmt{fmt.Sprintf("meta mark set mark and 0x%x", ^bits), setMark(^bits, 0)}
}

func setMark(mask, xor uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: register(0)},
		&expr.Bitwise{SourceRegister: register(0), DestRegister: register(0), Len: 4, Mask: binaryutil.NativeEndian.PutUint32(mask), Xor: binaryutil.NativeEndian.PutUint32(xor)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: register(0)},
	}
}

// What a rule ends with.
var (
	Return     = Stmt{"return", []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}}
	DropPacket = Stmt{"drop", []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}}}
	Accept     = Stmt{"accept", []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}}
	// Hide gives the packet the address of the interface that it leaves by, and
	// a port by chance.
	Hide = Stmt{"masquerade fully-random", []expr.Any{&expr.Masq{FullyRandom: true}}}
	// Refuse answers that the port is unreachable; RefuseTCP is the way
	// that TCP knows.
	Refuse    = Stmt{"reject", []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH}}}
	RefuseTCP = Stmt{"reject with tcp reset", []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}}
)

// Goto goes on in another chain and does not come back; Jump does.
func Goto(chain string) Stmt {
	return Stmt{"goto " + chain, []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}}
}

// Jump is described at Goto.
func Jump(chain string) Stmt {
	return Stmt{"jump " + chain, []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}}
}

func (t Type) kernel() nftables.SetDatatype {
	switch t {
	case IPv4:
		return nftables.TypeIPAddr
	case IPv6:
		return nftables.TypeIP6Addr
	case Proto:
		return nftables.TypeInetProto
	case Port:
		return nftables.TypeInetService
	case Verdict:
		return nftables.TypeVerdict
	case IfName:
		return nftables.TypeIFName
	case Ether:
		return nftables.TypeEtherAddr
	default:
		return nftables.TypeInteger
	}
}

func kernelType(types []Type) nftables.SetDatatype {
	if len(types) == 1 {
		return types[0].kernel()
	}
	parts := make([]nftables.SetDatatype, len(types))
	for i, t := range types {
		parts[i] = t.kernel()
	}
	return nftables.MustConcatSetType(parts...) // at most 5: ours are
}
