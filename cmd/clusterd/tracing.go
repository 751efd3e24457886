package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/resource"
	"go.opentelemetry.io/otel/trace"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/tracing"
)

// Names by which traces tell the two apart, as Kubernetes' programs call
// themselves.
const (
	serverService = "apiserver"
	agentService  = "kubelet"
)

// flushTimeout is how long the last spans may take at the end.
const flushTimeout = 5 * time.Second

// newTracer makes the provider of spans of one service of this node; end sends
// those that are left. Without a configuration it makes none.
func newTracer(ctx context.Context, cfg Config, log *slog.Logger, service string) (_ tracing.TracerProvider, end func(), err error) {
	t, err := cfg.tracing()
	if err != nil {
		return nil, nil, err
	}
	provider, err := tracing.NewProvider(ctx, t, nil, []resource.Option{resource.WithAttributes(
		attribute.String("service.name", service), attribute.String("service.instance.id", cfg.Name),
		attribute.String("service.version", version()), attribute.String("k8s.node.name", cfg.Name),
	)})
	if err != nil {
		return nil, nil, fmt.Errorf("--tracing-config %s: %w", cfg.TracingConfig, err)
	}
	return provider, func() {
		ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			log.Warn("the last spans were not sent", "service", service, "err", err)
		}
	}, nil
}

// tracedClient is the client with whose requests its spans go on.
func tracedClient(cfg Config, client *rest.Config, tracer trace.TracerProvider) *rest.Config {
	if cfg.TracingConfig != "" {
		client.Wrap(tracing.WrapperFor(tracer))
	}
	return client
}
