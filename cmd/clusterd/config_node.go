package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/cpuset"

	"github.com/clusterd/clusterd/agent"
	"github.com/clusterd/clusterd/agent/pressure"
	"github.com/clusterd/clusterd/agent/users"
)

// Values of CPUManagerPolicy.
const (
	cpuPolicyNone   = "none"
	cpuPolicyStatic = "static"
)

func (c *Config) checkCPUs() error {
	if _, err := cpuset.Parse(c.ReservedCPUs); err != nil {
		return fmt.Errorf("--reserved-cpus %q: give numbers and ranges such as 0-1,8", c.ReservedCPUs)
	}
	switch c.CPUManagerPolicy {
	case cpuPolicyNone:
	case cpuPolicyStatic:
		if c.ReservedCPUs == "" {
			return errors.New("--cpu-manager-policy static: some processors must stay for all: name them with --reserved-cpus, such as --reserved-cpus 0")
		}
	default:
		return fmt.Errorf("--cpu-manager-policy %q: none or static", c.CPUManagerPolicy)
	}
	return nil
}

// maxClusterDNS is how many name servers resolvers read, resolv.conf(5).
const maxClusterDNS = 3

// noClusterDNS is the value of ClusterDNS with which there is none.
const noClusterDNS = "none"

// nodeDNS are the addresses, one of each family, where this node answers names
// itself; none: it does not.
func (c *Config) nodeDNS() (out []netip.Addr) {
	if c.ClusterDNS != "" {
		return nil
	}
	for _, r := range c.serviceRanges() {
		out = append(out, dnsAddress(r))
	}
	return out
}

// dnsAddress is the tenth address of the Services' range, or the second of a
// small one. Services get such a low one only if they ask for it.
func dnsAddress(services netip.Prefix) netip.Addr {
	first := services.Masked().Addr()
	tenth := first
	for range 10 {
		tenth = tenth.Next()
	}
	if services.Addr().BitLen()-services.Bits() < 4 {
		return first.Next().Next()
	}
	return tenth
}

// clusterDNS are the name servers of pods, parsed.
func (c *Config) clusterDNS() ([]netip.Addr, error) {
	var out []netip.Addr
	switch c.ClusterDNS {
	case noClusterDNS:
		return nil, nil
	case "":
		return c.nodeDNS()[:1], nil // all answer alike
	}
	for text := range strings.SplitSeq(c.ClusterDNS, ",") {
		a, err := netip.ParseAddr(strings.TrimSpace(text))
		if err != nil || a.IsUnspecified() || a.Zone() != "" {
			return nil, fmt.Errorf("--cluster-dns %q: give the address of the cluster's name server, or several separated by commas, such as 10.96.0.10, or none", c.ClusterDNS)
		}
		out = append(out, a)
	}
	if len(out) > maxClusterDNS {
		return nil, fmt.Errorf("--cluster-dns %q: resolvers read no more than %d servers: leave some out", c.ClusterDNS, maxClusterDNS)
	}
	return out, nil
}

func (c *Config) checkDNS() error {
	if _, err := c.clusterDNS(); err != nil {
		return err
	}
	if errs := validation.IsDNS1123Subdomain(c.ClusterDomain); len(errs) > 0 {
		return fmt.Errorf("--cluster-domain %q: a domain without a dot at its end is required, such as %s", c.ClusterDomain, defaultClusterDomain)
	}
	if c.ResolvConf == "" {
		return nil
	}
	if !filepath.IsAbs(c.ResolvConf) {
		return fmt.Errorf("--resolv-conf %q: an absolute path is required, such as /etc/resolv.conf", c.ResolvConf)
	}
	if st, err := os.Stat(c.ResolvConf); err != nil || !st.Mode().IsRegular() {
		return fmt.Errorf("--resolv-conf %q: there is no such file: name one in the form of /etc/resolv.conf, or leave the flag out", c.ResolvConf)
	}
	return nil
}

// eviction is the node's thresholds, hard and soft; not nil.
func (c *Config) eviction() ([]pressure.Threshold, error) {
	out := []pressure.Threshold{}
	if c.EvictionHard != "none" {
		hard, err := pressure.Parse(c.EvictionHard)
		if err != nil {
			return nil, fmt.Errorf("--eviction-hard: %w", err)
		}
		out = append(out, hard...)
	}
	soft, err := pressure.ParseSoft(c.EvictionSoft, c.EvictionSoftGracePeriod)
	if err != nil {
		return nil, fmt.Errorf("--eviction-soft, --eviction-soft-grace-period: %w", err)
	}
	return append(out, soft...), nil
}

// reserved is what is kept from pods; nil: the agent's default.
func (c *Config) reserved() (corev1.ResourceList, error) {
	if c.SystemReserved == "" {
		if c.CPUManagerPolicy != cpuPolicyStatic {
			return nil, nil
		}
		return corev1.ResourceList{corev1.ResourceCPU: c.reservedCPU()}, nil
	}
	out := corev1.ResourceList{}
	for part := range strings.SplitSeq(c.SystemReserved, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		q, err := resource.ParseQuantity(value)
		if err != nil || q.Sign() < 0 {
			return nil, fmt.Errorf("--system-reserved: %q: write it as resource=quantity, such as memory=512Mi", part)
		}
		switch n := corev1.ResourceName(name); n {
		case corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage:
			out[n] = q
		default:
			return nil, fmt.Errorf("--system-reserved: %q: reserve cpu, memory or ephemeral-storage", part)
		}
	}
	if have := out[corev1.ResourceCPU]; c.CPUManagerPolicy == cpuPolicyStatic && have.Cmp(c.reservedCPU()) < 0 {
		out[corev1.ResourceCPU] = c.reservedCPU()
	}
	return out, nil
}

// reservedCPU is how much of the processors the static policy leaves to none.
func (c *Config) reservedCPU() resource.Quantity {
	set, _ := cpuset.Parse(c.ReservedCPUs) // checked before
	return *resource.NewQuantity(int64(set.Size()), resource.DecimalSI)
}

// podUserIDs reads where the ids of pods with a user namespace come from; the
// zero Range: there are none.
func (c *Config) podUserIDs() (users.Range, error) {
	if c.PodUserIDs == "none" {
		return users.Range{}, nil
	}
	ids, err := users.ParseIDRange(c.PodUserIDs)
	if err != nil {
		return ids, fmt.Errorf("--pod-user-ids: %w", err)
	}
	return ids, nil
}

// cdiDirs are the directories of CDI files; there may be none.
func (c *Config) cdiDirs() []string {
	if c.CDIDirs == "" {
		return []string{}
	}
	return strings.Split(c.CDIDirs, ",")
}

// settings puts what the configuration says of the node's resources, name
// servers and pods into the agent's.
func (c *Config) settings(to *agent.Config) (err error) {
	to.LogLinks, to.PodLogLinks, to.DriverDir, to.CDIDirs = c.LogLinks, c.PodLogLinks, c.KubeletRoot, c.cdiDirs()
	if to.Eviction, err = c.eviction(); err != nil {
		return err
	}
	if to.Reserved, err = c.reserved(); err != nil {
		return err
	}
	if to.ClusterDNS, err = c.clusterDNS(); err != nil {
		return err
	}
	to.ClusterDomain, to.ResolvConf = c.ClusterDomain, c.ResolvConf
	if to.UserIDs, err = c.podUserIDs(); err != nil {
		return err
	}
	to.EvictionTransition = c.EvictionTransition.Duration
	for name := range strings.SplitSeq(c.AllowedUnsafeSysctls, ",") {
		if name = strings.TrimSpace(name); name != "" {
			to.UnsafeSysctls = append(to.UnsafeSysctls, name)
		}
	}
	if to.ImageVerification, err = c.verification(); err != nil {
		return err
	}
	to.ImageGC = agent.ImageGC{High: c.ImageGCHigh, Low: c.ImageGCLow}
	to.Shutdown, err = c.shutdownPeriods()
	return err
}
