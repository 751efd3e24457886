package seccomp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/runc/libcontainer/configs"
	libseccomp "github.com/opencontainers/runc/libcontainer/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// profileFile is a profile in the widespread JSON form: the OCI runtime's, with
// architectures, includes and excludes as container engines add them. System
// calls that this kernel or libseccomp does not know are passed over, so that
// one file serves machines of several ages.
type profileFile struct {
	specs.LinuxSeccomp
	ArchMap  []profileArch `json:"archMap"`
	Syscalls []profileRule `json:"syscalls"`
}

// profileArch is a machine and the others whose programs it can run.
type profileArch struct {
	Architecture     specs.Arch   `json:"architecture"`
	SubArchitectures []specs.Arch `json:"subArchitectures"`
}

type profileRule struct {
	specs.LinuxSyscall
	Name     string        `json:"name"`
	Includes profileFilter `json:"includes"`
	Excludes profileFilter `json:"excludes"`
}

// profileFilter binds a rule to containers and machines.
type profileFilter struct {
	Caps      []string `json:"caps"`
	Arches    []string `json:"arches"` // as Go names them
	MinKernel string   `json:"minKernel"`
}

const (
	maxProfile     = 1 << 20 // bytes
	maxErrno       = 4095    // MAX_ERRNO of the kernel
	maxSyscallArgs = 6
)

// local reads a profile for a container with these capabilities. Its
// errors are the caller's, and name the file and the line or field.
func local(path string, caps []string) (*configs.Seccomp, error) {
	b, err := readProfile(path)
	if err != nil {
		return nil, fmt.Errorf("seccomp profile: %w", err)
	}
	var f profileFile
	if err := json.Unmarshal(b, &f); err != nil {
		return nil, fmt.Errorf("seccomp profile %s: %w", path, jsonFault(b, err))
	}
	cfg, err := f.filter(machine{arch: runtime.GOARCH, kernel: kernelVersion()}, caps)
	if err != nil {
		return nil, fmt.Errorf("seccomp profile %s: %w", path, err)
	}
	return cfg, nil
}

func readProfile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxProfile+1))
	if err == nil && len(b) > maxProfile {
		err = fmt.Errorf("%s is larger than %d KiB", path, maxProfile>>10)
	}
	return b, err
}

// jsonFault says in which line of text the decoder failed.
func jsonFault(text []byte, err error) error {
	var offset int64
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		offset = syntax.Offset
	case errors.As(err, &kind):
		offset = kind.Offset
		err = fmt.Errorf("%s: a JSON %s cannot be a %s", kind.Field, kind.Value, kind.Type)
	default:
		return err
	}
	line := 1 + bytes.Count(text[:min(int(offset), len(text))], []byte("\n"))
	return fmt.Errorf("line %d: %w", line, err)
}

// machine is what rules of a profile are bound to.
type machine struct {
	arch   string // as Go names it
	kernel kernel
}

// kernel is the version of one, 6.1 as {6, 1}.
type kernel [2]int

func kernelVersion() kernel {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return kernel{}
	}
	k, _ := parseKernel(unix.ByteSliceToString(u.Release[:]))
	return k
}

// parseKernel reads the first two numbers of a release: "6.1.0-18-amd64".
func parseKernel(s string) (kernel, error) {
	major, rest, ok := strings.Cut(s, ".")
	minor := rest[:len(rest)-len(strings.TrimLeft(rest, "0123456789"))]
	a, err1 := strconv.Atoi(major)
	b, err2 := strconv.Atoi(minor)
	if !ok || err1 != nil || err2 != nil {
		return kernel{}, fmt.Errorf("%q is not a kernel version such as 4.8", s)
	}
	return kernel{a, b}, nil
}

// filter says a profile in libcontainer's words.
func (f *profileFile) filter(m machine, caps []string) (*configs.Seccomp, error) {
	if f.ListenerPath != "" || f.ListenerMetadata != "" {
		return nil, errors.New("listenerPath, listenerMetadata: a listener is not supported")
	}
	action, err := profileAction("defaultAction", f.DefaultAction)
	if err != nil {
		return nil, err
	}
	if err := checkErrno("defaultErrnoRet", f.DefaultErrnoRet); err != nil {
		return nil, err
	}
	out := &configs.Seccomp{DefaultAction: action, DefaultErrnoRet: f.DefaultErrnoRet, Flags: f.Flags}
	for i, flag := range f.Flags {
		if !slices.Contains(libseccomp.KnownFlags(), string(flag)) {
			return nil, fmt.Errorf("flags[%d]: unknown flag %q: want one of %s", i, flag, strings.Join(libseccomp.KnownFlags(), ", "))
		}
	}
	if out.Architectures, err = f.architectures(m.arch); err != nil {
		return nil, err
	}
	for i := range f.Syscalls {
		if err := f.Syscalls[i].add(out, m, caps); err != nil {
			return nil, fmt.Errorf("syscalls[%d].%w", i, err)
		}
	}
	return out, nil
}

// architectures are those whose system calls the filter looks at; the
// machine's own is always among them.
func (f *profileFile) architectures(arch string) ([]string, error) {
	if len(f.Architectures) > 0 && len(f.ArchMap) > 0 {
		return nil, errors.New("architectures, archMap: one of them only")
	}
	var out []string
	add := func(field string, a specs.Arch) error {
		name, err := libseccomp.ConvertStringToArch(string(a))
		if err != nil {
			return fmt.Errorf("%s: unknown architecture %q", field, a)
		}
		if !slices.Contains(out, name) {
			out = append(out, name)
		}
		return nil
	}
	for i, a := range f.Architectures {
		if err := add(fmt.Sprintf("architectures[%d]", i), a); err != nil {
			return nil, err
		}
	}
	for i, m := range f.ArchMap {
		name, err := libseccomp.ConvertStringToArch(string(m.Architecture))
		if err != nil {
			return nil, fmt.Errorf("archMap[%d].architecture: unknown architecture %q", i, m.Architecture)
		}
		if name != arch {
			continue
		}
		for _, a := range append([]specs.Arch{m.Architecture}, m.SubArchitectures...) {
			if err := add(fmt.Sprintf("archMap[%d].subArchitectures", i), a); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// profileAction reads an action. One that asks a listener is refused, for there
// is none and the call would wait for ever.
func profileAction(field string, a specs.LinuxSeccompAction) (configs.Action, error) {
	action, err := libseccomp.ConvertStringToAction(string(a))
	switch {
	case err != nil:
		return 0, fmt.Errorf("%s: unknown action %q", field, a)
	case action == configs.Notify:
		return 0, fmt.Errorf("%s: %s needs a listener, which is not supported", field, a)
	}
	return action, nil
}

func checkErrno(field string, errno *uint) error {
	if errno != nil && *errno > maxErrno {
		return fmt.Errorf("%s: %d is not an error number: want at most %d", field, *errno, maxErrno)
	}
	return nil
}

// add puts a rule into the filter unless it is for other containers or
// machines. A rule that does not apply is checked all the same: a file is
// right or wrong for every container.
func (r *profileRule) add(out *configs.Seccomp, m machine, caps []string) error {
	names := r.Names
	switch {
	case r.Name != "" && len(names) > 0:
		return errors.New("name, names: one of them only")
	case r.Name != "":
		names = []string{r.Name}
	case len(names) == 0:
		return errors.New("names: want at least one system call")
	}
	if i := slices.Index(names, ""); i >= 0 {
		return fmt.Errorf("names[%d]: empty", i)
	}
	action, err := profileAction("action", r.Action)
	if err != nil {
		return err
	}
	if err := checkErrno("errnoRet", r.ErrnoRet); err != nil {
		return err
	}
	var args []*configs.Arg
	for i, a := range r.Args {
		op, err := libseccomp.ConvertStringToOperator(string(a.Op))
		if err != nil {
			return fmt.Errorf("args[%d].op: unknown operator %q", i, a.Op)
		}
		if a.Index >= maxSyscallArgs {
			return fmt.Errorf("args[%d].index: %d: a system call has %d arguments, counted from 0", i, a.Index, maxSyscallArgs)
		}
		args = append(args, &configs.Arg{Index: a.Index, Value: a.Value, ValueTwo: a.ValueTwo, Op: op})
	}
	included, err := r.Includes.all(m, caps)
	if err != nil {
		return fmt.Errorf("includes.%w", err)
	}
	excluded, err := r.Excludes.any(m, caps)
	if err != nil {
		return fmt.Errorf("excludes.%w", err)
	}
	if !included || excluded {
		return nil
	}
	for _, name := range names {
		out.Syscalls = append(out.Syscalls, &configs.Syscall{Name: name, Action: action, ErrnoRet: r.ErrnoRet, Args: args})
	}
	return nil
}

// all tells whether everything that the filter names is so.
func (f *profileFilter) all(m machine, caps []string) (bool, error) {
	newer, err := f.newEnough(m)
	missing := slices.ContainsFunc(f.Caps, func(c string) bool { return !slices.Contains(caps, c) })
	return !missing && (len(f.Arches) == 0 || slices.Contains(f.Arches, m.arch)) && (f.MinKernel == "" || newer), err
}

// any tells whether anything that the filter names is so.
func (f *profileFilter) any(m machine, caps []string) (bool, error) {
	newer, err := f.newEnough(m)
	held := slices.ContainsFunc(f.Caps, func(c string) bool { return slices.Contains(caps, c) })
	return held || slices.Contains(f.Arches, m.arch) || f.MinKernel != "" && newer, err
}

func (f *profileFilter) newEnough(m machine) (bool, error) {
	if f.MinKernel == "" {
		return false, nil
	}
	want, err := parseKernel(f.MinKernel)
	if err != nil {
		return false, fmt.Errorf("minKernel: %w", err)
	}
	return slices.Compare(m.kernel[:], want[:]) >= 0, nil
}
