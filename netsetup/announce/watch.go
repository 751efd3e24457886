package announce

import (
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// watch is what Answered knows between two calls.
type watch struct {
	mu        sync.Mutex
	questions *questions
	link      netlink.Link
	own       map[string]bool
	read      time.Time // when link and own were
}

// linkLifetime is how long Answered goes by what it has read of the interfaces.
const linkLifetime = 5 * time.Second

// Answered asks the neighbours for addresses, and returns those for which another machine
// of the segment answers within a time; it returns as soon as all are answered for. The
// kernel of the other machine answers: how busy its programs are does not matter. Where
// there is no Ethernet none is. That the link has no carrier is an error. It does not wait for Set and Renew, nor they for it.
func (a *Announcer) Answered(addrs []netip.Addr, within time.Duration) (map[netip.Addr]bool, error) {
	w := &a.watch
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.link == nil || time.Since(w.read) > linkLifetime {
		link, _, err := a.find()
		if err != nil {
			return nil, fmt.Errorf("ask neighbours: %w", err)
		}
		if w.own, err = a.macs(link); err != nil {
			return nil, fmt.Errorf("ask neighbours: %w", err)
		}
		w.link, w.read = link, time.Now()
	}
	answered, err := a.ask(w.questions, w.link, w.own, addrs, within)
	if err == nil && len(answered) < len(addrs) && len(w.own) > 0 {
		err = a.carries(w.link)
	}
	if err != nil {
		w.link = nil
		return nil, fmt.Errorf("ask neighbours: %w", err)
	}
	return answered, nil
}

// carries is an error if the link has no carrier: it says nothing of the neighbours
// then that they do not answer.
func (a *Announcer) carries(link netlink.Link) error {
	now, err := a.h.LinkByIndex(link.Attrs().Index)
	if err != nil {
		return err
	}
	if now.Attrs().RawFlags&(unix.IFF_UP|unix.IFF_LOWER_UP) != unix.IFF_UP|unix.IFF_LOWER_UP {
		return fmt.Errorf("%s has no carrier", now.Attrs().Name)
	}
	return nil
}

// Tell has all neighbours learn again that addresses which are announced here are this
// machine's: another one may have announced them meanwhile.
func (a *Announcer) Tell(addrs []netip.Addr) error {
	link, has, err := a.find()
	if err != nil {
		return fmt.Errorf("announce: %w", err)
	}
	for _, addr := range addrs {
		if has[addr] != absent {
			a.tell(link, addr)
		}
	}
	return nil
}
