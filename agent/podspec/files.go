package podspec

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
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

// WriteFiles writes etc-hosts and resolv.conf into the pod's directory. warn is
// called for what is not as the pod asks.
func (b *Builder) WriteFiles(pod *v1.Pod, ips []netip.Addr, warn func(reason, message string)) error {
	dir := b.podDir(pod)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	hosts := hostsFile(pod, ips, b.ClusterDomain)
	if pod.Spec.HostNetwork {
		own, err := os.ReadFile("/etc/hosts")
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		hosts = string(own) + hostAliases(pod)
	}
	if err := os.WriteFile(filepath.Join(dir, "etc-hosts"), []byte(hosts), 0o644); err != nil { //nolint:forbidigo // written anew for each start
		return err
	}
	host, err := hostResolv(b.ResolvConf)
	if err != nil {
		return err
	}
	if b.NoCluster {
		warn = func(string, string) {} // there is no cluster whose names it could want
	}
	conf := podResolv(pod, host, b.ClusterDNS, b.ClusterDomain, warn)
	return os.WriteFile(filepath.Join(dir, "resolv.conf"), []byte(conf.String()), 0o644) //nolint:forbidigo // written anew for each start
}

func (b *Builder) podDir(pod *v1.Pod) string { return filepath.Join(b.PodDir, string(pod.UID)) }

// MessagePath is the file in which a container may leave its last words.
func (b *Builder) MessagePath(pod *v1.Pod, container string, attempt uint32) string {
	return filepath.Join(b.podDir(pod), "containers", container, strconv.Itoa(int(attempt)))
}

// LogFolder is the directory of a pod's logs below the log directory.
func LogFolder(pod *v1.Pod) string { return pod.Namespace + "_" + pod.Name + "_" + string(pod.UID) }

// PodLogs is the directory of a pod's logs.
func (b *Builder) PodLogs(pod *v1.Pod) string { return filepath.Join(b.LogDir, LogFolder(pod)) }

// LogPath is the log of one instance of a container; rotated parts of it begin
// with the same name.
func (b *Builder) LogPath(pod *v1.Pod, container string, attempt uint32) string {
	return filepath.Join(b.PodLogs(pod), container, strconv.Itoa(int(attempt))+".log")
}
