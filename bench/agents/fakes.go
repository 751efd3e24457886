package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"path/filepath"

	"github.com/clusterd/clusterd/agent/agenttest"
	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/netpol"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/netsetup/lb"
	"github.com/clusterd/clusterd/netsetup/policy"
)

// The addresses of hollow agents, none of which is on an interface, but those of
// their DNS, which the whole of 127.0.0.0/8 is.
var (
	machines = netip.MustParsePrefix("10.86.16.0/20")
	podRange = netip.MustParsePrefix("10.128.0.0/9")
	svcRange = netip.MustParsePrefix("10.96.0.0/16")
)

// serverPort is where servers listen, and hollow agents say they do.
const serverPort = 6443

const namePrefix = "hollow-"

func nameOf(number int) string { return fmt.Sprintf(namePrefix+"%05d", number) }

func plus(a netip.Addr, n int) netip.Addr {
	b := a.As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+uint32(n))
	return netip.AddrFrom4(b)
}

func addrOf(number int) netip.Addr { return plus(machines.Addr(), number+1) }

func dnsAddr(number int) netip.Addr { return plus(netip.MustParseAddr("127.64.0.1"), number) }

// podAddr is the address of an agent's first pod: no other's, and not of the range
// that the cluster gives the node, which is not known yet.
func podAddr(number int) netip.Addr { return plus(netip.MustParseAddr("10.192.0.2"), number<<8) }

func isRefusal(err error, no **join.Refusal) bool { return errors.As(err, no) }

// noRules is a packet filter that takes all rules and has no packets.
type noRules struct{}

func (noRules) Set([]policy.Group) error { return nil }
func (noRules) Run(ctx context.Context)  { <-ctx.Done() }

// noBalancer takes all rules for Services.
type noBalancer struct{}

func (noBalancer) SetBase(lb.Base) error                    { return nil }
func (noBalancer) Update(map[lb.Frontend]*lb.Backend) error { return nil }
func (noBalancer) Forget() error                            { return nil }
func (noBalancer) Remembers() bool                          { return false }
func (noBalancer) Run(ctx context.Context)                  { <-ctx.Done() }
func (noBalancer) Delete([]lb.Flow) (uint, error)           { return 0, nil }
func (noBalancer) DeleteOthers(map[lb.Frontend][]netip.AddrPort, []netip.Prefix) (uint, error) {
	return 0, nil
}

// network is a pod network that holds pods back until their rules are there, and
// connects nothing.
type network struct {
	agenttest.Network
	guard *netpol.Manager
}

// Attach implements pod.Network.
func (n *network) Attach(ctx context.Context, uid string, hostNetwork bool) (string, []netip.Addr, error) {
	path, addrs, err := n.Network.Attach(ctx, uid, hostNetwork)
	if err == nil && !hostNetwork {
		err = n.guard.Guard(ctx, uid, addrs)
	}
	return path, addrs, err
}

// Detach implements pod.Network.
func (n *network) Detach(ctx context.Context, uid string) error {
	n.guard.Release(uid)
	return n.Network.Detach(ctx, uid)
}

// images is an image store that has all images.
type images struct{ agenttest.Images }

// List implements agent.Images: the node's status names none.
func (*images) List(context.Context) ([]image.Image, error) { return nil, nil }

// Load implements agent.Images.
func (*images) Load(context.Context, io.Reader) ([]image.Image, error) {
	return nil, errors.ErrUnsupported
}

// VerifyAll implements agent.Images.
func (*images) VerifyAll(context.Context) error { return nil }

// GC implements agent.Images.
func (*images) GC(context.Context, image.GCPolicy) ([]image.Image, error) { return nil, nil }

// Remove implements agent.Images.
func (*images) Remove(context.Context, string) error { return errors.ErrUnsupported }

// Pin implements agent.Images.
func (*images) Pin(context.Context, string, bool) error { return errors.ErrUnsupported }

// Written implements agent.Images.
func (s *images) Written(id string) string { return filepath.Join(s.Dir, id) }
