// Package ingress is the way in for HTTP: the program of a pod that answers by
// the cluster's Ingresses, and the routes of its Gateways. It is a client of the API that reads and
// never writes.
package ingress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/ingress/kinds"
	"github.com/clusterd/clusterd/ingress/proxy"
	"github.com/clusterd/clusterd/ingress/watch"
)

// Config of Run. Addresses are as net.Listen takes them and required.
type Config struct {
	Client kubernetes.Interface
	// Dynamic is for the kinds of Gateways. Required.
	Dynamic dynamic.Interface
	// HTTP and HTTPS are for strangers; Admin has /healthz, /readyz and /metrics.
	HTTP, HTTPS, Admin string
	// Proxy is how requests are carried.
	Proxy  proxy.Config
	Logger *slog.Logger // default slog.Default()
}

// Run answers until ctx ends, and then lets what is under way end.
func Run(ctx context.Context, cfg Config) error {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	cfg.Proxy.Logger = cfg.Logger
	p := proxy.New(cfg.Proxy)
	var listeners []net.Listener
	for _, addr := range []string{cfg.HTTP, cfg.HTTPS, cfg.Admin} {
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
		if err != nil {
			for _, l := range listeners {
				err = errors.Join(err, l.Close())
			}
			return fmt.Errorf("ingress: %w", err)
		}
		listeners = append(listeners, l)
	}
	admin := &http.Server{Handler: adminHandler(p), ReadHeaderTimeout: 10 * time.Second}
	cfg.Logger.Info("requests are answered", "http", listeners[0].Addr(), "https", listeners[1].Addr(), "admin", listeners[2].Addr())
	work, stopping := errgroup.WithContext(ctx)
	// The rules are kept, and the admin's questions answered, until the last
	// request has been.
	rest, over := context.WithCancel(context.WithoutCancel(ctx))
	defer over()
	work.Go(func() error {
		defer over()
		return p.Serve(stopping, listeners[0], listeners[1])
	})
	work.Go(func() error {
		k := kinds.New(cfg.Dynamic, cfg.Client.Discovery())
		return watch.Run(rest, watch.Config{Client: cfg.Client, Kinds: k, Set: p.Set, Logger: cfg.Logger})
	})
	work.Go(func() error {
		if err := admin.Serve(listeners[2]); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	work.Go(func() error {
		<-rest.Done()
		return admin.Close()
	})
	if err := work.Wait(); err != nil {
		return fmt.Errorf("ingress: %w", err)
	}
	return nil
}

func adminHandler(p *proxy.Proxy) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(p.Collectors()...)
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if p.Table() == nil {
			http.Error(w, "the rules of this cluster are not known yet", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}
