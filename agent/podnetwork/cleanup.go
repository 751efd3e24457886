package podnetwork

import (
	"context"
	"errors"
	"fmt"

	"github.com/clusterd/clusterd/netsetup/nft"
)

// CleanUp removes everything a Network of that configuration made, in the
// present network namespace: namespaces, interfaces, bridge, routes and rules.
// Only Dir and Bridge matter. It can be repeated, and is no error when there is
// nothing.
func CleanUp(ctx context.Context, cfg Config) error {
	n, err := New(cfg)
	if err != nil {
		return err
	}
	defer n.close()
	var errs []error
	names, err := n.spaces.List()
	if err != nil {
		errs = append(errs, fmt.Errorf("list namespaces: %w", err))
	}
	for _, name := range names {
		if err := n.spaces.Delete(name); err != nil {
			errs = append(errs, fmt.Errorf("namespace %s: %w", name, err))
		}
	}
	errs = append(errs, n.links.CleanUp(n.cfg.Bridge), n.routes.CleanUp(ctx), n.filter.CleanUp(nft.Table{Name: nft.DefaultTable}), n.frames.CleanUp())
	return errors.Join(errs...)
}

// close gives the sockets back; it changes nothing in the kernel.
func (n *Network) close() {
	n.links.Close()
	n.routes.Close()
	n.flows.Close()
	_ = n.tables.Close()
}
