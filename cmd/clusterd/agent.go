package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"net/netip"
	"os"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/cpuset"

	"github.com/clusterd/clusterd/agent"
	"github.com/clusterd/clusterd/agent/cpu"
	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/podnetwork"
	"github.com/clusterd/clusterd/agent/runtime"
	"github.com/clusterd/clusterd/cmd/clusterd/pki"
	"github.com/clusterd/clusterd/cmd/clusterd/transport"
)

// readyNetworks is how many pod networks a node keeps ready. A burst of pods
// drains them, and then each waits for its own.
const readyNetworks = 8

// runAgent finds or starts podmon, then runs the agent and answers the node's
// calls until ctx ends. The containers stay.
func (m *Main) runAgent(ctx context.Context) error {
	containers, err := startRuntime(ctx, m.cfg, room(m.log, "runtime"))
	if err != nil {
		return err
	}
	defer containers.Close()
	rest := m.api.ClientConfigFor(pki.NodeUserPrefix+m.cfg.Name, pki.NodesGroup)
	client, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return fmt.Errorf("make the agent's client: %w", err)
	}
	heartbeat, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return fmt.Errorf("make the agent's client: %w", err)
	}
	addr := m.cfg.addr().Addr()
	network, err := podnetwork.New(podnetwork.Config{
		NodeName: m.cfg.Name,
		NodeIP:   addr,
		Client:   client,
		Dir:      m.dir.path("network"),
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix(m.cfg.ClusterCIDR)},
		Ready:    readyNetworks,
		Logger:   room(m.log, "netsetup"),
	})
	if err != nil {
		return fmt.Errorf("open the pod network: %w", err)
	}
	cpus, err := processors(m.cfg)
	if err != nil {
		return err
	}
	settings := agent.Config{
		NodeName:        m.cfg.Name,
		NodeIP:          addr,
		DataDir:         m.cfg.Data,
		CgroupRoot:      m.cfg.CgroupRoot,
		Client:          client,
		HeartbeatClient: heartbeat,
		Runtime:         containers,
		Images:          m.images,
		Network:         network,
		Version:         kubeVersion(),
		MaxPods:         m.cfg.MaxPods,
		PidsLimit:       m.cfg.PodPidsLimit,
		CPUs:            cpus,
		NodePort:        int32(m.cfg.Port),
		StaticDir:       m.cfg.staticPods(),
		StaticURL:       m.cfg.StaticPodsURL,
	}
	if err := m.cfg.settings(&settings); err != nil {
		return err
	}
	a, err := agent.New(settings)
	if err != nil {
		return err
	}
	calls := http.NewServeMux()
	calls.Handle("/", a.Handler())
	calls.HandleFunc("GET "+storePath, func(w http.ResponseWriter, _ *http.Request) {
		reply(w, http.StatusOK, m.store.Status())
	})
	calls.HandleFunc("POST "+recoveryPath, m.clusterAPI.postRecoveryOrder)
	work, ctx := errgroup.WithContext(ctx)
	work.Go(func() error { return a.Run(ctx) })
	work.Go(func() error { return serveHTTP(m.port.HTTPOver(transport.Node), calls)(ctx) })
	return work.Wait()
}

// processors says which containers have processors of their own. Without the
// static policy it takes back what was given while it was in force.
func processors(cfg Config) (pod.CPUs, error) {
	file := dataDir(cfg.Data).path("cpus.json")
	static := cfg.CPUManagerPolicy == cpuPolicyStatic
	if _, err := os.Stat(file); !static && errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	topology, err := cpu.Discover("/sys")
	if err != nil {
		return nil, err
	}
	reserved, err := cpuset.Parse(cfg.ReservedCPUs)
	if err != nil {
		return nil, err
	}
	return cpu.New(cpu.Config{Topology: topology, Reserved: reserved, File: file, Shared: !static})
}

// startRuntime connects to the data folder's podmon, starting one if none
// lives.
func startRuntime(ctx context.Context, cfg Config, log *slog.Logger) (*runtime.Client, error) {
	c, err := runtime.Start(ctx, runtime.Config{Dir: dataDir(cfg.Data).path("podmon"), CgroupRoot: cfg.CgroupRoot, Logger: log})
	if err != nil {
		return nil, fmt.Errorf("reach podmon: %w", err)
	}
	return c, nil
}
