package podnetwork

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/netsetup/antispoof"
	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/podnet"
)

// networkName names a network, its pinned namespace and by that its interface
// on the node: by its first address, which it has before a pod has it. Whose it is
// stands in ipam.json alone, so that nothing of it changes when a pod takes it.
func networkName(addrs []netip.Prefix) string { return addrs[0].Addr().String() }

// loadNames gives the names of the pods' networks by UID, as a former process
// left them. Namespaces pinned under another name than an address are of an
// earlier version, which named them by the pod.
func loadNames(dir string, spaces *netns.Dir) (map[string]string, error) {
	allocated, err := onRecord(dir)
	if err != nil {
		return nil, err
	}
	pinned, err := spaces.List()
	if err != nil {
		return nil, err
	}
	names := map[string]string{}
	for uid, addrs := range allocated {
		names[uid] = addrs[0].String()
	}
	for _, name := range pinned {
		if _, err := netip.ParseAddr(name); err != nil {
			names[name] = name
		}
	}
	return names, nil
}

// setName notes the pod's network; "": it has none any more.
func (n *Network) setName(uid, name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if name == "" {
		delete(n.names, uid)
	} else {
		n.names[uid] = name
	}
}

// Attached reports whether the pod has its addresses.
func (n *Network) Attached(uid string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.names[uid] != ""
}

// connect makes the network of those addresses, or what is missing of it, with the
// namespace that create makes or finds. On an error nothing of it stays.
func (n *Network) connect(addrs []netip.Prefix, create func(name string) (path string, err error)) error {
	name := networkName(addrs)
	path, err := create(name)
	if err == nil {
		err = n.frames.Add(framesOf(name, bare(addrs)))
	}
	if err == nil {
		pod := podnet.Pod{NetNS: path, HostIf: podnet.HostIf(name), Bridge: n.cfg.Bridge, MTU: n.cfg.MTU}
		for _, a := range addrs {
			// A single address: what pods of one node say to each other passes the
			// node's packet filter too, where Services and policies are.
			single := netip.PrefixFrom(a.Addr(), a.Addr().BitLen())
			pod.Addrs = append(pod.Addrs, podnet.Address{Addr: single, Gateway: gatewayOf(a.Masked())})
		}
		err = n.links.Attach(pod)
	}
	if err != nil {
		return errors.Join(err, n.spaces.Delete(name), n.frames.Remove(podnet.HostIf(name)))
	}
	return nil
}

// framesOf is what the network of that name and addresses may send.
func framesOf(name string, addrs []netip.Addr) antispoof.Port {
	return antispoof.Port{Interface: podnet.HostIf(name), MAC: podnet.HardwareAddr(addrs[0]), Addrs: addrs}
}

// setKnownFrames lets the pods send that a former process left: they go on
// without a packet lost. looking is held for writing, and nothing is ready.
func (n *Network) setKnownFrames() error {
	addrs, err := onRecord(n.cfg.Dir)
	if err != nil {
		return err
	}
	var ports []antispoof.Port
	n.mu.Lock()
	for uid, name := range n.names {
		if own, ok := addrs[uid]; ok {
			ports = append(ports, framesOf(name, own))
		}
	}
	n.mu.Unlock()
	return n.frames.Set(ports)
}

// disconnect takes a network away. What is not there is fine.
func (n *Network) disconnect(name string) error {
	return errors.Join(n.links.Detach(podnet.HostIf(name)), n.spaces.Delete(name), n.frames.Remove(podnet.HostIf(name)))
}

// dropOrphans removes the namespaces that are no pod's: a killed process kept
// them ready. Their interfaces are swept with those of pods that are no more, or
// go when their address is given out. looking is held for writing, and nothing
// is ready.
func (n *Network) dropOrphans() error {
	pinned, err := n.spaces.List()
	if err != nil {
		return fmt.Errorf("networks without a pod: %w", err)
	}
	n.mu.Lock()
	pods := map[string]bool{}
	for _, name := range n.names {
		pods[name] = true
	}
	n.mu.Unlock()
	for _, name := range pinned {
		if !pods[name] {
			err = errors.Join(err, n.spaces.Delete(name))
		}
	}
	return err
}

// sweep takes away every network but the ready ones and those of the pods to
// keep. looking is held for writing.
func (n *Network) sweep(ctx context.Context, keep map[string]bool) error {
	names := n.readyNames()
	var gone []string
	n.mu.Lock()
	for uid, name := range n.names {
		if keep[uid] {
			names = append(names, name)
		} else {
			gone = append(gone, name)
			delete(n.names, uid)
		}
	}
	n.mu.Unlock()
	kept, hostIfs := map[string]bool{}, []string{}
	for _, name := range names {
		kept[name] = true
		hostIfs = append(hostIfs, podnet.HostIf(name))
	}
	var errs []error
	for _, name := range gone {
		errs = append(errs, n.frames.Remove(podnet.HostIf(name)))
	}
	pinned, err := n.spaces.List()
	if err != nil {
		errs = append(errs, err)
	}
	for _, name := range pinned {
		if !kept[name] {
			errs = append(errs, n.spaces.Delete(name))
		}
	}
	swept, err := n.links.Sweep(hostIfs)
	if err != nil {
		errs = append(errs, err)
	} else if swept > 0 {
		klog.FromContext(ctx).Info("Removed network interfaces of pods that are no more", "count", swept)
	}
	return errors.Join(errs...)
}
