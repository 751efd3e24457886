package seccomp

import (
	"slices"
	"testing"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/opencontainers/runc/libcontainer/configs"
)

func TestFilter(t *testing.T) {
	names := func(f *configs.Seccomp) []string {
		var out []string
		for _, s := range f.Syscalls {
			if s.Action == configs.Allow && len(s.Args) == 0 {
				out = append(out, s.Name)
			}
		}
		slices.Sort(out)
		return out
	}
	plain := names(defaultFilter(api.DefaultCapabilities()))
	for _, n := range []string{"read", "execve", "futex", "openat2", "chroot"} {
		if !slices.Contains(plain, n) {
			t.Errorf("%s is refused", n)
		}
	}
	for _, n := range []string{"mount", "setns", "unshare", "bpf", "keyctl", "kexec_load", "init_module", "io_uring_setup", "reboot", "clone", "socket", "userfaultfd"} {
		if slices.Contains(plain, n) {
			t.Errorf("%s is allowed", n)
		}
	}
	if got := slices.Compact(slices.Clone(plain)); len(got) != len(plain) {
		t.Error("a system call is listed twice")
	}
	admin := names(defaultFilter([]string{"CAP_SYS_ADMIN", "CAP_BPF"}))
	for _, n := range []string{"mount", "setns", "clone", "clone3", "bpf"} {
		if !slices.Contains(admin, n) {
			t.Errorf("%s is refused to an administrator", n)
		}
	}
	for _, c := range []api.Container{{Privileged: true}, {Seccomp: "Unconfined"}} {
		if f, err := Filter(&c); f != nil || err != nil {
			t.Errorf("%+v: %v %v", c, f, err)
		}
	}
}
