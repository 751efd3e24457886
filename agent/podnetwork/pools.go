package podnetwork

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"

	"github.com/clusterd/clusterd/netsetup/ipam"
)

// ipamFiles are below Config.Dir: the addresses of the node's first range, by
// which networks are named, and those of its second one.
var ipamFiles = []string{"ipam.json", "ipam-2.json"}

// pools are the node's addresses: one pool for each of its ranges, in their order.
// What one of them cannot do is undone in the other.
type pools []*ipam.Pool

// openPools opens the pools of the ranges. The first address of each is the
// gateway's.
func openPools(dir string, ranges []netip.Prefix) (pools, error) {
	var p pools
	for i, r := range ranges {
		one, err := ipam.Open(ipam.Config{File: filepath.Join(dir, ipamFiles[i]), Prefix: r, Reserved: []netip.Addr{gatewayOf(r)}})
		if err != nil {
			return nil, err
		}
		p = append(p, one)
	}
	return p, nil
}

// gatewayOf is the node's own address in one of its ranges.
func gatewayOf(r netip.Prefix) netip.Addr { return r.Addr().Next() }

// onRecord reads which pod, by UID, has which addresses by what the files say.
func onRecord(dir string) (map[string][]netip.Addr, error) {
	out := map[string][]netip.Addr{}
	for i, file := range ipamFiles {
		allocated, err := ipam.Allocated(filepath.Join(dir, file))
		if err != nil {
			return nil, err
		}
		for uid, addr := range allocated {
			if i > 0 && len(out[uid]) != i {
				continue // it has no network: the record of the first range went
			}
			out[uid] = append(out[uid], addr)
		}
	}
	return out, nil
}

func (p pools) allocate(uid string) ([]netip.Prefix, error) {
	had := p.has(uid)
	var addrs []netip.Prefix
	for i, one := range p {
		addr, err := one.Allocate(uid)
		if err != nil {
			if !had {
				err = errors.Join(err, p[:i].release(uid))
			}
			return nil, err
		}
		addrs = append(addrs, addr)
	}
	return addrs, nil
}

// has reports whether the pod has an address.
func (p pools) has(uid string) bool {
	_, has := p[0].Lookup(uid)
	return has
}

func (p pools) release(uid string) error {
	var errs []error
	for _, one := range p {
		errs = append(errs, one.Release(uid))
	}
	return errors.Join(errs...)
}

func (p pools) reconcile(uids []string) error {
	var errs []error
	for _, one := range p {
		_, err := one.Reconcile(uids)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (p pools) reserve() ([]netip.Prefix, bool) {
	var addrs []netip.Prefix
	for i, one := range p {
		addr, ok := one.Reserve()
		if !ok {
			p[:i].forget(addrs)
			return nil, false
		}
		addrs = append(addrs, addr)
	}
	return addrs, true
}

func (p pools) forget(addrs []netip.Prefix) {
	for i, addr := range addrs {
		p[i].Forget(addr)
	}
}

// claim gives the reserved addresses to a pod. The first range's comes last: a
// network is a pod's once the record of that says so.
func (p pools) claim(uid string, addrs []netip.Prefix) error {
	for i, one := range slices.Backward(p) {
		if err := one.Claim(uid, addrs[i]); err != nil {
			return errors.Join(fmt.Errorf("addresses %v: %w", addrs, err), p[i+1:].release(uid))
		}
	}
	return nil
}

// bare are the addresses without lengths.
func bare(addrs []netip.Prefix) []netip.Addr {
	out := make([]netip.Addr, len(addrs))
	for i, a := range addrs {
		out[i] = a.Addr()
	}
	return out
}
