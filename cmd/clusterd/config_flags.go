package main

import (
	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"
)

// The areas that --help groups flags by, in its order.
const (
	areaNode       = "node"
	areaPods       = "pods"
	areaEviction   = "eviction"
	areaImages     = "images"
	areaNetwork    = "network"
	areaScheduling = "scheduling"
	areaStore      = "store"
	areaAPI        = "API server"
	areaAudit      = "audit"
	areaKeys       = "keys"
	areaLogs       = "logs and traces"
	areaCluster    = "cluster-wide (fixed at init)"
)

// flagArea is the annotation of a flag that says which area it belongs to.
const flagArea = "area"

// addFlags binds a flag to each field that may be set by hand.
func (c *Config) addFlags(f *pflag.FlagSet) {
	var areas cliflag.NamedFlagSets
	c.addNodeFlags(areas.FlagSet(areaNode))
	c.addPodFlags(areas.FlagSet(areaPods))
	c.addEvictionFlags(areas.FlagSet(areaEviction))
	c.addImageFlags(areas.FlagSet(areaImages))
	c.addNetworkFlags(areas.FlagSet(areaNetwork))
	c.addSchedulingFlags(areas.FlagSet(areaScheduling))
	c.addStoreFlags(areas.FlagSet(areaStore))
	areas.FlagSet(areaKeys).DurationVar(&c.TokenKeyAge.Duration, "token-key-age", c.TokenKeyAge.Duration, "maximum age of the key that signs service account tokens (0 = rotated by clusterctl token-keys rotate and with the authority)")
	areas.FlagSet(areaAPI).StringVar(&c.FeatureGates, "feature-gates", c.FeatureGates, "feature gates of the Kubernetes API server, such as APIResponseCompression=false; the same on every server")
	areas.FlagSet(areaLogs).StringVar(&c.LogLevel, "log-level", c.LogLevel, "debug, info, warn or error")
	areas.FlagSet(areaLogs).StringVar(&c.LogFormat, "log-format", c.LogFormat, "text or json")
	c.AccessConfig.addFlags(&areas)
	c.HostConfig.addFlags(&areas)
	c.ImageConfig.addFlags(areas.FlagSet(areaImages))
	c.ShutdownConfig.addFlags(areas.FlagSet(areaNode))
	c.SnapshotConfig.addFlags(areas.FlagSet(areaStore))
	c.EncryptionConfig.addFlags(&areas)
	addAreas(f, areas)
}

// addClusterFlags binds the flags that only `init` has: they hold for the
// whole cluster.
func (c *Config) addClusterFlags(f *pflag.FlagSet) {
	var areas cliflag.NamedFlagSets
	own := areas.FlagSet(areaCluster)
	own.StringVar(&c.ClusterCIDR, "cluster-cidr", c.ClusterCIDR, "range of pod addresses: one IPv4 range, one IPv6 range, or both separated by a comma (default: "+DefaultClusterCIDR+", or "+DefaultClusterCIDR6+" where --advertise is of IPv6)")
	own.StringVar(&c.ServiceCIDR, "service-cidr", c.ServiceCIDR, "range of Service addresses, of the same IP families as --cluster-cidr (default: "+DefaultServiceCIDR+", or "+DefaultServiceCIDR6+")")
	c.EncryptionConfig.addClusterFlags(own)
	addAreas(f, areas)
}

// addAreas adds the flags of all areas to f, each annotated with its area.
func addAreas(f *pflag.FlagSet, areas cliflag.NamedFlagSets) {
	for _, area := range areas.Order {
		areas.FlagSets[area].VisitAll(func(flag *pflag.Flag) {
			flag.Annotations = map[string][]string{flagArea: {area}}
			f.AddFlag(flag)
		})
	}
}

func (c *Config) addNodeFlags(f *pflag.FlagSet) {
	f.StringVar(&c.Data, "data", c.Data, "data directory of this node")
	f.StringVar(&c.File, "config", c.File, "additional configuration file; its keys override those of DATA/config.yaml, flags override both")
	f.StringVar(&c.Name, "name", c.Name, "name of this node (default: the host name)")
	f.StringVar(&c.Advertise, "advertise", c.Advertise, "address at which other nodes reach this one (default: found from the interfaces)")
	f.Uint16Var(&c.Port, "port", c.Port, "port of the control plane: TCP for the API, Raft and node calls, UDP for gossip")
	f.Uint16Var(&c.KubeletPort, "kubelet-port", c.KubeletPort, "port for kubelet-compatible tools: metrics, stats, logs and exec of this node (0 = off)")
	f.StringArrayVar(&c.Peers, "peer", nil, "address of another member, if all have moved since this node last ran; may be repeated")
	f.StringVar(&c.CgroupRoot, "cgroup-root", c.CgroupRoot, "parent cgroup of all pods")
	f.DurationVar(&c.NodeLeaseDuration.Duration, "node-lease-duration", c.NodeLeaseDuration.Duration, "time without a renewal after which this node's lease expires")
	f.DurationVar(&c.StartWithoutAPIAfter.Duration, "start-without-api-after", c.StartWithoutAPIAfter.Duration, "time without an API after the start until this node starts its last pods from its own records (0s: never)")
	f.DurationVar(&c.StartWithoutAPIMaxAge.Duration, "start-without-api-max-age", c.StartWithoutAPIMaxAge.Duration, "time since this node last had an API after which it starts no pods from its own records (0s: no limit)")
	f.BoolVar(&c.FenceClaims, "fence-claims", c.FenceClaims, "when the lease cannot be renewed, also stop pods whose volumes other nodes can attach, so that they are replaced there")
	f.StringVar(&c.SystemReserved, "system-reserved", c.SystemReserved, "resources reserved for the system, such as cpu=500m,memory=512Mi (default: some memory)")
}

func (c *Config) addPodFlags(f *pflag.FlagSet) {
	f.IntVar(&c.MaxPods, "max-pods", c.MaxPods, "maximum number of pods on this node")
	f.StringVar(&c.CPUManagerPolicy, "cpu-manager-policy", c.CPUManagerPolicy, "none, or static: exclusive CPUs for Guaranteed pods that request whole CPUs")
	f.StringVar(&c.ReservedCPUs, "reserved-cpus", c.ReservedCPUs, "CPUs that the static policy never assigns exclusively, such as 0-1")
	f.Int64Var(&c.PodPidsLimit, "pod-pids-limit", c.PodPidsLimit, "maximum number of processes and threads of a pod (0 or -1 = unlimited)")
	f.StringVar(&c.PodUserIDs, "pod-user-ids", c.PodUserIDs, "host ids, FIRST-LAST, of which each pod with hostUsers: false gets 65536 (none = no such pods)")
	f.StringVar(&c.AllowedUnsafeSysctls, "allowed-unsafe-sysctls", c.AllowedUnsafeSysctls, "sysctls that pods may set beside the safe ones, such as net.core.somaxconn,kernel.msg*")
	f.StringVar(&c.StaticPods, "static-pods", c.StaticPods, "directory of static pod manifests (default: DATA/static-pods)")
	f.StringVar(&c.StaticPodsURL, "static-pods-url", c.StaticPodsURL, "URL of further static pod manifests")
	f.StringVar(&c.LogLinks, "log-links", c.LogLinks, "directory for links to container logs, as log shippers expect them in /var/log/containers (empty = none)")
	f.StringVar(&c.PodLogLinks, "pod-log-links", c.PodLogLinks, "directory for links to pods' log directories, as log shippers expect them in /var/log/pods (empty = none)")
	f.StringVar(&c.CDIDirs, "cdi-dirs", c.CDIDirs, "directories, separated by commas, of Container Device Interface specifications")
	f.StringVar(&c.KubeletRoot, "kubelet-root", c.KubeletRoot, "kubelet directory in which CSI and DRA drivers register, one per node: most expect /var/lib/kubelet (default: DATA/kubelet)")
	f.StringVar(&c.ResolvConf, "resolv-conf", c.ResolvConf, "resolv.conf of pods that do not use cluster DNS (default: /etc/resolv.conf, or the one behind systemd-resolved's stub)")
}

func (c *Config) addEvictionFlags(f *pflag.FlagSet) {
	f.StringVar(&c.EvictionHard, "eviction-hard", c.EvictionHard, "thresholds below which pods are evicted at once (none = never)")
	f.StringVar(&c.EvictionSoft, "eviction-soft", c.EvictionSoft, "thresholds with a grace period, such as memory.available<500Mi")
	f.StringVar(&c.EvictionSoftGracePeriod, "eviction-soft-grace-period", c.EvictionSoftGracePeriod, "grace period of each soft threshold, such as memory.available=90s")
	f.DurationVar(&c.EvictionTransition.Duration, "eviction-transition", c.EvictionTransition.Duration, "how long a pressure condition stays after its cause is gone")
}

func (c *Config) addImageFlags(f *pflag.FlagSet) {
	f.IntVar(&c.ImageGCHigh, "image-gc-high", c.ImageGCHigh, "disk usage in percent above which unused images are removed")
	f.IntVar(&c.ImageGCLow, "image-gc-low", c.ImageGCLow, "disk usage in percent down to which unused images are removed")
}

func (c *Config) addNetworkFlags(f *pflag.FlagSet) {
	f.StringVar(&c.ServiceNodePortRange, "service-node-port-range", c.ServiceNodePortRange, "ports, FIRST-LAST, for Services of type NodePort and LoadBalancer; the same on every server")
	f.StringVar(&c.ClusterDNS, "cluster-dns", c.ClusterDNS, "addresses of external cluster DNS servers, such as 192.0.2.53, or none: pods use those of the host (default: each node answers by itself)")
	f.StringVar(&c.ClusterDomain, "cluster-domain", c.ClusterDomain, "DNS domain of Services; the same on every node")
	f.DurationVar(&c.GossipKeyAge.Duration, "gossip-key-age", c.GossipKeyAge.Duration, "maximum age of the gossip encryption key (0 = rotated only when a server is removed)")
}

func (c *Config) addSchedulingFlags(f *pflag.FlagSet) {
	f.DurationVar(&c.EvictionDelay.Duration, "eviction-delay", c.EvictionDelay.Duration, "grace period before pods of an unreachable node are evicted")
	f.DurationVar(&c.RebalanceInterval.Duration, "rebalance-interval", c.RebalanceInterval.Duration, "how often pods that fit better on other nodes are evicted, within their PodDisruptionBudgets (0 = never)")
	f.StringVar(&c.SchedulerConfig, "scheduler-config", c.SchedulerConfig, "file with a KubeSchedulerConfiguration; the same on every server")
}

func (c *Config) addStoreFlags(f *pflag.FlagSet) {
	f.StringVar(&c.RaftLog, "raft-log", c.RaftLog, "storage engine of the Raft log: segments, or bolt (hashicorp/raft-boltdb); converted at start when changed")
	f.DurationVar(&c.StoreFormatAfter.Duration, "store-format-after", c.StoreFormatAfter.Duration, "how long all servers of an upgraded cluster must support a new store format before it is used; afterwards the previous version cannot come back")
	f.StringVar(&c.StoreQuota, "store-quota", c.StoreQuota, "maximum size of the cluster's live objects; the same on every server")
	f.DurationVar(&c.StoreHistoryAge.Duration, "store-history-age", c.StoreHistoryAge.Duration, "how long old states of objects are kept")
	f.StringVar(&c.StoreHistorySize, "store-history-size", c.StoreHistorySize, "maximum size of the old states of objects")
	f.DurationVar(&c.StoreWriterWindow.Duration, "store-writer-window", c.StoreWriterWindow.Duration, "time in which one writer may fill half of the history; writers above this rate get 429 (0 = unlimited); the same on every server")
}
