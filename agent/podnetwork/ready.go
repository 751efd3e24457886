package podnetwork

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/netsetup/podnet"
)

// readyNet is a network that no pod has yet: a namespace, pinned in the folder
// ready under the name of its address, connected to the bridge.
type readyNet struct{ addr netip.Prefix }

func (r readyNet) name() string   { return r.addr.Addr().String() }
func (r readyNet) hostIf() string { return podnet.HostIf("ready " + r.name()) }

// refillAfter is how long no pod has asked for a network before new ones are
// made ahead: while pods start, they need the processors more.
const refillAfter = 100 * time.Millisecond

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
			case <-n.taken: // a pod starts: wait anew
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
	return n.pool != nil && !n.noReady && len(n.ready) < n.cfg.Ready
}

var errNoRoom = errors.New("too few free addresses")

// makeReady makes one more.
func (n *Network) makeReady() error {
	n.looking.RLock()
	defer n.looking.RUnlock()
	n.mu.Lock()
	pool, gateway := n.pool, n.gateway
	n.mu.Unlock()
	addr, ok := pool.Reserve()
	if !ok {
		return errNoRoom
	}
	r := readyNet{addr}
	path, err := n.readySpaces.Create(r.name())
	if err == nil {
		err = n.links.Attach(podnet.Pod{NetNS: path, HostIf: r.hostIf(), Bridge: n.cfg.Bridge, Addr: addr, Gateway: gateway, MTU: n.cfg.MTU})
	}
	if err != nil {
		pool.Forget(addr)
		return errors.Join(err, n.readySpaces.Delete(r.name()))
	}
	n.mu.Lock()
	n.ready = append(n.ready, r)
	n.mu.Unlock()
	return nil
}

// dropReady takes all of them away; looking is held for writing.
func (n *Network) dropReady() {
	n.mu.Lock()
	pool, ready := n.pool, n.ready
	n.ready = nil
	n.mu.Unlock()
	for _, r := range ready {
		// What stays is found by the next start.
		_ = n.links.Detach(r.hostIf())
		_ = n.readySpaces.Delete(r.name())
		pool.Forget(r.addr)
	}
}

// takeReady gives a ready network to a pod that has none, if there is one.
func (n *Network) takeReady(uid string) (path string, addr netip.Prefix, ok bool) {
	if n.cfg.Ready == 0 || !n.looking.TryRLock() {
		return "", addr, false
	}
	defer n.looking.RUnlock()
	n.mu.Lock()
	pool := n.pool
	if len(n.ready) == 0 {
		n.mu.Unlock()
		n.tellTaken()
		return "", addr, false
	}
	if _, has := pool.Lookup(uid); has { // one that is made again keeps its address
		n.mu.Unlock()
		return "", addr, false
	}
	r := n.ready[0]
	n.ready = n.ready[1:]
	n.mu.Unlock()
	n.tellTaken()
	path, err := n.give(r, uid)
	if err != nil {
		if errors.Is(err, unix.EBUSY) { // before Linux 6.2 no interface is renamed while it is up
			n.mu.Lock()
			n.noReady = true
			n.mu.Unlock()
		}
		n.cfg.Logger.Warn("a ready network is of no use; the pod gets a new one", "address", r.name(), "err", err)
		return "", addr, false
	}
	return path, r.addr, true
}

// give makes r the pod's own. The order is such that one killed in between
// leaves what open and Live clean up, or what the next Attach of the pod
// completes.
func (n *Network) give(r readyNet, uid string) (path string, err error) {
	n.mu.Lock()
	pool := n.pool
	n.mu.Unlock()
	if err := pool.Claim(uid, r.addr); err != nil {
		pool.Forget(r.addr)
		return "", errors.Join(err, n.links.Detach(r.hostIf()), n.readySpaces.Delete(r.name()))
	}
	path, err = n.spaces.Pin(uid, n.readySpaces.Path(r.name()))
	if err == nil {
		err = n.links.Rename(r.hostIf(), podnet.HostIf(uid))
	}
	if err == nil {
		err = n.readySpaces.Delete(r.name())
	}
	if err != nil {
		return "", errors.Join(err, n.links.Detach(r.hostIf()), n.links.Detach(podnet.HostIf(uid)),
			n.readySpaces.Delete(r.name()), n.spaces.Delete(uid), pool.Release(uid))
	}
	return path, nil
}

// tellTaken wakes keepReady.
func (n *Network) tellTaken() {
	select {
	case n.taken <- struct{}{}:
	default:
	}
}

// clearReady removes the namespaces of a former process.
func (n *Network) clearReady() error {
	names, err := n.readySpaces.List()
	if err != nil {
		return fmt.Errorf("networks that were kept ready: %w", err)
	}
	for _, name := range names {
		err = errors.Join(err, n.readySpaces.Delete(name))
	}
	return err
}

// readyHostIfs are the interfaces of the ready networks; looking is held for
// writing.
func (n *Network) readyHostIfs() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []string
	for _, r := range n.ready {
		out = append(out, r.hostIf())
	}
	return out
}
