// Package alloc gives Services their cluster addresses. Each address in use is
// a lease of its own in the store, whose key is the address: two
// servers that choose the same one meet in the store, and one of them chooses
// again. No bitmap, no leader, no scan at start.
package alloc

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
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

// Others are what a cluster says of its addresses beside the range that it was
// begun with. Both functions may block, and may be nil.
type Others struct {
	// Ranges are what may be given out when the cluster's own range is full.
	Ranges func(ctx context.Context) ([]netip.Prefix, error)
	// Reserved reports whether an address is reserved for another owner.
	Reserved func(ctx context.Context, address netip.Addr, owner Owner) (bool, error)
}

// Addresses allocates from one range, and from others when that is full. Safe
// for concurrent use.
type Addresses struct {
	leases leases
	span   span
	others Others
	holds  Holds
}

// New allocates from cidr, an IPv4 or IPv6 range, and keeps what is taken in
// store, which stores Leases under Prefix.
func New(store storage.Interface, cidr netip.Prefix, holds Holds, others Others) (*Addresses, error) {
	span, ok := newSpan(cidr)
	if !ok {
		return nil, fmt.Errorf("range %s is too small for Services: want at least 8 addresses", cidr)
	}
	a := &Addresses{span: span, others: others, holds: holds}
	a.leases = newLeases(store, Prefix, func(ctx context.Context, owner Owner, name string) (bool, error) {
		address, err := netip.ParseAddr(name)
		if err != nil {
			return false, nil
		}
		return holds(ctx, owner, address)
	})
	return a, nil
}

// spans are the ranges in the order in which they are filled. Those of the other
// family, and those that are too small, are none of ours.
func (a *Addresses) spans(ctx context.Context) ([]span, error) {
	spans := []span{a.span}
	if a.others.Ranges == nil {
		return spans, nil
	}
	ranges, err := a.others.Ranges(ctx)
	if err != nil {
		return nil, err
	}
	for _, cidr := range ranges {
		if s, ok := newSpan(cidr); ok && s.cidr != a.span.cidr && s.cidr.Addr().Is4() == a.span.cidr.Addr().Is4() {
			spans = append(spans, s)
		}
	}
	return spans, nil
}

// Take reserves address for owner. One that is reserved for owner, but not in
// its Service yet, is reserved again: a write may be tried twice.
func (a *Addresses) Take(ctx context.Context, address netip.Addr, owner Owner) error {
	if err := a.check(ctx, address, owner); err != nil {
		return err
	}
	return a.leases.take(ctx, address.String(), owner)
}

// TakeAny reserves a free address for owner.
func (a *Addresses) TakeAny(ctx context.Context, owner Owner) (netip.Addr, error) {
	if address, err := a.guess(ctx, a.span, owner); err != nil || address.IsValid() {
		return address, err
	}
	spans, err := a.spans(ctx)
	if err != nil {
		return netip.Addr{}, err
	}
	return a.search(ctx, spans, owner)
}

// guess tries some addresses at random; an invalid one: none of them was free.
func (a *Addresses) guess(ctx context.Context, s span, owner Owner) (netip.Addr, error) {
	for range guesses {
		address := s.any()
		if known, err := a.leases.read(ctx, address.String(), "0"); err == nil && known.Name != "" {
			continue
		}
		if reserved, err := a.reserved(ctx, address, owner); err != nil {
			return netip.Addr{}, err
		} else if reserved {
			continue
		}
		switch err := a.leases.reserve(ctx, address.String(), owner); {
		case err == nil:
			return address, nil
		case !storage.IsExist(err):
			return netip.Addr{}, err
		}
	}
	return netip.Addr{}, nil
}

// search goes through each range in order, from a random place above the static
// end and around.
func (a *Addresses) search(ctx context.Context, spans []span, owner Owner) (netip.Addr, error) {
	taken, err := a.leases.taken(ctx)
	if err != nil {
		return netip.Addr{}, err
	}
	// Free ones first; then those that may have been abandoned.
	for _, wantTaken := range []bool{false, true} {
		for _, s := range spans {
			for address := range s.all() {
				if taken[address.String()] != wantTaken {
					continue
				}
				switch err := a.take(ctx, address, owner); {
				case err == nil:
					return address, nil
				case !errors.Is(err, ErrTaken):
					return netip.Addr{}, err
				}
			}
		}
	}
	return netip.Addr{}, ErrFull
}

// take is Take for an address that is known to be in a range.
func (a *Addresses) take(ctx context.Context, address netip.Addr, owner Owner) error {
	if reserved, err := a.reserved(ctx, address, owner); err != nil {
		return err
	} else if reserved {
		return ErrTaken
	}
	return a.leases.take(ctx, address.String(), owner)
}

// reserved reports whether address is reserved for another owner.
func (a *Addresses) reserved(ctx context.Context, address netip.Addr, owner Owner) (bool, error) {
	if a.others.Reserved == nil {
		return false, nil
	}
	reserved, err := a.others.Reserved(ctx, address, owner)
	if err != nil {
		return false, fmt.Errorf("look for who has reserved %s: %w", address, err)
	}
	return reserved, nil
}

// Release gives address back, if it is owner's.
func (a *Addresses) Release(ctx context.Context, address netip.Addr, owner Owner) error {
	return a.leases.release(ctx, address.String(), owner)
}

// check is nil for an address that may be given to owner if it is free.
func (a *Addresses) check(ctx context.Context, address netip.Addr, owner Owner) error {
	if !a.span.contains(address) {
		spans, err := a.spans(ctx)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(spans, func(s span) bool { return s.contains(address) }) {
			return fmt.Errorf("%w: the range of valid IPs is %s", ErrOutside, join(spans))
		}
	}
	if reserved, err := a.reserved(ctx, address, owner); err != nil {
		return err
	} else if reserved {
		return fmt.Errorf("%w: the IPAddress %s is another's", ErrTaken, address)
	}
	return nil
}

func join(spans []span) string {
	var texts []string
	for _, s := range spans {
		texts = append(texts, s.cidr.String())
	}
	return strings.Join(texts, ", ")
}
