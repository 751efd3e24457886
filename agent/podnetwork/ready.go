package podnetwork

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"k8s.io/klog/v2"
)

// readyNet is a network that no pod has yet: a namespace, connected to the
// bridge. It is whole, and named as a pod's is: all that a pod changes by taking
// it is the record of addresses.
type readyNet struct{ addrs []netip.Prefix }

func (r readyNet) name() string { return networkName(r.addrs) }

// refillAfter is how long no pod has asked for a network before new ones are
// made ahead: while pods start, they need the processors more.
const refillAfter = 40 * time.Millisecond

// keepReady keeps so many networks ready as the Config says, until ctx ends, and
// takes them away then. What a killed process left is removed by open.
func (n *Network) keepReady(ctx context.Context) {
	defer func() {
		n.looking.Lock()
		defer n.looking.Unlock()
		n.dropReady()
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.taken:
		}
		for n.wantsReady() {
			select {
			case <-ctx.Done():
				return
			case <-n.taken: // a pod starts: wait again
				continue
			case <-time.After(refillAfter):
			}
			if err := n.makeReady(); errors.Is(err, errNoRoom) {
				break
			} else if err != nil {
				klog.FromContext(ctx).Info("No network is kept ready; pods get theirs when they start", "err", err)
				break // until a pod has taken one
			}
		}
	}
}

func (n *Network) wantsReady() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.pools != nil && len(n.ready) < n.cfg.Ready
}

var errNoRoom = errors.New("too few free addresses")

// makeReady makes one more.
func (n *Network) makeReady() error {
	n.looking.RLock()
	defer n.looking.RUnlock()
	n.mu.Lock()
	pools := n.pools
	n.mu.Unlock()
	addrs, ok := pools.reserve()
	if !ok {
		return errNoRoom
	}
	if err := n.connect(addrs, n.spaces.Create); err != nil {
		pools.forget(addrs)
		return err
	}
	n.mu.Lock()
	n.ready = append(n.ready, readyNet{addrs})
	n.mu.Unlock()
	return nil
}

// dropReady takes all of them away; looking is held for writing.
func (n *Network) dropReady() {
	n.mu.Lock()
	pools, ready := n.pools, n.ready
	n.ready = nil
	n.mu.Unlock()
	for _, r := range ready {
		// What stays is found by the next start.
		_ = n.disconnect(r.name())
		pools.forget(r.addrs)
	}
}

// takeReady gives a ready network to a pod that has none, if there is one.
func (n *Network) takeReady(uid string) (path string, addrs []netip.Prefix, ok bool) {
	if n.cfg.Ready == 0 || !n.looking.TryRLock() {
		return "", nil, false
	}
	defer n.looking.RUnlock()
	n.mu.Lock()
	pools := n.pools
	if len(n.ready) == 0 {
		n.mu.Unlock()
		n.tellTaken()
		return "", nil, false
	}
	if pools.has(uid) { // one that is made again keeps its address
		n.mu.Unlock()
		return "", nil, false
	}
	r := n.ready[0]
	n.ready = n.ready[1:]
	n.mu.Unlock()
	n.tellTaken()
	// Killed before this, the agent leaves a network without a pod; after it,
	// one that is the pod's.
	if err := pools.claim(uid, r.addrs); err != nil {
		err = errors.Join(err, n.disconnect(r.name()))
		pools.forget(r.addrs)
		n.cfg.Logger.Warn("a ready network is of no use; the pod gets a new one", "address", r.name(), "err", err)
		return "", nil, false
	}
	n.setName(uid, r.name())
	return n.spaces.Path(r.name()), r.addrs, true
}

// tellTaken wakes keepReady.
func (n *Network) tellTaken() {
	select {
	case n.taken <- struct{}{}:
	default:
	}
}

// readyNames are the ready networks; looking is held for writing.
func (n *Network) readyNames() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []string
	for _, r := range n.ready {
		out = append(out, r.name())
	}
	return out
}
