package podstate

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// safeSysctls belong to a pod's namespaces and cannot harm others on the node
// (the list of the Kubernetes documentation, "Using sysctls in a cluster").
var safeSysctls = []string{
	"kernel.shm_rmid_forced",
	"net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports", "net.ipv4.ip_unprivileged_port_start",
	"net.ipv4.ping_group_range", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes",
	"net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_rmem", "net.ipv4.tcp_syncookies", "net.ipv4.tcp_wmem",
}

// ForbiddenSysctl refuses a pod for a sysctl that is neither safe nor allowed
// on this node, or that belongs to a namespace that the pod shares with the
// host; nil: it has none. allowed are names, or prefixes that end with "*".
func ForbiddenSysctl(pod *v1.Pod, allowed []string) *Verdict {
	if pod.Spec.SecurityContext == nil {
		return nil
	}
	for _, s := range pod.Spec.SecurityContext.Sysctls {
		name := strings.ReplaceAll(s.Name, "/", ".")
		matches := func(pattern string) bool {
			prefix, open := strings.CutSuffix(pattern, "*")
			return name == pattern || open && strings.HasPrefix(name, prefix)
		}
		switch {
		case !slices.Contains(safeSysctls, name) && !slices.ContainsFunc(allowed, matches):
			return &Verdict{"SysctlForbidden", fmt.Sprintf("forbidden sysctl: %q not allowlisted", s.Name)}
		case pod.Spec.HostNetwork && strings.HasPrefix(name, "net."):
			return &Verdict{"SysctlForbidden", fmt.Sprintf("forbidden sysctl: %q not allowed with host net enabled", s.Name)}
		case pod.Spec.HostIPC && (strings.HasPrefix(name, "kernel.") || strings.HasPrefix(name, "fs.mqueue.")):
			return &Verdict{"SysctlForbidden", fmt.Sprintf("forbidden sysctl: %q not allowed with host ipc enabled", s.Name)}
		}
	}
	return nil
}
