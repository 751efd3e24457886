// Package alloc gives Services their cluster addresses. Each address in use is
// a lease of its own in the store, whose key is the address: two
// servers that choose the same one meet in the store, and one of them chooses
// again. No bitmap, no leader, no scan at start.
package alloc

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/storage"
)

// Prefix is where the addresses in use are stored.
const Prefix = "/alloc/clusterips"

var (
	// ErrTaken is returned when the address asked for belongs to another
	// Service.
	ErrTaken = errors.New("provided IP is already allocated")
	// ErrOutside is returned when the address asked for is not in the range,
	// or is the range's first or last.
	ErrOutside = errors.New("provided IP is not in the valid range")
	// ErrFull is returned when the range has no free address.
	ErrFull = errors.New("range is full")
)

// abandoned is the age from which an address without its Service may be taken
// back. A Service is created within a request, which ends well before.
const abandoned = 5 * time.Minute

// guesses is how many addresses are tried at random before all are looked at.
const guesses = 8

// Owner is the Service that holds an address.
type Owner struct {
	Namespace, Name string
	UID             types.UID
}

func (o Owner) String() string { return o.Namespace + "/" + o.Name }

// Holds tells whether a Service has an address, newest state. It may block.
type Holds func(ctx context.Context, owner Owner, address netip.Addr) (bool, error)

// Addresses allocates from one range. Safe for concurrent use.
type Addresses struct {
	leases leases
	cidr   netip.Prefix
	holds  Holds

	first, size uint64 // of the addresses that may be given out, from the range's base
	static      uint64 // how many of them, at the low end, are given out last
}

// New allocates from cidr, an IPv4 or IPv6 range, and keeps what is taken in
// store, which stores Leases under Prefix.
func New(store storage.Interface, cidr netip.Prefix, holds Holds) (*Addresses, error) {
	bits := cidr.Addr().BitLen() - cidr.Bits()
	if bits < 3 {
		return nil, fmt.Errorf("range %s is too small for Services: want at least 8 addresses", cidr)
	}
	total := uint64(1) << min(bits, 32)
	a := &Addresses{cidr: cidr.Masked(), holds: holds, first: 1, size: total - 1}
	a.leases = newLeases(store, Prefix, func(ctx context.Context, owner Owner, name string) (bool, error) {
		address, err := netip.ParseAddr(name)
		if err != nil {
			return false, nil
		}
		return holds(ctx, owner, address)
	})
	if cidr.Addr().Is4() {
		a.size-- // broadcast
	}
	// The low end is where people put addresses they choose themselves.
	a.static = min(max(16, a.size/16), 256)
	if a.static >= a.size {
		a.static = 0
	}
	return a, nil
}

// Take reserves address for owner. One that is reserved for owner, but not in
// its Service yet, is reserved again: a write may be tried twice.
func (a *Addresses) Take(ctx context.Context, address netip.Addr, owner Owner) error {
	if err := a.check(address); err != nil {
		return err
	}
	return a.leases.take(ctx, address.String(), owner)
}

// TakeAny reserves a free address for owner.
func (a *Addresses) TakeAny(ctx context.Context, owner Owner) (netip.Addr, error) {
	for range guesses {
		address := a.at(a.static + rand.Uint64N(a.size-a.static))
		if known, err := a.leases.read(ctx, address.String(), "0"); err == nil && known.Name != "" {
			continue
		}
		switch err := a.leases.reserve(ctx, address.String(), owner); {
		case err == nil:
			return address, nil
		case !storage.IsExist(err):
			return netip.Addr{}, err
		}
	}
	return a.search(ctx, owner)
}

// search goes through the range in order, from a random place above the static
// end and around.
func (a *Addresses) search(ctx context.Context, owner Owner) (netip.Addr, error) {
	taken, err := a.leases.taken(ctx)
	if err != nil {
		return netip.Addr{}, err
	}
	start := a.static + rand.Uint64N(a.size-a.static)
	// Free ones first; then those that may have been abandoned.
	for _, wantTaken := range []bool{false, true} {
		for i := range a.size {
			address := a.at((start + i) % a.size)
			if taken[address.String()] != wantTaken {
				continue
			}
			switch err := a.Take(ctx, address, owner); {
			case err == nil:
				return address, nil
			case !errors.Is(err, ErrTaken):
				return netip.Addr{}, err
			}
		}
	}
	return netip.Addr{}, ErrFull
}

// Release gives address back, if it is owner's.
func (a *Addresses) Release(ctx context.Context, address netip.Addr, owner Owner) error {
	if !a.contains(address) {
		return nil
	}
	return a.leases.release(ctx, address.String(), owner)
}

// at is the n-th address that may be given out.
func (a *Addresses) at(n uint64) netip.Addr {
	bytes := a.cidr.Addr().AsSlice()
	n += a.first
	for i := len(bytes) - 1; i >= 0 && n > 0; i-- {
		n += uint64(bytes[i])
		bytes[i] = byte(n)
		n >>= 8
	}
	address, _ := netip.AddrFromSlice(bytes)
	return address
}

func (a *Addresses) check(address netip.Addr) error {
	if a.contains(address) {
		return nil
	}
	return fmt.Errorf("%w: the range of valid IPs is %s", ErrOutside, a.cidr)
}

func (a *Addresses) contains(address netip.Addr) bool {
	if !a.cidr.Contains(address) || address == a.cidr.Addr() {
		return false
	}
	return !address.Is4() || address.Next().IsValid() && a.cidr.Contains(address.Next())
}
