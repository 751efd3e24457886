package nft

import (
	"fmt"

	"github.com/google/nftables"
)

// DropHook is a base chain whose policy is to drop.
type DropHook struct {
	Name string // "inet filter input": family, table, chain
	Hook string // "input", "forward"
}

// Dropping lists the chains of the calling thread's network namespace, of any
// program, that drop what they do not know on its way in or through. Those of
// iptables are seen where it is built on nftables.
func Dropping() ([]DropHook, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	chains, err := conn.ListChains()
	if err != nil {
		return nil, fmt.Errorf("list packet filter chains: %w", err)
	}
	families := map[nftables.TableFamily]string{nftables.TableFamilyINet: "inet", nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6"}
	var all []DropHook
	for _, c := range chains {
		family, ours := families[c.Table.Family]
		if !ours || c.Hooknum == nil || c.Policy == nil || *c.Policy != nftables.ChainPolicyDrop {
			continue
		}
		h := DropHook{Name: family + " " + c.Table.Name + " " + c.Name}
		switch *c.Hooknum {
		case *nftables.ChainHookInput:
			h.Hook = "input"
		case *nftables.ChainHookForward:
			h.Hook = "forward"
		default:
			continue
		}
		all = append(all, h)
	}
	return all, nil
}
