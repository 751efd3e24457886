package kubeletapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"
)

// ReadOnlyConfig is of a read-only port.
type ReadOnlyConfig struct {
	Addr netip.AddrPort // to listen at; required
	// Handler answers; required.
	Handler http.Handler
	Logger  *slog.Logger // required
}

// open are the paths that a read-only port has: what is, and how much. Nothing
// that was written by a container, and nothing that runs one.
var open = map[string]bool{
	"/healthz": true, "/pods": true, "/stats/summary": true,
	"/metrics": true, "/metrics/cadvisor": true, "/metrics/probes": true, "/metrics/resource": true,
}

// ReadOnly passes on what a read-only port answers.
func ReadOnly(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !open[r.URL.Path]:
			http.Error(w, "the read-only port does not have this: ask at the kubelet's port, with a token", http.StatusNotFound)
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			http.Error(w, "the read-only port is for reading: use GET", http.StatusMethodNotAllowed)
		default:
			h.ServeHTTP(w, r)
		}
	})
}

// ServeReadOnly serves the read-only port until ctx ends: to anybody who reaches
// it, without TLS and without asking who it is.
func ServeReadOnly(ctx context.Context, cfg ReadOnlyConfig) error {
	if !cfg.Addr.IsValid() || cfg.Handler == nil || cfg.Logger == nil {
		return errors.New("kubeletapi: Addr, Handler and Logger are required")
	}
	cfg.Logger.Warn("the read-only port is open: whoever reaches it sees this node's pods with all that their specifications say, without a token and without TLS", "addr", cfg.Addr)
	return listen(ctx, cfg.Addr, cfg.Logger, "the read-only port cannot be served: end what listens there, or give another --read-only-port (0: none)", func(ln net.Listener) error {
		srv := &http.Server{
			Handler: ReadOnly(cfg.Handler), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 90 * time.Second, MaxHeaderBytes: 64 << 10,
			ErrorLog: slog.NewLogLogger(cfg.Logger.Handler(), slog.LevelDebug),
		}
		return until(ctx, srv, func() error { return srv.Serve(ln) })
	})
}

// listen serves at addr. While another program has the port it says so in the
// log, and tries again: the node does not depend on this.
func listen(ctx context.Context, addr netip.AddrPort, log *slog.Logger, taken string, serve func(net.Listener) error) error {
	for said := false; ; said = true {
		ln, err := net.Listen("tcp", addr.String())
		if err == nil {
			return serve(ln)
		}
		if !said {
			log.Warn(taken, "addr", addr, "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(listenAgain):
		}
	}
}

// until runs serve until ctx ends.
func until(ctx context.Context, srv *http.Server, serve func() error) error {
	done := make(chan error, 1)
	go func() { done <- serve() }()
	select {
	case err := <-done:
		return fmt.Errorf("kubeletapi: %w", err)
	case <-ctx.Done():
		_ = srv.Close()
		<-done
		return nil
	}
}
