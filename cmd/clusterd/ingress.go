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
		Short: "Serve the cluster's Ingresses and Gateways; what the pods of kube-system/clusterd-ingress run",
		Long: `Serve the cluster's Ingresses and Gateways. It is the program of the pods of the
DaemonSet kube-system/clusterd-ingress, which clusterd makes when there is an
Ingress or a Gateway of one of its classes, and reads the API as its pod's
service account.`,
		Args: cobra.NoArgs,
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
	f.StringVar(&cfg.HTTP, "http", cfg.HTTP, "where plain requests come in")
	f.StringVar(&cfg.HTTPS, "https", cfg.HTTPS, "where requests over TLS come in")
	f.StringVar(&cfg.Admin, "admin", cfg.Admin, "where /healthz, /readyz and /metrics are")
	f.DurationVar(&cfg.Proxy.ResponseTimeout, "response-timeout", cfg.Proxy.ResponseTimeout, "how long a backend may take to begin its answer")
	f.DurationVar(&cfg.Proxy.BodyTimeout, "request-body-timeout", cfg.Proxy.BodyTimeout, "for how long a client may send nothing of a request's body; negative: any time (streams of gRPC may rest)")
	f.BoolVar(&access, "access-log", access, "write a line of JSON for each request to the standard output")
	return cmd
}

// ownImage is made of this program, which a node needs no registry for.
func ownImage() image.Own {
	return image.Own{Ref: loop.Image, Program: "/proc/self/exe", Path: "/clusterd"}
}
