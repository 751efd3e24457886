package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent"
	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/podnetwork"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
)

// Defaults of `clusterd standalone`.
const (
	DefaultStandaloneData = "/var/lib/clusterd-standalone"
	DefaultStandaloneCIDR = "10.243.0.0/24"
	// DefaultStandaloneCIDR6 is for machines whose address is of IPv6.
	DefaultStandaloneCIDR6 = "fd00:10:243::/64"
)

func standaloneCommand() *cobra.Command {
	cfg := defaultConfig()
	cfg.Data = DefaultStandaloneData
	cfg.CgroupRoot = "/clusterd-standalone"
	var podCIDR string
	var archives []string
	var once bool
	cmd := &cobra.Command{
		Use:   "standalone",
		Short: "Run static pods on this machine, without a cluster and without an API",
		Long: `Run static pods on this machine, without a cluster and without an API.

Every file of the directory holds one or more Pods, in YAML or JSON; changes are picked
up at once. Containers outlive this command: when it is started again, it finds them.
The node's API is served on the socket agent.sock in the data directory.`,
		Example: `  sudo clusterd standalone --static-pods /etc/pods
  sudo clusterd standalone --static-pods-url http://192.0.2.7/pods.yaml --image app.tar

  # Run the pods of a directory to completion; the exit status says whether all succeeded:
  sudo clusterd standalone --run-once --static-pods /etc/jobs

  # What runs, and what a container wrote:
  sudo curl --unix-socket ` + DefaultStandaloneData + `/agent.sock http://node/pods
  sudo curl --unix-socket ` + DefaultStandaloneData + `/agent.sock http://node/containerLogs/default/web-HOST/main`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := start(cmd, &cfg); err != nil {
				return err
			}
			cidr, err := standaloneRange(podCIDR, cfg.addr().Addr())
			if err != nil {
				return err
			}
			if nodedir.Dir(cfg.Data).Member() {
				return fmt.Errorf("--data %s: this is a cluster's node, whose static pods `clusterd run` runs; choose another directory", cfg.Data)
			}
			return standalone(cmd.Context(), cfg, cidr, archives, once)
		},
	}
	cfg.addFlags(cmd.Flags())
	cmd.Flags().StringVar(&podCIDR, "pod-cidr", "", "range of pod addresses (default: "+DefaultStandaloneCIDR+", or "+DefaultStandaloneCIDR6+" where --advertise is of IPv6)")
	cmd.Flags().StringArrayVar(&archives, "image", nil, "image archive to load first, as docker save writes it; may be repeated")
	cmd.Flags().BoolVar(&once, "run-once", false, "run the pods to completion and exit: 0 if all succeeded, else 1")
	for _, name := range []string{"port", "eviction-delay", "node-lease-duration", "fence-claims", "start-without-api-after", "start-without-api-max-age"} { // of clusters
		_ = cmd.Flags().MarkHidden(name)
	}
	return cmd
}

// standaloneRange reads --pod-cidr; empty: of the family of the node's address.
func standaloneRange(text string, node netip.Addr) (netip.Prefix, error) {
	if text == "" {
		text = DefaultStandaloneCIDR
		if familyOf(node).six {
			text = DefaultStandaloneCIDR6
		}
	}
	cidr, err := netip.ParsePrefix(text)
	most := 29
	if err == nil && cidr.Addr().Is6() {
		most = nodeBits6
	}
	if err != nil || cidr != cidr.Masked() || cidr.Addr().Is4In6() || cidr.Bits() > most {
		return cidr, fmt.Errorf("--pod-cidr %q: a range of at least 8 addresses is required, such as %s, or a /%d of IPv6 or a larger one, such as %s", text, DefaultStandaloneCIDR, nodeBits6, DefaultStandaloneCIDR6)
	}
	return cidr, nil
}

// standalone runs the agent and nothing else until ctx ends; once: until the
// pods have ended.
func standalone(ctx context.Context, cfg Config, podCIDR netip.Prefix, archives []string, once bool) error {
	log, err := newLogger(cfg, cfg.withOwnLog(os.Stderr))
	if err != nil {
		return err
	}
	dir := nodedir.Dir(cfg.Data)
	lock, err := dir.Lock()
	if err != nil {
		return err
	}
	defer lock.Close()
	images, err := openImages(cfg, log)
	if err != nil {
		return err
	}
	defer func() { _ = images.Close() }() // never fails
	for _, path := range archives {
		if err := loadArchive(ctx, images, path); err != nil {
			return fmt.Errorf("--image %s: %w", path, err)
		}
	}
	if err := noteHostDirs(dir, cfg); err != nil {
		return fmt.Errorf("record the folders that this node uses: %w", err)
	}
	containers, err := startRuntime(ctx, cfg, room(log, "runtime"))
	if err != nil {
		return err
	}
	defer containers.Close()
	nodeIPs := cfg.nodeIPs(log)
	network, err := podnetwork.New(podnetwork.Config{
		NodeName: cfg.Name, NodeIPs: nodeIPs, PodCIDR: podCIDR, Dir: dir.Path("network"), Ready: readyNetworks, Logger: room(log, "netsetup"),
	})
	if err != nil {
		return fmt.Errorf("open the pod network: %w", err)
	}
	cpus, allocatable, err := processors(cfg)
	if err != nil {
		return err
	}
	tracer, flush, err := newTracer(ctx, cfg, log, agentService)
	if err != nil {
		return err
	}
	defer flush()
	settings := agent.Config{
		NodeName: cfg.Name, NodeIPs: nodeIPs, DataDir: cfg.Data, CgroupRoot: cfg.CgroupRoot,
		Runtime: containers, Images: images, Network: network, Version: kubeVersion(), MaxPods: cfg.MaxPods,
		PidsLimit: max(cfg.PodPidsLimit, 0), CPUs: cpus, AllocatableCPUs: allocatable, Tracer: tracer.Tracer(tracerName),
		StaticDir: cfg.staticPods(), StaticURL: cfg.StaticPodsURL,
		OnEvent: func(e *corev1.Event) {
			level := slog.LevelInfo
			if e.Type == corev1.EventTypeWarning {
				level = slog.LevelWarn
			}
			o := e.InvolvedObject
			log.Log(context.Background(), level, e.Message, "reason", e.Reason, "kind", o.Kind, "object", o.Name, "field", o.FieldPath)
		},
	}
	if err := errors.Join(cfg.settings(&settings), cfg.hostSettings(&settings)); err != nil {
		return err
	}
	warnOf(log, settings.Notices)
	if len(cfg.nodeDNS()) > 0 {
		settings.ClusterDNS = nil // there is no cluster whose names it could answer
	}
	if once {
		return runOnce(ctx, settings, log)
	}
	a, err := agent.New(settings)
	if err != nil {
		return err
	}
	socket := dir.Path("agent.sock")
	_ = os.Remove(socket) // of a run that was killed; the lock says that none lives
	ln, err := net.Listen("unix", socket)
	if err != nil {
		return fmt.Errorf("listen for the node's calls: %w", err)
	}
	if err := os.Chmod(socket, 0o600); err != nil {
		ln.Close()
		return err
	}
	log.Info("static pods are run", "folder", cfg.staticPods(), "url", cfg.StaticPodsURL, "data", cfg.Data)
	work, ctx := errgroup.WithContext(ctx)
	work.Go(func() error { return a.Run(ctx) })
	work.Go(func() error { return serveHTTP(log, ln, a.Handler())(ctx) })
	if cfg.ReadOnlyPort != 0 {
		work.Go(func() error { return readOnly(cfg, log, a.Handler())(ctx) })
	}
	return work.Wait()
}

// runOnce runs the static pods to their end. It is an error if one has failed.
func runOnce(ctx context.Context, settings agent.Config, log *slog.Logger) error {
	log.Info("static pods are run to their end", "folder", settings.StaticDir, "url", settings.StaticURL, "data", settings.DataDir)
	results, err := agent.RunOnce(ctx, settings, func(r agent.PodResult) {
		if r.Phase == corev1.PodSucceeded {
			log.Info("a pod has succeeded", "pod", r.Name)
		} else {
			log.Warn("a pod has failed", "pod", r.Name, "why", r.Why)
		}
	})
	if err != nil {
		return fmt.Errorf("--run-once: %w", err)
	}
	var failed []string
	for _, r := range results {
		if r.Phase != corev1.PodSucceeded {
			failed = append(failed, r.Name)
		}
	}
	if len(failed) > 0 {
		return fmt.Errorf("--run-once: %d of %d pods have failed: %s", len(failed), len(results), strings.Join(failed, ", "))
	}
	return nil
}

// loadArchive loads the images of a file.
func loadArchive(ctx context.Context, images *image.Store, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = images.Load(ctx, f)
	return err
}
