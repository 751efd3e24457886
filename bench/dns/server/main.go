// Command server is agent/dns as an agent runs it, with its watches and nothing beside
// them: what bench/dns measures.
package main

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/agent/dns"
	"github.com/clusterd/clusterd/agent/watches"
)

func main() {
	addr := flag.String("addr", "", "where to answer: 127.0.0.1:PORT")
	api := flag.String("api", "", "URL of the API server")
	upstream := flag.String("upstream", "", "name server that is asked for other names")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := serve(ctx, *addr, *api, *upstream); err != nil {
		fmt.Fprintln(os.Stderr, "bench dns server:", err)
		os.Exit(1)
	}
}

func serve(ctx context.Context, at, api, upstream string) error {
	addr, err := netip.ParseAddrPort(at)
	if err != nil {
		return fmt.Errorf("-addr: %w", err)
	}
	client, err := kubernetes.NewForConfig(&rest.Config{Host: api, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/vnd.kubernetes.protobuf"}})
	if err != nil {
		return err
	}
	w, err := watches.New(client)
	if err != nil {
		return err
	}
	s, err := dns.New(dns.Config{
		Addrs: []netip.Addr{addr.Addr()}, Port: addr.Port(), Client: client, Services: w.Services, Slices: w.Slices,
		Upstreams: func() ([]string, error) { return []string{upstream}, nil },
	})
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return w.Run(ctx) })
	g.Go(func() error { return s.Run(ctx) })
	return g.Wait()
}
