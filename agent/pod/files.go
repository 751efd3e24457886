package pod

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// managedHosts opens an /etc/hosts that the node writes. Programs and the
// conformance tests know the file by this line.
const managedHosts = "# Kubernetes-managed hosts file.\n"

// hostsFile is the text of a pod's /etc/hosts.
func hostsFile(pod *v1.Pod, ips []netip.Addr, domain string) string {
	var b strings.Builder
	b.WriteString(managedHosts +
		"127.0.0.1\tlocalhost\n" +
		"::1\tlocalhost ip6-localhost ip6-loopback\n" +
		"fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n")
	for _, ip := range ips {
		if f := fqdn(pod, domain); f != "" {
			fmt.Fprintf(&b, "%s\t%s\t%s\n", ip, f, hostname(pod, ""))
		} else {
			fmt.Fprintf(&b, "%s\t%s\n", ip, hostname(pod, ""))
		}
	}
	b.WriteString(hostAliases(pod))
	return b.String()
}

// hostAliases are the spec's further lines of /etc/hosts.
func hostAliases(pod *v1.Pod) string {
	if len(pod.Spec.HostAliases) == 0 {
		return ""
	}
	var b strings.Builder
	b.WriteString("\n# Entries added by hostAliases.\n")
	for _, a := range pod.Spec.HostAliases {
		fmt.Fprintf(&b, "%s\t%s\n", a.IP, strings.Join(a.Hostnames, "\t"))
	}
	return b.String()
}

// writePodFiles writes etc-hosts and resolv.conf into the pod's folder. warn is
// told what is not as the pod wants it.
func (m *Manager) writePodFiles(pod *v1.Pod, ips []netip.Addr, warn func(reason, message string)) error {
	dir := m.podDir(pod)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	hosts := hostsFile(pod, ips, m.cfg.ClusterDomain)
	if pod.Spec.HostNetwork {
		b, err := os.ReadFile("/etc/hosts")
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		hosts = string(b) + hostAliases(pod)
	}
	if err := os.WriteFile(filepath.Join(dir, "etc-hosts"), []byte(hosts), 0o644); err != nil {
		return err
	}
	host, err := hostResolv(m.cfg.ResolvConf)
	if err != nil {
		return err
	}
	if m.cfg.Client == nil {
		warn = func(string, string) {} // there is no cluster whose names it could want
	}
	conf := podResolv(pod, host, m.cfg.ClusterDNS, m.cfg.ClusterDomain, warn)
	return os.WriteFile(filepath.Join(dir, "resolv.conf"), []byte(conf.String()), 0o644)
}

func (m *Manager) podDir(pod *v1.Pod) string { return filepath.Join(m.cfg.PodDir, string(pod.UID)) }

// LogFolder is the folder of a pod's logs below the log directory.
func LogFolder(pod *v1.Pod) string { return pod.Namespace + "_" + pod.Name + "_" + string(pod.UID) }

func (m *Manager) logDir(pod *v1.Pod) string { return filepath.Join(m.cfg.LogDir, LogFolder(pod)) }
