package clustertest

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// Dump repeats a dump of the kernel's that was interrupted, as something came or went
// meanwhile.
func Dump[T any](dump func() ([]T, error)) ([]T, error) {
	for {
		list, err := dump()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return list, err
		}
	}
}
