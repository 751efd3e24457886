package overlay

import (
	"github.com/clusterd/clusterd/netsetup/nft"
)

// members are the sets of nodes' addresses in the fence.
const (
	members4 = "members4"
	members6 = "members6"
)

// Fence is the table that lets members alone into the tunnel: what comes to its
// port from others is dropped, and what this node's own ranges send to a member's
// port, too, as it would get there under this node's address. Pure.
func Fence(port int, n Nodes) nft.Table {
	four, six := nft.Elements{}, nft.Elements{}
	for _, o := range n.Others {
		for _, a := range o.Addrs {
			if a = a.Unmap(); a.Is4() {
				four[nft.Key(a)] = ""
			} else {
				six[nft.Key(a)] = ""
			}
		}
	}
	udp, _ := nft.ParseProtocol("udp")
	at := []nft.Stmt{nft.ProtoIs(udp), nft.Is(nft.Dport, uint16(port))}
	rule := func(more ...nft.Stmt) nft.Rule { return append(append(nft.Rule{}, at...), more...) }
	input := nft.Chain{Name: "input", Type: "filter", Hook: "input", Priority: -10, Rules: []nft.Rule{
		rule(nft.Family4, nft.NotIn(members4, nft.Saddr4), nft.DropPacket),
		rule(nft.Family6, nft.NotIn(members6, nft.Saddr6), nft.DropPacket),
	}}
	forward := nft.Chain{Name: "forward", Type: "filter", Hook: "forward", Priority: -10}
	for _, own := range n.Own {
		to := nft.In(members4, nft.Daddr4)
		if own.Addr().Is6() {
			to = nft.In(members6, nft.Daddr6)
		}
		forward.Rules = append(forward.Rules, rule(nft.From(own.Masked()), to, nft.DropPacket))
	}
	return nft.Table{
		Name: FenceTable,
		Sets: []nft.Set{
			{Name: members4, Key: []nft.Type{nft.IPv4}, Elements: four},
			{Name: members6, Key: []nft.Type{nft.IPv6}, Elements: six},
		},
		Chains: []nft.Chain{input, forward},
	}
}
