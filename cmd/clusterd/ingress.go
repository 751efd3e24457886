package main

import (
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/ingress"
	"github.com/clusterd/clusterd/ingress/proxy"
	loop "github.com/clusterd/clusterd/sched/ingress"
)

// ingressDrain is how long the pod's nodes may take to hear that it ends.
const ingressDrain = 5 * time.Second

func ingressCommand() *cobra.Command {
	cfg := ingress.Config{HTTP: ":8080", HTTPS: ":8443", Admin: ":9090", Proxy: proxy.Config{ResponseTimeout: time.Minute, BodyTimeout: time.Minute, Drain: ingressDrain}}
	access := true
	cmd := &cobra.Command{
		Use:   "ingress",
		Short: "Run the proxy for Ingresses and Gateways (used by the pods of kube-system/clusterd-ingress)",
		Long: `Run the proxy for Ingresses and Gateways. The pods of the DaemonSet
kube-system/clusterd-ingress run it. clusterd creates that DaemonSet when there is an
Ingress or a Gateway of one of its classes. The proxy reads the API as the service
account of its pod.`,
		Example: "  clusterd ingress --http :8080 --https :8443   # in a pod",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			in, err := rest.InClusterConfig()
			if err != nil {
				return fmt.Errorf("clusterd ingress runs in a pod: %w", err)
			}
			in.QPS = -1
			in.UserAgent = "clusterd-ingress"
			in.ContentType, in.AcceptContentTypes = "application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf,application/json"
			if cfg.Client, err = kubernetes.NewForConfig(in); err != nil {
				return err
			}
			if cfg.Dynamic, err = dynamic.NewForConfig(in); err != nil {
				return err
			}
			cfg.Logger = slog.New(slog.NewJSONHandler(os.Stderr, nil))
			if access {
				cfg.Proxy.Access = slog.New(slog.NewJSONHandler(os.Stdout, nil))
			}
			return ingress.Run(cmd.Context(), cfg)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.HTTP, "http", cfg.HTTP, "address for plain HTTP")
	f.StringVar(&cfg.HTTPS, "https", cfg.HTTPS, "address for HTTPS")
	f.StringVar(&cfg.Admin, "admin", cfg.Admin, "address for /healthz, /readyz and /metrics")
	f.DurationVar(&cfg.Proxy.ResponseTimeout, "response-timeout", cfg.Proxy.ResponseTimeout, "time in which a backend must begin its response")
	f.DurationVar(&cfg.Proxy.BodyTimeout, "request-body-timeout", cfg.Proxy.BodyTimeout, "time for which a client may send nothing of a request body (negative = unlimited, for idle gRPC streams)")
	f.BoolVar(&access, "access-log", access, "write a line of JSON for each request to the standard output")
	return cmd
}

// ownImage is made of this program, which a node needs no registry for.
func ownImage() image.Own {
	return image.Own{Ref: loop.Image, Program: "/proc/self/exe", Path: "/clusterd"}
}
