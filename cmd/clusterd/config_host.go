package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apiserver/pkg/server/options"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	cliflag "k8s.io/component-base/cli/flag"
	tracingapi "k8s.io/component-base/tracing/api/v1"

	"github.com/clusterd/clusterd/agent"
	"github.com/clusterd/clusterd/agent/host"
	"github.com/clusterd/clusterd/agent/node"
	"github.com/clusterd/clusterd/agent/nodelog"
	"github.com/clusterd/clusterd/apis/server/admission/noderestriction"
	"github.com/clusterd/clusterd/member/releases"
)

// HostConfig is what the machine of a node is to be like and is known by, and
// what it tells to whom.
type HostConfig struct {
	// FailSwapOn refuses to start on a machine that swaps. Containers with a limit
	// of memory never swap; those without may.
	FailSwapOn bool `json:"failSwapOn,omitempty"`
	// NodeIP is the node's InternalIP, or one of each family, IPv4 and IPv6,
	// separated by a comma, the first being the primary. An interface of the
	// machine has each. Default: the address that is advertised, and in a cluster of
	// two IP families the other family's of the same interface, if it has one.
	NodeIP string `json:"nodeIP,omitempty"`
	// NodeAddresses are further addresses in the Node's status, which a cloud would
	// tell elsewhere: TYPE=ADDRESS, separated by commas, of the types ExternalIP,
	// ExternalDNS and InternalDNS.
	NodeAddresses string `json:"nodeAddresses,omitempty"`
	// NodeLabels are labels, KEY=VALUE separated by commas, that this node's Node has
	// when it is made. Whoever may can change them later; the node does not put them back.
	NodeLabels string `json:"nodeLabels,omitempty"`
	// RegisterWithTaints are taints, KEY=VALUE:EFFECT separated by commas, that the
	// Node has when it is made, so that no pod gets there before.
	RegisterWithTaints string `json:"registerWithTaints,omitempty"`
	// TLSSANs are further names and addresses, separated by commas, by which clients
	// call this server's API: of a load balancer, of DNS, of a router before it. They
	// stand in its certificate, which is made again when they change. Agents have none.
	TLSSANs string `json:"tlsSANs,omitempty"`
	// ReadOnlyPort serves pods, metrics and stats of this node to every client that
	// reaches it, without a token and without TLS; 0: not at all.
	ReadOnlyPort uint16 `json:"readOnlyPort,omitempty"`
	// NodeLogs answers at /logs/ of the node's calls with the machine's logs, to
	// those who may read nodes/log or nodes/proxy.
	NodeLogs bool `json:"nodeLogs"`
	// TracingConfig is a file with a TracingConfiguration
	// (apiserver.config.k8s.io/v1): where the spans of the API server and of the
	// agent are sent to, by OTLP, and how many of them.
	TracingConfig string `json:"tracingConfig,omitempty"`
	// ReleaseKeys are the public keys of minisign's, separated by commas, that this
	// node takes releases by (clusterctl upgrade). Default: those that the cluster
	// trusts (clusterctl upgrade trust), which servers tell.
	ReleaseKeys string `json:"releaseKeys,omitempty"`
}

func defaultHost() HostConfig { return HostConfig{NodeLogs: true} }

func (c *HostConfig) addFlags(areas *cliflag.NamedFlagSets) {
	f := areas.FlagSet(areaNode)
	f.BoolVar(&c.FailSwapOn, "fail-swap-on", c.FailSwapOn, "refuse to start while swap is on")
	f.StringVar(&c.NodeIP, "node-ip", c.NodeIP, "InternalIP of the node, or one IPv4 and one IPv6 address separated by a comma (default: the advertised address; in a dual-stack cluster also the other family's of the same interface)")
	f.StringVar(&c.NodeAddresses, "node-addresses", c.NodeAddresses, "additional addresses for the node status, such as ExternalIP=203.0.113.7,ExternalDNS=n1.example.org")
	f.StringVar(&c.NodeLabels, "node-labels", c.NodeLabels, "labels of the Node when it is created, such as disk=ssd,topology.kubernetes.io/zone=a")
	f.StringVar(&c.RegisterWithTaints, "register-with-taints", c.RegisterWithTaints, "taints of the Node when it is created, such as dedicated=db:NoSchedule")
	areas.FlagSet(areaAPI).StringVar(&c.TLSSANs, "tls-san", c.TLSSANs, "additional SANs of the API certificate, separated by commas, such as api.example.org,203.0.113.7")
	f.Uint16Var(&c.ReadOnlyPort, "read-only-port", c.ReadOnlyPort, "unauthenticated plain-HTTP port for the pods, metrics and stats of this node (0 = off)")
	areas.FlagSet(areaLogs).BoolVar(&c.NodeLogs, "node-logs", c.NodeLogs, "serve the machine's logs to users with access to nodes/log")
	areas.FlagSet(areaLogs).StringVar(&c.TracingConfig, "tracing-config", c.TracingConfig, "file with a TracingConfiguration: OTLP endpoint for spans of the API server and the agent (default: none)")
	areas.FlagSet(areaKeys).StringVar(&c.ReleaseKeys, "release-keys", c.ReleaseKeys, "minisign public keys of releases that this node accepts, separated by commas (default: those that the cluster trusts)")
}

// check holds what can be held against nothing but itself.
func (c *HostConfig) check(kubeletPort, port uint16) error {
	if _, err := host.NodeIPs(c.NodeIP); err != nil {
		return err
	}
	if _, err := host.Addresses(c.NodeAddresses); err != nil {
		return err
	}
	if _, err := c.registration(); err != nil {
		return err
	}
	if kubeletPort == port {
		return fmt.Errorf("--kubelet-port %d: it is --port too: choose another, such as %d, or 0 for none", kubeletPort, DefaultKubeletPort)
	}
	if c.ReadOnlyPort != 0 && (c.ReadOnlyPort == kubeletPort || c.ReadOnlyPort == port) {
		return fmt.Errorf("--read-only-port %d: it is --port or --kubelet-port too: choose another, such as 10255", c.ReadOnlyPort)
	}
	if _, err := releases.ParseKeys(c.ReleaseKeys); err != nil {
		return fmt.Errorf("--release-keys: %w", err)
	}
	return nil
}

// registration is what this node's Node is made with.
func (c *HostConfig) registration() (r node.Registration, err error) {
	if r.Labels, err = node.ParseLabels(c.NodeLabels); err != nil {
		return r, fmt.Errorf("--node-labels: %w", err)
	}
	for _, key := range slices.Sorted(maps.Keys(r.Labels)) {
		if noderestriction.Restricted(key) {
			return r, fmt.Errorf("--node-labels: %q: a node may not give itself this label: set it from outside (kubectl label node NAME %[1]s=%s), or choose one outside of kubernetes.io and k8s.io", key, r.Labels[key])
		}
	}
	if r.Taints, err = node.ParseTaints(c.RegisterWithTaints); err != nil {
		return r, fmt.Errorf("--register-with-taints: %w", err)
	}
	return r, nil
}

// tracing reads TracingConfig; nil: nothing is traced.
func (c *HostConfig) tracing() (*tracingapi.TracingConfiguration, error) {
	if c.TracingConfig == "" {
		return nil, nil
	}
	t, err := options.ReadTracingConfiguration(c.TracingConfig)
	if err != nil {
		return nil, fmt.Errorf("--tracing-config %s: %w", c.TracingConfig, err)
	}
	if errs := tracingapi.ValidateTracingConfiguration(t, utilfeature.DefaultFeatureGate, nil); len(errs) > 0 {
		return nil, fmt.Errorf("--tracing-config %s: %w", c.TracingConfig, errs.ToAggregate())
	}
	return t, nil
}

// checkMachine holds the configuration against the machine, before a node is
// begun or run on it.
func (c *Config) checkMachine() error {
	m, err := host.Look()
	if err != nil {
		return err
	}
	if c.FailSwapOn {
		if err := m.RefuseSwap(); err != nil {
			return err
		}
	}
	ips, err := host.NodeIPs(c.NodeIP)
	if err != nil {
		return err
	}
	_, err = c.tracing()
	return errors.Join(m.CheckNodeIPs(ips), err)
}

// hostSettings puts what the configuration says of the machine into the
// agent's.
func (c *Config) hostSettings(to *agent.Config) error {
	var err error
	if to.Registration, err = c.registration(); err != nil {
		return err
	}
	if to.NodeAddresses, err = host.Addresses(c.NodeAddresses); err != nil {
		return err
	}
	m, err := host.Look()
	if err != nil {
		return err
	}
	to.Notices = m.Notices()
	if c.NodeLogs {
		to.NodeLogs = nodelog.New(nodelog.Config{Own: c.ownLog()})
	}
	return nil
}
