package podmon

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// seccompFilter gives a container's system call filter; nil for none.
func seccompFilter(spec *api.Container) (*configs.Seccomp, error) {
	switch {
	case spec.Privileged, spec.Seccomp == "Unconfined":
		return nil, nil
	case spec.Seccomp == "", spec.Seccomp == "RuntimeDefault":
		return defaultSeccomp(spec.Capabilities), nil
	case !isHostPath(spec.Seccomp):
		return nil, invalidf("seccomp profile %q: want RuntimeDefault, Unconfined or an absolute path", spec.Seccomp)
	}
	return localSeccomp(spec.Seccomp)
}

// profileFile is a profile in the widespread JSON form: the OCI runtime's, with
// architectures, includes and excludes as container engines add them.
type profileFile struct {
	specs.LinuxSeccomp
	ArchMap  []struct{ Architecture specs.Arch } `json:"archMap"`
	Syscalls []profileRule                       `json:"syscalls"`
}

type profileRule struct {
	specs.LinuxSyscall
	Name     string        `json:"name"`
	Includes profileFilter `json:"includes"`
	Excludes profileFilter `json:"excludes"`
}

type profileFilter struct {
	Caps   []string `json:"caps"`
	Arches []string `json:"arches"`
}

func localSeccomp(path string) (*configs.Seccomp, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("seccomp profile: %w", err)
	}
	var f profileFile
	if err := json.Unmarshal(b, &f); err != nil {
		return nil, fmt.Errorf("seccomp profile %s: %w", path, err)
	}
	cfg, err := f.filter()
	if err != nil {
		return nil, fmt.Errorf("seccomp profile %s: %w", path, err)
	}
	return cfg, nil
}

// filter says a profile in libcontainer's words.
func (f *profileFile) filter() (*configs.Seccomp, error) {
	if f.ListenerPath != "" {
		return nil, errors.New("a listener is not supported")
	}
	action, err := seccomp.ConvertStringToAction(string(f.DefaultAction))
	if err != nil {
		return nil, err
	}
	out := &configs.Seccomp{DefaultAction: action, DefaultErrnoRet: f.DefaultErrnoRet, Flags: f.Flags}
	for _, a := range f.Architectures {
		arch, err := seccomp.ConvertStringToArch(string(a))
		if err != nil {
			return nil, err
		}
		out.Architectures = append(out.Architectures, arch)
	}
	for _, r := range f.Syscalls {
		if !r.applies() {
			continue
		}
		if r.Name != "" {
			r.Names = append(r.Names, r.Name)
		}
		if err := r.add(out); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (r *profileRule) add(out *configs.Seccomp) error {
	action, err := seccomp.ConvertStringToAction(string(r.Action))
	if err != nil {
		return err
	}
	var args []*configs.Arg
	for _, a := range r.Args {
		op, err := seccomp.ConvertStringToOperator(string(a.Op))
		if err != nil {
			return err
		}
		args = append(args, &configs.Arg{Index: a.Index, Value: a.Value, ValueTwo: a.ValueTwo, Op: op})
	}
	for _, name := range r.Names {
		out.Syscalls = append(out.Syscalls, &configs.Syscall{Name: name, Action: action, ErrnoRet: r.ErrnoRet, Args: args})
	}
	return nil
}

// applies leaves out rules bound to other machines, and those that open more to
// a container with further capabilities: a profile of the user's is not widened.
func (r profileRule) applies() bool {
	arch := map[string]string{"amd64": "amd64", "arm64": "arm64"}[runtime.GOARCH]
	if len(r.Includes.Arches) > 0 && !slices.Contains(r.Includes.Arches, arch) {
		return false
	}
	return len(r.Includes.Caps) == 0 && !slices.Contains(r.Excludes.Arches, arch)
}

// defaultSeccomp is RuntimeDefault for a container with these capabilities:
// what is not listed fails with EPERM, clone3 with ENOSYS (its flags lie behind
// a pointer no filter can follow; libraries then fall back to clone).
//
// Only the machine's own architecture is let in: each further one makes every
// start milliseconds slower, and 32-bit programs in containers are rare. They
// need the Unconfined profile or one of their own.
func defaultSeccomp(caps []string) *configs.Seccomp {
	key := ""
	for _, g := range capabilitySyscalls {
		if slices.Contains(caps, g.capability) {
			key += g.capability + ","
		}
	}
	if f, ok := seccompCache.Load(key); ok {
		return f.(*configs.Seccomp)
	}
	f := buildDefaultSeccomp(caps)
	seccompCache.Store(key, f)
	return f
}

var seccompCache sync.Map // of *configs.Seccomp, never changed once stored

func buildDefaultSeccomp(caps []string) *configs.Seccomp {
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
