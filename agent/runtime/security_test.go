package runtime_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
)

func TestRootSecurityAsTheKernelSeesIt(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	status := func(id string, change func(*api.Container)) map[string]string {
		spec := n.spec("p", id, "cat", "/proc/self/status")
		change(&spec)
		if st := n.run(spec); st.ExitCode != 0 {
			t.Fatalf("%s: %+v", id, st)
		}
		fields := map[string]string{}
		for line := range strings.Lines(n.output(spec)) {
			k, v, _ := strings.Cut(line, ":")
			fields[k] = strings.TrimSpace(v)
		}
		return fields
	}
	const defaultCaps = "00000000a80425fb" // the fourteen of api.DefaultCapabilities
	plain := status("plain", func(*api.Container) {})
	for field, want := range map[string]string{"CapEff": defaultCaps, "CapPrm": defaultCaps, "CapBnd": defaultCaps,
		"CapInh": "0000000000000000", "CapAmb": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "2", "Pid": "1"} {
		if plain[field] != want {
			t.Errorf("plain: %s is %s, want %s", field, plain[field], want)
		}
	}
	user := status("user", func(c *api.Container) { c.UID, c.GID = 1000, 1000 })
	if user["CapEff"] != "0000000000000000" || user["CapBnd"] != defaultCaps || !strings.HasPrefix(user["Uid"], "1000") {
		t.Errorf("user: effective %s, bounding %s, uid %s", user["CapEff"], user["CapBnd"], user["Uid"])
	}
	none := status("none", func(c *api.Container) { c.Capabilities = nil; c.Seccomp = "Unconfined"; c.NoNewPrivileges = false })
	if none["CapBnd"] != "0000000000000000" || none["Seccomp"] != "0" || none["NoNewPrivs"] != "0" {
		t.Errorf("none: bounding %s, seccomp %s, no new privileges %s", none["CapBnd"], none["Seccomp"], none["NoNewPrivs"])
	}
	ours, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	all := status("all", func(c *api.Container) { c.Privileged = true; c.NoNewPrivileges = false })
	if !strings.Contains(string(ours), "CapBnd:\t"+all["CapEff"]) || all["Seccomp"] != "0" {
		t.Errorf("privileged: effective %s, seccomp %s", all["CapEff"], all["Seccomp"])
	}
}

// TestRootLocalSeccomp: a profile of a file is in force from the first
// instruction, in a container and in what is executed there, whether it may
// gain privileges or not.
func TestRootLocalSeccomp(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	profile := func(text string) string {
		file := filepath.Join(n.dir, "profile.json")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	// As engines write them: other machines, system calls of no kernel, rules
	// for containers with more capabilities.
	denies := profile(`{
		"defaultAction": "SCMP_ACT_ALLOW",
		"archMap": [
			{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"]},
			{"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": ["SCMP_ARCH_ARM"]}
		],
		"syscalls": [
			{"names": ["unshare", "no_such_call"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95, "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
			{"names": ["sethostname"], "action": "SCMP_ACT_LOG"},
			{"names": ["write"], "action": "SCMP_ACT_KILL", "includes": {"caps": ["CAP_SYS_BOOT"]}},
			{"names": ["mount"], "action": "SCMP_ACT_ERRNO", "args": [{"index": 3, "value": 0, "op": "SCMP_CMP_EQ"}]}
		]
	}`)
	for id, gains := range map[string]bool{"tight": false, "loose": true} {
		spec := n.spec("p", id, "unshare")
		spec.Seccomp, spec.NoNewPrivileges = denies, !gains
		if st := n.run(spec); st.ExitCode == 0 || !strings.Contains(n.output(spec), "operation not supported") {
			t.Errorf("%s: unshare: %+v: %s", id, st, n.output(spec))
		}
		spec = n.spec("p", id+"-mount", "mount")
		spec.Seccomp, spec.NoNewPrivileges, spec.Capabilities = denies, !gains, []string{"CAP_SYS_ADMIN"}
		if st := n.run(spec); st.ExitCode == 0 || !strings.Contains(n.output(spec), "operation not permitted") {
			t.Errorf("%s: mount: %+v: %s", id, st, n.output(spec))
		}
		spec = n.spec("p", id+"-exec", "sleep")
		spec.Seccomp, spec.NoNewPrivileges = denies, !gains
		n.start(spec)
		var out bytes.Buffer
		code, err := n.client.Exec(n.ctx, api.Exec{ContainerID: spec.ID, Args: []string{"/bin/box", "unshare"}}, runtime.ExecIO{Stderr: &out})
		if err != nil || code == 0 || !strings.Contains(out.String(), "operation not supported") {
			t.Errorf("%s: exec: %d, %v: %s", id, code, err, out.String())
		}
	}
	kills := n.spec("p", "kills", "unshare")
	kills.Seccomp = profile(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["unshare"], "action": "SCMP_ACT_KILL_PROCESS"}]}`)
	if st := n.run(kills); st.Signal != int(syscall.SIGSYS) {
		t.Errorf("a process that the filter is to kill: %+v", st)
	}
	bad := n.spec("p", "bad", "true")
	bad.Seccomp = profile(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["read"], "action": "SCMP_ACT_MAYBE"}]}`)
	var e *api.Error
	if _, err := n.client.StartContainer(n.ctx, bad); !errors.As(err, &e) || e.Code != api.CodeInvalid || !strings.Contains(e.Message, bad.Seccomp+`: syscalls[0].action: unknown action "SCMP_ACT_MAYBE"`) {
		t.Errorf("a wrong profile: %v", err)
	}
}
