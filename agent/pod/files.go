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

// resolv is the parts of a resolv.conf.
type resolv struct {
	servers, search, options []string
}

func parseResolv(text string) resolv {
	var r resolv
	for _, l := range strings.Split(text, "\n") {
		f := strings.Fields(l)
		if len(f) == 0 || strings.HasPrefix(f[0], "#") || strings.HasPrefix(f[0], ";") {
			continue
		}
		switch f[0] {
		case "nameserver":
			if len(f) > 1 {
				r.servers = append(r.servers, f[1])
			}
		case "search":
			r.search = f[1:]
		case "options":
			r.options = append(r.options, f[1:]...)
		}
	}
	return r
}

func (r resolv) String() string {
	var b strings.Builder
	if len(r.search) > 0 {
		b.WriteString("search " + strings.Join(r.search, " ") + "\n")
	}
	for _, s := range r.servers {
		b.WriteString("nameserver " + s + "\n")
	}
	if len(r.options) > 0 {
		b.WriteString("options " + strings.Join(r.options, " ") + "\n")
	}
	return b.String()
}

// podResolv is the text of a pod's /etc/resolv.conf, by its dnsPolicy.
func podResolv(pod *v1.Pod, host string, dns []netip.Addr, domain string) string {
	policy := pod.Spec.DNSPolicy
	cluster := len(dns) > 0 && (policy == v1.DNSClusterFirstWithHostNet ||
		(policy == v1.DNSClusterFirst || policy == "") && !pod.Spec.HostNetwork)
	hostConf := parseResolv(host)
	var r resolv
	switch {
	case policy == v1.DNSNone:
	case cluster:
		for _, a := range dns {
			r.servers = append(r.servers, a.String())
		}
		r.search = append([]string{pod.Namespace + ".svc." + domain, "svc." + domain, domain}, hostConf.search...)
		r.options = []string{"ndots:5"}
	default:
		r = hostConf
	}
	if c := pod.Spec.DNSConfig; c != nil {
		r.servers = unique(append(r.servers, c.Nameservers...))
		r.search = unique(append(r.search, c.Searches...))
		for _, o := range c.Options {
			s := o.Name
			if o.Value != nil && *o.Value != "" {
				s += ":" + *o.Value
			}
			kept := r.options[:0:0]
			for _, have := range r.options {
				if n, _, _ := strings.Cut(have, ":"); n != o.Name {
					kept = append(kept, have)
				}
			}
			r.options = append(kept, s)
		}
	}
	return r.String()
}

func unique(in []string) []string {
	var out []string
	seen := map[string]bool{}
	for _, s := range in {
		if !seen[s] {
			seen[s] = true
			out = append(out, s)
		}
	}
	return out
}

// writePodFiles writes etc-hosts and resolv.conf into the pod's folder.
func (m *Manager) writePodFiles(pod *v1.Pod, ips []netip.Addr) error {
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
	host, err := os.ReadFile(m.cfg.ResolvConf)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	text := podResolv(pod, string(host), m.cfg.ClusterDNS, m.cfg.ClusterDomain)
	return os.WriteFile(filepath.Join(dir, "resolv.conf"), []byte(text), 0o644)
}

func (m *Manager) podDir(pod *v1.Pod) string { return filepath.Join(m.cfg.PodDir, string(pod.UID)) }

// LogFolder is the folder of a pod's logs below the log directory.
func LogFolder(pod *v1.Pod) string { return pod.Namespace + "_" + pod.Name + "_" + string(pod.UID) }

func (m *Manager) logDir(pod *v1.Pod) string { return filepath.Join(m.cfg.LogDir, LogFolder(pod)) }
