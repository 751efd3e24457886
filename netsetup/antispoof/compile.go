package antispoof

import (
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/nft"
)

// Names in the table.
const (
	own4  = "own4" // port . sender of the frame . address
	own6  = "own6"
	judge = "judge"
)

// priority is before all that looks at frames on their way in.
const priority = -300

// Types of ICMPv6 messages (RFC 4861).
const (
	routerAdvertisement    = 134
	neighbourSolicitation  = 135
	neighbourAdvertisement = 136
	redirect               = 137
)

// Compile gives the table for ports of the groups. Pure: the same values give
// the same table.
func Compile(groups []uint32, ports []Port) nft.Table {
	four, six := nft.Elements{}, nft.Elements{}
	for _, p := range ports {
		for _, a := range append([]netip.Addr{linkLocal(p.MAC)}, p.Addrs...) {
			if a.Is4() {
				four[nft.Key(p.Interface, p.MAC, a)] = ""
			} else {
				six[nft.Key(p.Interface, p.MAC, a)] = ""
			}
		}
	}
	base := nft.Chain{Name: "prerouting", Type: "filter", Hook: "prerouting", Priority: priority}
	for _, g := range groups {
		base.Rules = append(base.Rules, nft.Rule{nft.IifGroup(g), nft.Goto(judge)})
	}
	sender4 := nft.In(own4, nft.Iif, nft.EtherSaddr, nft.Saddr4)
	sender6 := nft.In(own6, nft.Iif, nft.EtherSaddr, nft.Saddr6)
	about6 := nft.In(own6, nft.Iif, nft.EtherSaddr, nft.NDTarget)
	arp := []nft.Stmt{nft.EtherType(unix.ETH_P_ARP), nft.ARPOfIP}
	ip6 := nft.EtherType(unix.ETH_P_IPV6)
	return nft.Table{
		Name: TableName, Family: nft.Bridge,
		Sets: []nft.Set{
			{Name: own4, Key: []nft.Type{nft.IfName, nft.Ether, nft.IPv4}, Elements: four},
			{Name: own6, Key: []nft.Type{nft.IfName, nft.Ether, nft.IPv6}, Elements: six},
		},
		Chains: []nft.Chain{
			{Name: judge, Rules: []nft.Rule{
				{nft.EtherType(unix.ETH_P_IP), sender4, nft.Accept},
				append(nft.Rule(arp), nft.In(own4, nft.Iif, nft.EtherSaddr, nft.ARPSaddr), nft.In(own4, nft.Iif, nft.ARPEther, nft.ARPSaddr), nft.Accept),
				// A pod is no router, and advertises its own addresses only.
				{ip6, nft.ICMPv6(routerAdvertisement), nft.DropPacket},
				{ip6, nft.ICMPv6(redirect), nft.DropPacket},
				{ip6, nft.ICMPv6(neighbourAdvertisement), sender6, about6, nft.Accept},
				{ip6, nft.ICMPv6(neighbourAdvertisement), nft.DropPacket},
				{ip6, sender6, nft.Accept},
				// It asks whether its own address is taken before it has one.
				{ip6, nft.Is(nft.Saddr6, netip.IPv6Unspecified()), nft.ICMPv6(neighbourSolicitation), about6, nft.Accept},
				{nft.DropPacket},
			}},
			base,
		},
	}
}

// linkLocal is the address that the kernel derives from a MAC (RFC 4291,
// appendix A).
func linkLocal(m net.HardwareAddr) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: m[0] ^ 2, m[1], m[2], 0xff, 0xfe, m[3], m[4], m[5]})
}
