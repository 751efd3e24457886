// Package seccomp makes the system call filters of containers: the default one, and
// those that files say. It installs none.
package seccomp

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

// Filter gives a container's system call filter; nil for none. Its errors are the
// caller's.
func Filter(spec *api.Container) (*configs.Seccomp, error) {
	switch {
	case spec.Privileged, spec.Seccomp == "Unconfined":
		return nil, nil
	case spec.Seccomp == "", spec.Seccomp == "RuntimeDefault":
		return defaultFilter(spec.Capabilities), nil
	case !strings.HasPrefix(spec.Seccomp, "/"):
		return nil, fmt.Errorf("seccomp profile %q: want RuntimeDefault, Unconfined or an absolute path", spec.Seccomp)
	}
	return local(spec.Seccomp, spec.Capabilities)
}

// defaultFilter is RuntimeDefault for a container with these capabilities:
// what is not listed fails with EPERM, clone3 with ENOSYS (its flags lie behind
// a pointer no filter can follow; libraries then fall back to clone).
//
// Only the machine's own architecture is let in: each further one makes every
// start milliseconds slower, and 32-bit programs in containers are rare. They
// need the Unconfined profile or one of their own.
func defaultFilter(caps []string) *configs.Seccomp {
	key := ""
	for _, g := range capabilitySyscalls {
		if slices.Contains(caps, g.capability) {
			key += g.capability + ","
		}
	}
	if f, ok := made.Load(key); ok {
		return f.(*configs.Seccomp)
	}
	f := buildDefault(caps)
	made.Store(key, f)
	return f
}

var made sync.Map // of *configs.Seccomp, never changed once stored

func buildDefault(caps []string) *configs.Seccomp {
	eperm, enosys := uint(unix.EPERM), uint(unix.ENOSYS)
	out := &configs.Seccomp{DefaultAction: configs.Errno, DefaultErrnoRet: &eperm}
	allowed := map[string]bool{} // several capabilities open the same one
	allow := func(names ...string) {
		for _, n := range names {
			if !allowed[n] {
				allowed[n] = true
				out.Syscalls = append(out.Syscalls, &configs.Syscall{Name: n, Action: configs.Allow})
			}
		}
	}
	for _, group := range allowedSyscalls {
		allow(group...)
	}
	allow(archSyscalls[runtime.GOARCH]...)
	for _, g := range capabilitySyscalls {
		if slices.Contains(caps, g.capability) {
			allow(g.names...)
		}
	}
	if !slices.Contains(caps, "CAP_SYS_ADMIN") {
		out.Syscalls = append(out.Syscalls,
			&configs.Syscall{Name: "clone", Action: configs.Allow, Args: []*configs.Arg{
				{Index: 0, Op: configs.MaskEqualTo, Value: newNamespaces, ValueTwo: 0},
			}},
			&configs.Syscall{Name: "clone3", Action: configs.Errno, ErrnoRet: &enosys},
		)
	}
	for _, p := range allowedPersonalities {
		out.Syscalls = append(out.Syscalls, &configs.Syscall{Name: "personality", Action: configs.Allow,
			Args: []*configs.Arg{{Index: 0, Op: configs.EqualTo, Value: p}}})
	}
	// Sockets to a hypervisor's host reach past every network policy.
	out.Syscalls = append(out.Syscalls, &configs.Syscall{Name: "socket", Action: configs.Allow,
		Args: []*configs.Arg{{Index: 0, Op: configs.NotEqualTo, Value: unix.AF_VSOCK}}})
	return out
}

// newNamespaces are the clone flags that make namespaces.
const newNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

// allowedPersonalities: plain Linux, 32 bit, both with a 2.6 version number,
// and the question what it is.
var allowedPersonalities = []uint64{0x0, 0x0008, 0x20000, 0x20008, 0xffffffff}
