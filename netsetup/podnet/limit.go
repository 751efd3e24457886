package podnet

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netns"
)

// Limits is how fast an attached pod may be, in bits a second; 0: as fast as it
// can.
type Limits struct {
	NetNS  string // as in Pod
	IfName string // as in Pod
	HostIf string // as in Pod
	In     uint64 // what the pod receives
	Out    uint64 // what the pod sends
}

// Limit shapes what goes into each end of the pod's pair, by a token bucket: what
// is too fast waits, and is dropped when too much waits already. The one for what
// the pod sends is inside its namespace. Again with other values it changes them.
func (n *Network) Limit(l Limits) error {
	if l.IfName == "" {
		l.IfName = "eth0"
	}
	if err := shape(n.h, l.HostIf, l.In); err != nil {
		return fmt.Errorf("limit what %s receives: %w", l.HostIf, err)
	}
	var inside *netlink.Handle
	err := netns.Do(l.NetNS, func() (err error) {
		inside, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		return err
	}
	defer inside.Close()
	if err := shape(inside, l.IfName, l.Out); err != nil {
		return fmt.Errorf("limit what %s sends: %w", l.HostIf, err)
	}
	return nil
}

// shape sets the rate at which an interface sends, in bits a second.
func shape(h *netlink.Handle, name string, bits uint64) error {
	link, err := h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	root := netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
	if bits == 0 {
		// The kernel says "invalid" or "not found" where there is only its default.
		err := h.QdiscDel(&netlink.Tbf{QdiscAttrs: root})
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	}
	rate, burst, queue := bucket(bits)
	err = h.QdiscReplace(&netlink.Tbf{QdiscAttrs: root, Rate: rate, Limit: queue, Buffer: netlink.Xmittime(rate, burst)})
	if errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("this kernel has no token bucket, load its module sch_tbf: %w", err)
	}
	return err
}

// bucket gives for a rate in bits a second: the rate in bytes a second, how many
// bytes may go at once, and how many may wait. The burst holds the largest packet
// that the kernel hands over in one piece (64 KiB), and at high rates what goes
// in ten milliseconds; the queue on top of it another fifty of them. At very low
// rates it is smaller: the kernel is given it as a time, which has room for 274
// seconds, and cuts large packets.
func bucket(bits uint64) (rate uint64, burst, queue uint32) {
	const least, most, longest = 128 << 10, 256 << 20, 200
	rate = max(bits/8, 1)
	burst = uint32(min(max(rate/100, least), most, rate*longest))
	return rate, burst, burst + uint32(min(max(rate/20, least), most))
}
