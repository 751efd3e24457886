package podspec

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// capabilities is the default set with the spec's changes: ALL first, then what
// is added, then what is dropped. Names are those of capabilities(7), with or
// without CAP_, in any case. They bound what a container may gain; a program
// that does not run as root holds none of them unless its file gives them:
// there is no ambient set, as with other runtimes of Kubernetes.
func capabilities(c *v1.Capabilities) ([]string, error) {
	set := api.DefaultCapabilities()
	if c == nil {
		return set, nil
	}
	add, err := capabilityNames("add", c.Add)
	if err != nil {
		return nil, err
	}
	drop, err := capabilityNames("drop", c.Drop)
	if err != nil {
		return nil, err
	}
	if slices.Contains(drop, allOfThem) {
		set = nil
	}
	if slices.Contains(add, allOfThem) {
		set = slices.Clone(allCapabilities)
	}
	for _, n := range add {
		if n != allOfThem && !slices.Contains(set, n) {
			set = append(set, n)
		}
	}
	return slices.DeleteFunc(set, func(have string) bool { return slices.Contains(drop, have) }), nil
}

// allOfThem stands for every capability.
const allOfThem = "ALL"

// capabilityNames gives names as the kernel's headers write them. An unknown
// one is refused: ignored, it would give a container less than it needs or
// leave it more than it was to have.
func capabilityNames(field string, list []v1.Capability) ([]string, error) {
	out := make([]string, 0, len(list))
	for i, c := range list {
		n := strings.ToUpper(string(c))
		if n != allOfThem && !strings.HasPrefix(n, "CAP_") {
			n = "CAP_" + n
		}
		if n != allOfThem && !slices.Contains(allCapabilities, n) {
			return nil, createError{fmt.Errorf("securityContext.capabilities.%s[%d]: unknown capability %q: want ALL or a name of capabilities(7), with or without CAP_", field, i, c)}
		}
		out = append(out, n)
	}
	return out, nil
}

// allCapabilities in the kernel's order, capabilities(7).
var allCapabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID",
	"CAP_SETUID", "CAP_SETPCAP", "CAP_LINUX_IMMUTABLE", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST", "CAP_NET_ADMIN",
	"CAP_NET_RAW", "CAP_IPC_LOCK", "CAP_IPC_OWNER", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE",
	"CAP_SYS_PACCT", "CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_NICE", "CAP_SYS_RESOURCE", "CAP_SYS_TIME",
	"CAP_SYS_TTY_CONFIG", "CAP_MKNOD", "CAP_LEASE", "CAP_AUDIT_WRITE", "CAP_AUDIT_CONTROL", "CAP_SETFCAP",
	"CAP_MAC_OVERRIDE", "CAP_MAC_ADMIN", "CAP_SYSLOG", "CAP_WAKE_ALARM", "CAP_BLOCK_SUSPEND", "CAP_AUDIT_READ",
	"CAP_PERFMON", "CAP_BPF", "CAP_CHECKPOINT_RESTORE",
}
