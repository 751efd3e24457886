package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/clusterd/clusterd/agent/cdi"
	"github.com/clusterd/clusterd/agent/pressure"
	"github.com/clusterd/clusterd/agent/users"
	"github.com/clusterd/clusterd/apis/server/alloc"
	"github.com/clusterd/clusterd/raftstore"
)

// minLeaseDuration leaves some time for a renewal, and for ending pods.
const minLeaseDuration = 4 * time.Second

// Config is all settings of one node. Defaults come first, then the
// file DATA/config.yaml or the one that --config names, then environment variables (CLUSTERD_MAX_PODS for
// --max-pods), then flags. `clusterd init` and `clusterd join` write
// the file, so that `clusterd run` needs no flag but --data.
type Config struct {
	// Name is the node's name in the cluster. Default: the host name.
	Name string `json:"name"`
	// Data is the directory that holds all of this node's state.
	Data string `json:"-"`
	// File is a file of settings to read in the place of DATA/config.yaml; empty: that one.
	File string `json:"-"`
	// Advertise is the address the other nodes reach this one at. Default: the
	// address of the interface with the default route, else the first address
	// that is not loopback, else loopback. One of IPv4 is preferred, unless it is that
	// of a bridge of containers. When the machine joins, it is of an IP family by
	// which the server is reached.
	Advertise string `json:"advertise"`
	// Toward is the server, HOST:PORT, through which this machine joins a cluster: the
	// default of Advertise is of an IP family by which that is reached. Empty: any.
	Toward string `json:"-"`
	// Port serves the API, raft, gossip and node calls: TCP, and UDP for gossip.
	Port uint16 `json:"port"`
	// KubeletPort serves metrics, stats and logs of this node to those who show
	// a token of the cluster, where tools look for the kubelet; 0: not at all.
	KubeletPort uint16 `json:"kubeletPort"`
	// Peers are addresses of other members, beside those this node remembers,
	// for when all have moved: IP or IP:PORT. They are not written down.
	Peers []string `json:"-"`
	// CgroupRoot is the parent of all pods' cgroups on this machine.
	CgroupRoot string `json:"cgroupRoot"`
	// ClusterCIDR is the range pod addresses come from, fixed at init; or two ranges
	// of different IP families with a comma between, the cluster's own family first.
	// A second one may be added later, behind the first, on every node. Default:
	// 10.244.0.0/14, or fd00:10:244::/48 where Advertise is of IPv6.
	ClusterCIDR string `json:"clusterCIDR,omitempty"`
	// ServiceCIDR is the range Service addresses come from, fixed at init; one of
	// each family that ClusterCIDR has, in the same order. Default: 10.96.0.0/16, or
	// fd00:10:96::/112 where Advertise is of IPv6.
	ServiceCIDR string `json:"serviceCIDR,omitempty"`
	// ServiceNodePortRange are the ports of nodes that Services are given, FIRST-LAST;
	// the same on every server. What Services have of another range they keep.
	ServiceNodePortRange string `json:"serviceNodePortRange"`
	// EvictionDelay is how long the pods of a node that is confirmed to be out
	// of reach are waited for, unless they say otherwise with a toleration.
	EvictionDelay Duration `json:"evictionDelay"`
	// RebalanceInterval is how often the leader looks for pods that would be better on
	// other nodes, and evicts a few of them within their budgets; 0: never.
	RebalanceInterval Duration `json:"rebalanceInterval,omitzero"`
	// GossipKeyAge is how long servers encrypt gossip with the same key at most; 0:
	// until a server is removed or another key is asked for. The leader's value holds.
	GossipKeyAge Duration `json:"gossipKeyAge"`
	// TokenKeyAge is how long tokens of service accounts are signed with the same key
	// at most; 0: until another one is asked for or the CA is rotated. The
	// leader's value holds.
	TokenKeyAge Duration `json:"tokenKeyAge,omitzero"`
	// NodeLeaseDuration is after what time without a renewal this node's lease has
	// run out: whole seconds. Pods that are fenced are ended after three quarters of
	// it, and replaced on other nodes after all of it.
	NodeLeaseDuration Duration `json:"nodeLeaseDuration"`
	// FenceClaims: pods of this node with claims are fenced too, if other nodes
	// reach their volumes, unless their annotation clusterd.local/self-fencing is
	// "false". Default: pods whose annotation is "true", and no others.
	FenceClaims bool `json:"fenceClaims,omitempty"`
	// StartWithoutAPIAfter is how long no API may answer after the start until this node
	// starts the pods that it ran last from its own records, as after a power cut with no
	// server in reach. 0s: it waits for the API, and keeps no records.
	StartWithoutAPIAfter Duration `json:"startWithoutAPIAfter"`
	// StartWithoutAPIMaxAge is how long ago this node may have had an API for it to start pods
	// from its own records; 0s: no matter how long.
	StartWithoutAPIMaxAge Duration `json:"startWithoutAPIMaxAge"`
	// SchedulerConfig is a file with a KubeSchedulerConfiguration: profiles by
	// schedulerName, their plugins and weights. It is read at start; the same file
	// belongs on every server.
	SchedulerConfig string `json:"schedulerConfig,omitempty"`
	// MaxPods is how many pods this node takes.
	MaxPods int `json:"maxPods"`
	// CPUManagerPolicy is none (all pods share all processors) or static
	// (containers of Guaranteed pods that ask for whole processors have them for
	// themselves).
	CPUManagerPolicy string `json:"cpuManagerPolicy,omitempty"`
	// ReservedCPUs are processors that the static policy never assigns
	// exclusively, such as 0 or 0-1,8.
	ReservedCPUs string `json:"reservedCPUs,omitempty"`
	// PodPidsLimit is how many processes and threads one pod may have; 0 or -1:
	// as many as the node.
	PodPidsLimit int64 `json:"podPidsLimit"`
	// StaticPods is the directory of the files of static pods, which this node
	// runs by itself. Default: DATA/static-pods.
	StaticPods string `json:"staticPods,omitempty"`
	// StaticPodsURL is asked every 20 s for more of them; empty: none.
	StaticPodsURL string `json:"staticPodsURL,omitempty"`
	// LogLinks is a directory for a link to each container's log, by the name that
	// log shippers for Kubernetes read, POD_NAMESPACE_CONTAINER-ID.log; they look
	// for it in /var/log/containers. Empty: there are no links.
	LogLinks string `json:"logLinks,omitempty"`
	// PodLogLinks is a directory for a link to each pod's log directory, by the name that
	// log shippers for Kubernetes read, NAMESPACE_NAME_UID; they look for it in
	// /var/log/pods. Empty: there are no links.
	PodLogLinks string `json:"podLogLinks,omitempty"`
	// CDIDirs are the directories, with commas between, of the files that describe this
	// machine's devices to containers (Container Device Interface); of two
	// descriptions of a device the one in the later directory counts.
	CDIDirs string `json:"cdiDirs"`
	// KubeletRoot is the directory in which drivers of volumes and devices look for a kubelet: they
	// register in plugins_registry, and volumes are mounted below pods and plugins.
	// Drivers made for Kubernetes mount /var/lib/kubelet, which is what the packaged
	// unit says. Each node on a machine needs its own. Default: DATA/kubelet.
	KubeletRoot string `json:"kubeletRoot,omitempty"`
	// RaftLog is what keeps raft's log on this node: segments, or bolt for
	// hashicorp/raft-boltdb. A log that was kept otherwise is converted at start.
	RaftLog string `json:"raftLog"`
	// StoreFormatAfter is for how long all servers of a cluster that was upgraded
	// have to have known a new format of the store before it is used: until then
	// the version before can come back. Each server counts for itself.
	StoreFormatAfter Duration `json:"storeFormatAfter"`
	// StoreQuota is how much the live objects of the whole cluster may take, such
	// as 8Gi. The same value belongs on every server.
	StoreQuota string `json:"storeQuota"`
	// StoreQuotas bound single kinds, or a kind in one namespace: RESOURCE,
	// RESOURCE.GROUP, or either with /NAMESPACE, to a size: "secrets/team-a: 10Mi".
	StoreQuotas map[string]string `json:"storeQuotas,omitempty"`
	// StoreHistoryAge and StoreHistorySize are how far back, and up to what
	// size, old states of objects are kept. The leader's values hold.
	StoreHistoryAge  Duration `json:"storeHistoryAge"`
	StoreHistorySize string   `json:"storeHistorySize"`
	// StoreWriterWindow is the time in which one writer, a user or a controller,
	// may fill half of StoreHistorySize; one that writes more is answered 429. 0:
	// no writer is bounded. The same value belongs on every server.
	StoreWriterWindow Duration `json:"storeWriterWindow"`
	// AllowedUnsafeSysctls may be set by pods beside the safe ones: names and
	// prefixes separated by commas, such as net.core.somaxconn,kernel.msg*.
	AllowedUnsafeSysctls string `json:"allowedUnsafeSysctls,omitempty"`
	// ClusterDNS are the addresses of name servers of the cluster that run
	// elsewhere, separated by commas. Empty: each node answers the cluster's
	// names itself, at the tenth address of ServiceCIDR; "none": pods ask the name
	// servers of the host.
	ClusterDNS string `json:"clusterDNS,omitempty"`
	// ClusterDomain is what the names of Services end with. The same value
	// belongs on every node.
	ClusterDomain string `json:"clusterDomain"`
	// ResolvConf is the file of the host's name servers for pods that do not use
	// the cluster's. Default: /etc/resolv.conf, or systemd-resolved's file of
	// real servers where that names its stub alone.
	ResolvConf string `json:"resolvConf,omitempty"`
	// PodUserIDs are the ids of the machine, FIRST-LAST, of which each pod with
	// hostUsers: false gets 65536 for itself; "none": the node has no such pods.
	// What /etc/subuid and /etc/subgid give to others is left out.
	PodUserIDs string `json:"podUserIDs"`
	// EvictionHard are the thresholds below which pods are ended at once, such
	// as memory.available<100Mi,nodefs.available<10%; "none": never.
	EvictionHard string `json:"evictionHard,omitempty"`
	// EvictionSoft are thresholds with a grace period, EvictionSoftGracePeriod,
	// such as memory.available=90s; pods then have their own grace period.
	EvictionSoft            string `json:"evictionSoft,omitempty"`
	EvictionSoftGracePeriod string `json:"evictionSoftGracePeriod,omitempty"`
	// EvictionTransition is how long the node's pressure conditions stay after
	// their cause has gone.
	EvictionTransition Duration `json:"evictionTransition"`
	// SystemReserved is kept from pods, such as cpu=500m,memory=512Mi. Empty:
	// 128 MiB of memory, or a tenth of it.
	SystemReserved string `json:"systemReserved,omitempty"`
	// ImageGCHigh and ImageGCLow are percentages of the images' disk: above the
	// first, images that nothing uses are removed until the second is reached.
	ImageGCHigh  int `json:"imageGCHigh"`
	ImageGCLow   int `json:"imageGCLow"`
	AccessConfig `json:",inline"`
	HostConfig   `json:",inline"`
	ImageConfig  `json:",inline"`

	ShutdownConfig `json:",inline"`
	SnapshotConfig `json:",inline"`

	EncryptionConfig `json:",inline"`
	// FeatureGates switch features of the API server's library, such as
	// APIResponseCompression=false. The same belong on every server.
	FeatureGates string `json:"featureGates,omitempty"`
	// LogLevel is debug, info, warn or error.
	LogLevel string `json:"logLevel"`
	// LogFormat is text or json.
	LogFormat string `json:"logFormat"`
}

// Duration is a time.Duration written as "30s".
type Duration struct{ time.Duration }

// MarshalJSON writes the text form.
func (d Duration) MarshalJSON() ([]byte, error) { return []byte(`"` + d.String() + `"`), nil }

// UnmarshalJSON reads the text form.
func (d *Duration) UnmarshalJSON(b []byte) error {
	v, err := time.ParseDuration(strings.Trim(string(b), `"`))
	if err != nil {
		return fmt.Errorf("%s is not a duration such as 30s or 5m", b)
	}
	d.Duration = v
	return nil
}

// Defaults of Config.
const (
	DefaultData        = "/var/lib/clusterd"
	DefaultDevData     = "/var/lib/clusterd-dev"
	DefaultPort        = 6443
	DefaultKubeletPort = 10250
	DefaultClusterCIDR = "10.244.0.0/14"
	DefaultServiceCIDR = "10.96.0.0/16"

	// Those of clusters whose nodes have addresses of IPv6.
	DefaultClusterCIDR6 = "fd00:10:244::/48"
	DefaultServiceCIDR6 = "fd00:10:96::/112"

	defaultClusterDomain = "cluster.local"
)

func defaultConfig() Config {
	return Config{
		Data:        DefaultData,
		Port:        DefaultPort,
		KubeletPort: DefaultKubeletPort,
		CgroupRoot:  "/clusterd",

		ServiceNodePortRange: alloc.DefaultPorts.String(),

		EvictionDelay: Duration{30 * time.Second},
		GossipKeyAge:  Duration{24 * time.Hour},

		NodeLeaseDuration: Duration{40 * time.Second},

		StartWithoutAPIAfter: Duration{30 * time.Second}, StartWithoutAPIMaxAge: Duration{7 * 24 * time.Hour},

		MaxPods:      110,
		PodPidsLimit: 4096,

		CPUManagerPolicy: cpuPolicyNone,
		ClusterDomain:    defaultClusterDomain,

		RaftLog:            string(raftstore.LogEngines[0]),
		StoreFormatAfter:   Duration{24 * time.Hour},
		StoreQuota:         "8Gi",
		PodUserIDs:         users.DefaultIDRange.String(),
		StoreHistoryAge:    Duration{time.Hour},
		StoreHistorySize:   "64Mi",
		StoreWriterWindow:  Duration{time.Minute},
		EvictionHard:       pressure.Defaults,
		EvictionTransition: Duration{5 * time.Minute},
		ImageGCHigh:        85,
		CDIDirs:            strings.Join(cdi.DefaultDirs, ","),
		ImageGCLow:         80,

		AccessConfig: defaultAccess(),
		HostConfig:   defaultHost(),
		ImageConfig:  defaultImages(),

		ShutdownConfig: defaultShutdown(),
		SnapshotConfig: defaultSnapshots(),

		EncryptionConfig: defaultEncryption(),

		LogLevel:  "info",
		LogFormat: "text",
	}
}

// complete finds what was left empty and checks the rest. Every error names
// the flag, the value and the cure.
func (c *Config) complete() error {
	if c.Name == "" {
		host, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("--name: the host name cannot be read (%w): give one", err)
		}
		c.Name = strings.ToLower(host)
	}
	if errs := validation.IsDNS1123Subdomain(c.Name); len(errs) > 0 {
		return fmt.Errorf("--name %q: %s", c.Name, errs[0])
	}
	if c.Advertise == "" {
		addr, err := c.findAddress()
		if err != nil {
			return err
		}
		c.Advertise = addr.String()
	}
	if addr, err := netip.ParseAddr(c.Advertise); err != nil || addr.IsUnspecified() {
		return fmt.Errorf("--advertise %q: an address of this machine is required, such as 192.0.2.7", c.Advertise)
	}
	if c.Port == 0 {
		return errors.New("--port 0: give a port between 1 and 65535")
	}
	if _, err := c.peerAddrs(); err != nil {
		return err
	}
	if !strings.HasPrefix(c.CgroupRoot, "/") || filepath.Clean(c.CgroupRoot) != c.CgroupRoot || c.CgroupRoot == "/" {
		return fmt.Errorf("--cgroup-root %q: an absolute path below the root is required, such as /clusterd", c.CgroupRoot)
	}
	c.defaultRanges()
	if err := c.checkRanges(); err != nil {
		return err
	}
	if err := c.checkNodePorts(); err != nil {
		return err
	}
	if c.EvictionDelay.Duration < 0 {
		return fmt.Errorf("--eviction-delay %s: it cannot be negative", c.EvictionDelay)
	}
	if every := c.RebalanceInterval.Duration; every != 0 && every < time.Minute {
		return fmt.Errorf("--rebalance-interval %s: give 1m or more, or 0", c.RebalanceInterval)
	}
	if age := c.GossipKeyAge.Duration; age != 0 && age < time.Minute {
		return fmt.Errorf("--gossip-key-age %s: give 1m or more, or 0", c.GossipKeyAge)
	}
	if age := c.TokenKeyAge.Duration; age != 0 && age < 24*time.Hour {
		return fmt.Errorf("--token-key-age %s: give 24h or more, or 0", c.TokenKeyAge)
	}
	if d := c.NodeLeaseDuration.Duration; d < minLeaseDuration || d > time.Hour || d%time.Second != 0 {
		return fmt.Errorf("--node-lease-duration %s: give whole seconds between %s and 1h", d, minLeaseDuration)
	}
	if d := c.StartWithoutAPIAfter.Duration; d != 0 && (d < time.Second || d > time.Hour) {
		return fmt.Errorf("--start-without-api-after %s: give a time between 1s and 1h, or 0s to have pods wait for the API", d)
	}
	if d := c.StartWithoutAPIMaxAge.Duration; d != 0 && d < time.Hour {
		return fmt.Errorf("--start-without-api-max-age %s: give 1h or more, or 0s for no limit", d)
	}
	if c.MaxPods < 1 || c.MaxPods > 10000 {
		return fmt.Errorf("--max-pods %d: give a number between 1 and 10000", c.MaxPods)
	}
	if err := c.checkCPUs(); err != nil {
		return err
	}
	if err := c.checkFeatureGates(); err != nil {
		return err
	}
	if err := c.checkDNS(); err != nil {
		return err
	}
	if _, _, err := c.tlsSANs(); err != nil {
		return err
	}
	if err := c.EncryptionConfig.check(); err != nil {
		return err
	}
	if err := c.AccessConfig.check(); err != nil {
		return err
	}
	if err := c.ShutdownConfig.check(); err != nil {
		return err
	}
	if err := c.SnapshotConfig.check(); err != nil {
		return err
	}
	if err := c.ImageConfig.check(); err != nil {
		return err
	}
	if err := c.HostConfig.check(c.KubeletPort, c.Port); err != nil {
		return err
	}
	if _, err := c.eviction(); err != nil {
		return err
	}
	if c.EvictionTransition.Duration < 0 {
		return fmt.Errorf("--eviction-transition %s: it cannot be negative", c.EvictionTransition)
	}
	if _, err := c.reserved(); err != nil {
		return err
	}
	if _, err := c.podUserIDs(); err != nil {
		return err
	}
	if c.ImageGCLow < 1 || c.ImageGCHigh > 100 || c.ImageGCLow >= c.ImageGCHigh {
		return fmt.Errorf("--image-gc-high %d, --image-gc-low %d: give percentages, the second below the first", c.ImageGCHigh, c.ImageGCLow)
	}
	if c.PodPidsLimit < -1 {
		return fmt.Errorf("--pod-pids-limit %d: give a number of processes, or 0 or -1 for no limit", c.PodPidsLimit)
	}
	if c.StaticPods != "" && !filepath.IsAbs(c.StaticPods) {
		return fmt.Errorf("--static-pods %q: an absolute path is required", c.StaticPods)
	}
	if c.LogLinks != "" && !filepath.IsAbs(c.LogLinks) {
		return fmt.Errorf("--log-links %q: an absolute path is required, such as /var/log/containers", c.LogLinks)
	}
	if c.PodLogLinks != "" && (!filepath.IsAbs(c.PodLogLinks) || filepath.Clean(c.PodLogLinks) == filepath.Clean(c.LogLinks)) {
		return fmt.Errorf("--pod-log-links %q: an absolute path is required, another one than that of --log-links, such as /var/log/pods", c.PodLogLinks)
	}
	if c.KubeletRoot != "" && (!filepath.IsAbs(c.KubeletRoot) || filepath.Clean(c.KubeletRoot) == "/") {
		return fmt.Errorf("--kubelet-root %q: an absolute path of a folder is required, such as /var/lib/kubelet", c.KubeletRoot)
	}
	for _, dir := range c.cdiDirs() {
		if !filepath.IsAbs(dir) {
			return fmt.Errorf("--cdi-dirs %q: absolute paths of folders are required, such as /etc/cdi,/var/run/cdi, or nothing for none", c.CDIDirs)
		}
	}
	if u, err := url.Parse(c.StaticPodsURL); c.StaticPodsURL != "" && (err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https") {
		return fmt.Errorf("--static-pods-url %q: an address is required, such as http://192.0.2.7/pods.yaml", c.StaticPodsURL)
	}
	if _, err := c.storeLimits(); err != nil {
		return err
	}
	if _, err := c.level(); err != nil {
		return err
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		return fmt.Errorf("--log-format %q: text or json", c.LogFormat)
	}
	return nil
}

// staticPods is the directory of static pods.
func (c *Config) staticPods() string {
	if c.StaticPods != "" {
		return c.StaticPods
	}
	return filepath.Join(c.Data, "static-pods")
}

func (c *Config) level() (slog.Level, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return l, fmt.Errorf("--log-level %q: debug, info, warn or error", c.LogLevel)
	}
	return l, nil
}

// peerAddrs are Peers, parsed.
func (c *Config) peerAddrs() ([]netip.AddrPort, error) {
	var addrs []netip.AddrPort
	for _, p := range c.Peers {
		addr, err := netip.ParseAddrPort(p)
		if ip, ipErr := netip.ParseAddr(p); ipErr == nil {
			addr, err = netip.AddrPortFrom(ip, DefaultPort), nil
		}
		if err != nil || addr.Addr().IsUnspecified() || addr.Port() == 0 {
			return nil, fmt.Errorf("--peer %q: the address of another member is required, such as 192.0.2.8 or 192.0.2.8:%d", p, DefaultPort)
		}
		addrs = append(addrs, addr)
	}
	return addrs, nil
}

// addr is where the node listens and is reached.
func (c *Config) addr() netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(c.Advertise), c.Port)
}
