package proxy

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/clusterd/clusterd/ingress/route"
)

// relisten is how long after a port could not be opened it is tried again.
const relisten = 5 * time.Second

// ports keeps those open that the table's Gateways have beside the two that are
// always: until ctx ends, whose servers close them.
func (p *Proxy) ports(ctx context.Context, plain, secure *http.Server) error {
	open := map[route.Bind]net.Listener{}
	failed := map[route.Bind]bool{} // reported
	var serving errgroup.Group
	again := time.NewTicker(relisten)
	defer again.Stop()
	for {
		wanted := map[route.Bind]bool{}
		if t := p.table.Load(); t != nil {
			for _, b := range t.Listeners() {
				wanted[b] = true
			}
		}
		for b, l := range open {
			if !wanted[b] {
				_ = l.Close()
				delete(open, b)
			}
		}
		for b := range wanted {
			if open[b] != nil {
				continue
			}
			l, err := p.cfg.Listen(ctx, b.Local)
			if err != nil {
				if !failed[b] && ctx.Err() == nil {
					p.cfg.Logger.Warn("a port of a Gateway cannot be opened", "port", b.Port, "local", b.Local, "err", err)
				}
				failed[b] = true
				continue
			}
			delete(failed, b)
			open[b] = l
			serving.Go(func() error {
				serve := plain.Serve
				if b.TLS {
					serve = func(l net.Listener) error { return secure.ServeTLS(l, "", "") }
				}
				if err := served(serve(l)); err != nil && !errors.Is(err, net.ErrClosed) {
					return err
				}
				return nil
			})
		}
		select {
		case <-ctx.Done():
			return serving.Wait()
		case <-p.changed:
		case <-again.C:
		}
	}
}
