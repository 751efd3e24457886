// Package sched decides what should be where: the scheduler and all
// controllers. Its loops are clients of the Kubernetes API and nothing else:
// they know no store, touch no kernel and read no file. They run on the raft
// leader only, but their safety never rests on being alone: every write either
// names the version it was decided on or can be put right by the next pass.
package sched

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/accounttoken"
	"github.com/clusterd/clusterd/sched/attachdetach"
	"github.com/clusterd/clusterd/sched/bootstraptoken"
	"github.com/clusterd/clusterd/sched/certificatesigning"
	"github.com/clusterd/clusterd/sched/clusterroleaggregation"
	"github.com/clusterd/clusterd/sched/cronjob"
	"github.com/clusterd/clusterd/sched/daemonset"
	"github.com/clusterd/clusterd/sched/deployment"
	"github.com/clusterd/clusterd/sched/devicetaint"
	"github.com/clusterd/clusterd/sched/disruption"
	"github.com/clusterd/clusterd/sched/endpoints"
	"github.com/clusterd/clusterd/sched/endpointslice"
	"github.com/clusterd/clusterd/sched/ephemeralvolume"
	"github.com/clusterd/clusterd/sched/gateway"
	"github.com/clusterd/clusterd/sched/gc"
	"github.com/clusterd/clusterd/sched/hpa"
	"github.com/clusterd/clusterd/sched/ingress"
	"github.com/clusterd/clusterd/sched/ipaddress"
	"github.com/clusterd/clusterd/sched/job"
	"github.com/clusterd/clusterd/sched/kubedns"
	"github.com/clusterd/clusterd/sched/kubeservice"
	"github.com/clusterd/clusterd/sched/loadbalancer"
	"github.com/clusterd/clusterd/sched/localpath"
	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/namespace"
	"github.com/clusterd/clusterd/sched/nodeipam"
	"github.com/clusterd/clusterd/sched/nodelifecycle"
	"github.com/clusterd/clusterd/sched/persistentvolume"
	"github.com/clusterd/clusterd/sched/podcertificate"
	"github.com/clusterd/clusterd/sched/podgc"
	"github.com/clusterd/clusterd/sched/podgroupprotection"
	"github.com/clusterd/clusterd/sched/policytypecheck"
	"github.com/clusterd/clusterd/sched/quota"
	"github.com/clusterd/clusterd/sched/rebalance"
	"github.com/clusterd/clusterd/sched/replicaset"
	"github.com/clusterd/clusterd/sched/resourceclaim"
	"github.com/clusterd/clusterd/sched/scheduler"
	"github.com/clusterd/clusterd/sched/serviceaccount"
	"github.com/clusterd/clusterd/sched/servicecidr"
	"github.com/clusterd/clusterd/sched/statefulset"
	"github.com/clusterd/clusterd/sched/storagemigration"
	"github.com/clusterd/clusterd/sched/storageprotection"
)

// Config is what the room is given. Fields are required unless they say
// otherwise.
type Config struct {
	// Client is used by all loops. Its rate limit, if it has one, should not be
	// client-go's default of 5 requests a second.
	Client kubernetes.Interface
	// EventClient writes Events, apart from Client so that a flood of them
	// cannot hold up decisions. Default: Client.
	EventClient kubernetes.Interface
	// Metadata reads and deletes objects of any kind, for garbage collection
	// and namespace deletion.
	Metadata metadata.Interface

	// Dynamic is a client for custom kinds; nil: StorageVersionMigrations and
	// Gateways are another controller's. Gateways are caches of the kinds of the Gateway
	// API; nil: they are another controller's.
	Dynamic  dynamic.Interface
	Gateways Gateways

	// ClusterCIDR is cut into pod networks of NodeCIDRBits each, a range of IPv6 into
	// ones of 64. Two ranges are of different IP families. Defaults: 10.244.0.0/14
	// and 24.
	ClusterCIDR  []netip.Prefix
	NodeCIDRBits int

	// ServiceCIDR are the ranges of cluster addresses, one of each family that
	// ClusterCIDR has and in its order; default: 10.96.0.0/16.
	ServiceCIDR []netip.Prefix

	// ClusterDNS are the addresses, one of each ServiceCIDR, at which each node
	// answers the cluster's names; none: another server answers them.
	ClusterDNS []netip.Addr

	// RootCA is the PEM bundle that pods verify the API server with. If it is
	// empty, namespaces get no kube-root-ca.crt.
	RootCA []byte
	// TokenKeys are the ids of the keys that verify tokens of service accounts, so
	// that Secrets with tokens of others are filled again. Nil: they are not.
	TokenKeys func(ctx context.Context) ([]string, error)

	// SignClient signs client certificates for the API; nil: requests for them
	// stay unsigned.
	SignClient SignClient

	// Liveness tells of nodes that seem dead sooner than their leases do.
	// Optional.
	Liveness Liveness
	// EvictionDelay is how long a node is NotReady before its NoExecute taint is
	// set; 0: at once. Pods then stay for their own tolerationSeconds.
	EvictionDelay time.Duration

	// Scheduler is how pods are placed; see ReadSchedulerConfig. Optional.
	Scheduler SchedulerConfig

	// Rebalance is how often a few pods may be evicted that would be better on other
	// nodes; 0: never.
	Rebalance time.Duration
	// RebalanceSettled is for how long pods must have been ready for that; 0: 10 min.
	RebalanceSettled time.Duration

	// Hold waits while the clock is not to be believed; it is called before each
	// reconcile. nil: it always is.
	Hold func(context.Context)
	// Clock is for tests; default: the real one.
	Clock clock.WithTicker
}

// SchedulerConfig is the scheduler's configuration; its zero value is the default.
type SchedulerConfig = scheduler.Config

// ReadSchedulerConfig reads a KubeSchedulerConfiguration, YAML or JSON. Errors
// name the field and what would do instead.
func ReadSchedulerConfig(data []byte) (SchedulerConfig, error) { return scheduler.ReadConfig(data) }

// SignClient signs what certificatesigning has checked.
type SignClient = certificatesigning.Sign

// Gateways are caches of the kinds of Gateways; they are run once.
type Gateways = gateway.Kinds

// Liveness is implemented by cmd/clusterd from gossip and the nodes' control
// connections. Both methods may be called from one goroutine each.
type Liveness interface {
	// Suspects yields names of nodes that gossip newly suspects or holds for
	// dead. It is a hint: nothing follows from it alone. The sender must not
	// block for long without a receiver.
	Suspects() <-chan string
	// Confirm returns nil if the node's agent answered over its control
	// connection before ctx ended.
	Confirm(ctx context.Context, node string) error
}

// Loop is one named activity; Run blocks until ctx is cancelled and all that it
// started has ended.
type Loop = loop.Loop

// All returns THE list of loops. They share one set of informers, which is
// itself the first of the list: they work only when run together, once.
func All(cfg Config) ([]Loop, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	shared := newSharedInformers(cfg.Client)
	env := loop.Env{
		Client:    cfg.Client,
		Informers: shared,
		Events:    loop.NewEvents(cfg.EventClient, cfg.Clock),
		Clock:     cfg.Clock,
		Hold:      cfg.Hold,
	}
	var planner *scheduler.Planner
	constructors := []func() (Loop, error){
		func() (Loop, error) { return Loop{Name: "events", Run: env.Events.Run}, nil },
		func() (l Loop, _ error) { l, planner = scheduler.New(env, cfg.Scheduler); return l, nil },
		func() (Loop, error) { return deployment.New(env) },
		func() (Loop, error) { return replicaset.New(env) },
		func() (Loop, error) { return replicaset.NewForReplicationControllers(env) },
		func() (Loop, error) { return statefulset.New(env) },
		func() (Loop, error) { return daemonset.New(env) },
		func() (Loop, error) { return job.New(env) },
		func() (Loop, error) { return job.NewOrphans(env) },
		func() (Loop, error) { return cronjob.New(env) },
		func() (Loop, error) { return hpa.New(env), nil },
		func() (Loop, error) {
			return nodelifecycle.New(env, nodelifecycle.Config{Liveness: cfg.Liveness, EvictionDelay: cfg.EvictionDelay})
		},
		func() (Loop, error) { return nodeipam.New(env, cfg.nodeRanges()) },
		func() (Loop, error) { return podgc.New(env), nil },
		func() (Loop, error) { return persistentvolume.New(env), nil },
		func() (Loop, error) { return localpath.New(env), nil },
		func() (Loop, error) { return attachdetach.New(env) },
		func() (Loop, error) { return ephemeralvolume.New(env), nil },
		func() (Loop, error) { return resourceclaim.New(env) },
		func() (Loop, error) { return devicetaint.New(env) },
		func() (Loop, error) { return storageprotection.New(env), nil },
		func() (Loop, error) { return podgroupprotection.New(env), nil },
		func() (Loop, error) { return endpointslice.New(env), nil },
		func() (Loop, error) { return endpoints.New(env), nil },
		func() (Loop, error) { return kubeservice.New(env, cfg.ServiceCIDR[0]), nil },
		func() (Loop, error) { return kubedns.New(env, cfg.ClusterDNS), nil },
		func() (Loop, error) {
			return servicecidr.New(env, servicecidr.Ranges{Services: cfg.ServiceCIDR, Pods: cfg.ClusterCIDR}), nil
		},
		func() (Loop, error) { return ipaddress.New(env) },
		func() (Loop, error) { return loadbalancer.New(env), nil },
		func() (Loop, error) { return ingress.New(env), nil },
		func() (Loop, error) { return disruption.New(env), nil },
		func() (Loop, error) { return gc.New(env, cfg.Metadata, shared.of), nil },
		func() (Loop, error) { return namespace.New(env, cfg.Metadata), nil },
		func() (Loop, error) { return serviceaccount.New(env, cfg.RootCA), nil },
		func() (Loop, error) { return clusterroleaggregation.New(env), nil },
		func() (Loop, error) { return quota.New(env, cfg.Metadata), nil },
		func() (Loop, error) { return accounttoken.New(env, cfg.RootCA, cfg.TokenKeys), nil },
		func() (Loop, error) { return bootstraptoken.New(env), nil },
		func() (Loop, error) { return certificatesigning.New(env, cfg.SignClient), nil },
		func() (Loop, error) { return podcertificate.New(env), nil },
		func() (Loop, error) { return policytypecheck.New(env), nil },
	}
	if cfg.Rebalance > 0 {
		constructors = append(constructors, func() (Loop, error) { return rebalance.New(env, planner, cfg.Rebalance, cfg.RebalanceSettled), nil })
	}
	if cfg.Dynamic != nil {
		constructors = append(constructors, func() (Loop, error) { return storagemigration.New(env, cfg.Metadata, cfg.Dynamic), nil })
	}
	if cfg.Dynamic != nil && cfg.Gateways != nil {
		constructors = append(constructors, func() (Loop, error) { return gateway.New(env, cfg.Dynamic, cfg.Gateways), nil })
	}
	loops := []Loop{shared.loop()}
	for _, construct := range constructors {
		l, err := construct()
		if err != nil {
			return nil, fmt.Errorf("sched: %w", err)
		}
		loops = append(loops, l)
	}
	return loops, nil
}

// Run runs all loops until ctx is cancelled (leadership ended, or the process
// stops) and returns when every one of them has ended. A loop that ends by
// itself ends the others.
func Run(ctx context.Context, cfg Config) error {
	loops, err := All(cfg)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, l := range loops {
		group.Go(func() error {
			if err := l.Run(loop.WithName(ctx, l.Name)); err != nil {
				return fmt.Errorf("loop %s: %w", l.Name, err)
			}
			if ctx.Err() == nil {
				return fmt.Errorf("loop %s: %w", l.Name, errEnded)
			}
			return nil
		})
	}
	klog.FromContext(ctx).Info("controllers started", "loops", len(loops))
	err = group.Wait()
	klog.FromContext(ctx).Info("controllers ended")
	return err
}

// errEnded is returned when a loop returned before its context was cancelled.
var errEnded = errors.New("exited unexpectedly")

func (cfg *Config) complete() error {
	if cfg.Client == nil || cfg.Metadata == nil {
		return errors.New("sched: Config.Client and Config.Metadata are required")
	}
	if cfg.EventClient == nil {
		cfg.EventClient = cfg.Client
	}
	if len(cfg.ClusterCIDR) == 0 {
		cfg.ClusterCIDR = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/14")}
	}
	if len(cfg.ServiceCIDR) == 0 {
		cfg.ServiceCIDR = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
	}
	if cfg.NodeCIDRBits == 0 {
		cfg.NodeCIDRBits = 24
	}
	if cfg.Clock == nil {
		cfg.Clock = loop.Clock{}
	}
	return nil
}

// nodeBits6 is the length of a node's range of IPv6: that of a subnet.
const nodeBits6 = 64

func (cfg *Config) nodeRanges() (out []nodeipam.Range) {
	for _, cluster := range cfg.ClusterCIDR {
		r := nodeipam.Range{Cluster: cluster, Bits: cfg.NodeCIDRBits}
		if cluster.Addr().Is6() {
			r.Bits = nodeBits6
		}
		out = append(out, r)
	}
	return out
}

// LoopOf names the loop in whose work a request with this context is made; ""
// outside of loops.
func LoopOf(ctx context.Context) string { return loop.NameOf(ctx) }

// Collectors returns all metrics of the room, for the process's registry.
func Collectors() []prometheus.Collector {
	return slices.Concat(loop.Collectors(), scheduler.Collectors(), nodelifecycle.Collectors(), devicetaint.Collectors(), rebalance.Collectors(), gc.Collectors())
}
