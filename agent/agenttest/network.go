package agenttest

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/agent/users"
)

// Network hands out addresses and connects nothing.
type Network struct {
	mu        sync.Mutex // guards all below
	attached  map[string]netip.Addr
	published map[string][]podstate.HostPort
	limits    map[string][2]uint64
	next      netip.Addr
	// First is the first pod's address; default 10.42.0.2. Set it before the agent
	// runs.
	First netip.Addr
	// Err is returned by Attach.
	Err error
	// SlowDetach is how long Detach takes. Set it before the agent runs.
	SlowDetach time.Duration
	// BeforeLive is called by Live before it asks which pods there are. Set it before
	// the agent runs.
	BeforeLive func()
}

// SetErr makes Attach fail, or work again.
func (n *Network) SetErr(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.Err = err
}

// Attach implements pod.Network.
func (n *Network) Attach(_ context.Context, uid string, hostNetwork bool) (string, []netip.Addr, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if hostNetwork { // nothing of it can fail
		return "", []netip.Addr{netip.MustParseAddr("192.0.2.1")}, nil
	}
	if n.Err != nil {
		return "", nil, n.Err
	}
	if n.attached == nil {
		n.attached, n.next = map[string]netip.Addr{}, n.First
		if !n.next.IsValid() {
			n.next = netip.MustParseAddr("10.42.0.2")
		}
	}
	if _, ok := n.attached[uid]; !ok {
		n.attached[uid] = n.next
		n.next = n.next.Next()
	}
	return "/run/netns/" + uid, []netip.Addr{n.attached[uid]}, nil
}

// AttachUsers implements pod.Network.
func (n *Network) AttachUsers(ctx context.Context, uid string, _ users.Range) (string, []netip.Addr, error) {
	return n.Attach(ctx, uid, false)
}

// Users implements pod.Network: it opens nothing of use.
func (n *Network) Users(string) (*os.File, error) { return os.Open(os.DevNull) }

// Detach implements pod.Network.
func (n *Network) Detach(ctx context.Context, uid string) error {
	if n.SlowDetach > 0 {
		select {
		case <-time.After(n.SlowDetach):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.published, uid)
	delete(n.limits, uid)
	delete(n.attached, uid)
	return nil
}

// Live implements pod.Network.
func (n *Network) Live(_ context.Context, live func() []string) error {
	if n.BeforeLive != nil {
		n.BeforeLive()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	uids := live()
	for u := range n.attached {
		if !slices.Contains(uids, u) {
			delete(n.attached, u)
		}
	}
	return nil
}

// Publish notes the ports; Detach drops them.
func (n *Network) Publish(_ context.Context, uid string, _ []netip.Addr, ports []podstate.HostPort) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.published == nil {
		n.published = map[string][]podstate.HostPort{}
	}
	n.published[uid] = ports
	return nil
}

// Limit notes the bounds; Detach drops them.
func (n *Network) Limit(_ context.Context, uid string, in, out uint64) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.limits == nil {
		n.limits = map[string][2]uint64{}
	}
	n.limits[uid] = [2]uint64{in, out}
	return nil
}

// Limits are what the pod may receive and send, in bits a second.
func (n *Network) Limits(uid string) [2]uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.limits[uid]
}

// Published are the ports that lead to the pod.
func (n *Network) Published(uid string) []podstate.HostPort {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.published[uid]
}

// Attached counts the pods that are connected.
func (n *Network) Attached() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.attached)
}

// Dial refuses.
func (n *Network) Dial(context.Context, string, bool, int32) (net.Conn, error) {
	return nil, errors.New("agenttest: nothing listens here")
}

// Run waits for ctx.
func (n *Network) Run(ctx context.Context) error { <-ctx.Done(); return nil }

// Ready is always true.
func (n *Network) Ready() (bool, string) { return true, "" }

// OnReady never calls.
func (n *Network) OnReady(func()) {}
