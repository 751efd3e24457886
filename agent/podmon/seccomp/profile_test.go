package seccomp

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runc/libcontainer/configs"
)

func profile(t *testing.T, text string) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "p.json")
	if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

// engine is a profile as container engines ship theirs: rules bound to
// machines, kernels and capabilities, system calls no machine here has.
const engine = `{
	"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38,
	"archMap": [
		{"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": ["SCMP_ARCH_ARM"]},
		{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"]}
	],
	"flags": ["SECCOMP_FILTER_FLAG_LOG"],
	"syscalls": [
		{"names": ["read", "no_such_call"], "action": "SCMP_ACT_ALLOW", "comment": "", "includes": {}, "excludes": {}},
		{"name": "getpid", "action": "SCMP_ACT_LOG"},
		{"names": ["ptrace"], "action": "SCMP_ACT_ALLOW", "includes": {"minKernel": "4.8"}},
		{"names": ["later"], "action": "SCMP_ACT_ALLOW", "includes": {"minKernel": "99.0"}},
		{"names": ["early"], "action": "SCMP_ACT_ALLOW", "excludes": {"minKernel": "4.8"}},
		{"names": ["mount"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
		{"names": ["both"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN", "CAP_SYS_TIME"]}},
		{"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38, "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
		{"names": ["arm_only"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["arm64"]}},
		{"names": ["not_x86"], "action": "SCMP_ACT_ALLOW", "excludes": {"arches": ["amd64", "x32"]}},
		{"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 2114060288, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]}
	]
}`

func TestEngineProfile(t *testing.T) {
	for _, tt := range []struct {
		m             machine
		caps          []string
		names, arches []string
	}{
		{machine{"amd64", kernel{6, 1}}, nil, []string{"read", "no_such_call", "getpid", "ptrace", "clone3", "clone"}, []string{"amd64", "x86", "x32"}},
		{machine{"amd64", kernel{6, 1}}, []string{"CAP_SYS_ADMIN"}, []string{"read", "no_such_call", "getpid", "ptrace", "mount", "clone"}, []string{"amd64", "x86", "x32"}},
		{machine{"arm64", kernel{4, 7}}, nil, []string{"read", "no_such_call", "getpid", "early", "clone3", "arm_only", "not_x86", "clone"}, []string{"arm64", "arm"}},
	} {
		f := profileOf(t, engine)
		got, err := f.filter(tt.m, tt.caps)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, s := range got.Syscalls {
			names = append(names, s.Name)
		}
		if d := cmp.Diff(tt.names, names); d != "" {
			t.Errorf("%+v %v: %s", tt.m, tt.caps, d)
		}
		if !slices.Equal(got.Architectures, tt.arches) {
			t.Errorf("%+v: architectures %v", tt.m, got.Architectures)
		}
		if got.DefaultAction != configs.Errno || *got.DefaultErrnoRet != 38 {
			t.Errorf("filter: %+v", got)
		}
		if i := slices.Index(names, "getpid"); got.Syscalls[i].Action != configs.Log {
			t.Errorf("getpid: %+v", got.Syscalls[i])
		}
		if i := slices.Index(names, "clone"); len(got.Syscalls[i].Args) != 1 || got.Syscalls[i].Args[0].Op != configs.MaskEqualTo {
			t.Errorf("clone: %+v", got.Syscalls[i])
		}
	}
}

func profileOf(t *testing.T, text string) *profileFile {
	t.Helper()
	var f profileFile
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		t.Fatal(err)
	}
	return &f
}

// TestEveryAction: what the OCI runtime specification lists is understood.
func TestEveryAction(t *testing.T) {
	for name, want := range map[string]configs.Action{
		"SCMP_ACT_KILL": configs.Kill, "SCMP_ACT_KILL_PROCESS": configs.KillProcess, "SCMP_ACT_KILL_THREAD": configs.KillThread,
		"SCMP_ACT_TRAP": configs.Trap, "SCMP_ACT_ERRNO": configs.Errno, "SCMP_ACT_TRACE": configs.Trace,
		"SCMP_ACT_ALLOW": configs.Allow, "SCMP_ACT_LOG": configs.Log,
	} {
		f, err := Filter(&api.Container{Seccomp: profile(t, `{"defaultAction":"`+name+`"}`)})
		if err != nil || f.DefaultAction != want {
			t.Errorf("%s: %+v, %v", name, f, err)
		}
	}
	for name, want := range map[string]configs.Operator{
		"SCMP_CMP_NE": configs.NotEqualTo, "SCMP_CMP_LT": configs.LessThan, "SCMP_CMP_LE": configs.LessThanOrEqualTo, "SCMP_CMP_EQ": configs.EqualTo,
		"SCMP_CMP_GE": configs.GreaterThanOrEqualTo, "SCMP_CMP_GT": configs.GreaterThan, "SCMP_CMP_MASKED_EQ": configs.MaskEqualTo,
	} {
		f, err := Filter(&api.Container{Seccomp: profile(t, `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["read"],"action":"SCMP_ACT_TRAP","args":[{"index":5,"op":"`+name+`"}]}]}`)})
		if err != nil || f.Syscalls[0].Args[0].Op != want {
			t.Errorf("%s: %+v, %v", name, f, err)
		}
	}
}

// TestBadProfiles: each error names the file and where in it.
func TestBadProfiles(t *testing.T) {
	rule := func(s string) string {
		return `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["a"],"action":"SCMP_ACT_LOG"},` + s + `]}`
	}
	for text, want := range map[string]string{
		"": "line 1: unexpected end",
		"{\n\"defaultAction\": \"SCMP_ACT_ALLOW\",\n]": "line 3: invalid character ']'",
		"{\n\"defaultAction\":\n 7}":                   "line 3: ",
		`{}`:                                           `defaultAction: unknown action ""`,
		`{"defaultAction":"SCMP_ACT_NONE"}`:            `defaultAction: unknown action "SCMP_ACT_NONE"`,
		`{"defaultAction":"SCMP_ACT_NOTIFY"}`:          "defaultAction: SCMP_ACT_NOTIFY needs a listener",
		`{"defaultAction":"SCMP_ACT_ERRNO","defaultErrnoRet":4096}`:                             "defaultErrnoRet: 4096",
		`{"defaultAction":"SCMP_ACT_ALLOW","listenerPath":"/s"}`:                                "listenerPath",
		`{"defaultAction":"SCMP_ACT_ALLOW","flags":["X"]}`:                                      `flags[0]: unknown flag "X"`,
		`{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_VAX"]}`:                  `architectures[0]: unknown architecture "SCMP_ARCH_VAX"`,
		`{"defaultAction":"SCMP_ACT_ALLOW","archMap":[{"architecture":"SCMP_ARCH_VAX"}]}`:       `archMap[0].architecture: unknown architecture "SCMP_ARCH_VAX"`,
		`{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_X86"],"archMap":[{}]}`:   "architectures, archMap",
		rule(`{"names":["x"],"action":"y"}`):                                                    `syscalls[1].action: unknown action "y"`,
		rule(`{"action":"SCMP_ACT_LOG"}`):                                                       "syscalls[1].names: want at least one",
		rule(`{"names":["x",""],"action":"SCMP_ACT_LOG"}`):                                      "syscalls[1].names[1]: empty",
		rule(`{"name":"x","names":["y"],"action":"SCMP_ACT_LOG"}`):                              "syscalls[1].name, names",
		rule(`{"names":["x"],"action":"SCMP_ACT_ERRNO","errnoRet":70000}`):                      "syscalls[1].errnoRet: 70000",
		rule(`{"names":["x"],"action":"SCMP_ACT_LOG","args":[{"index":6,"op":"SCMP_CMP_EQ"}]}`): "syscalls[1].args[0].index: 6",
		rule(`{"names":["x"],"action":"SCMP_ACT_LOG","args":[{"index":0,"op":"="}]}`):           `syscalls[1].args[0].op: unknown operator "="`,
		rule(`{"names":["x"],"action":"SCMP_ACT_LOG","includes":{"minKernel":"new"}}`):          `syscalls[1].includes.minKernel: "new"`,
		rule(`{"names":"x","action":"SCMP_ACT_LOG"}`):                                           "line 1: ",
	} {
		file := profile(t, text)
		_, err := Filter(&api.Container{Seccomp: file})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
	if _, err := Filter(&api.Container{Seccomp: "/no/such/file"}); err == nil || !strings.Contains(err.Error(), "/no/such/file") {
		t.Errorf("a missing file: %v", err)
	}
	if _, err := Filter(&api.Container{Seccomp: "below/nothing"}); err == nil {
		t.Error("a relative path was taken")
	}
}

func TestKernelVersion(t *testing.T) {
	for in, want := range map[string]kernel{"6.1.0-18-amd64": {6, 1}, "4.8": {4, 8}, "6.18+": {6, 18}, "6.": {}, "x.1": {}, "6": {}, "": {}} {
		got, err := parseKernel(in)
		if got != want || (err == nil) != (want != kernel{}) {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
	if kernelVersion() == (kernel{}) {
		t.Error("the version of this kernel is not understood")
	}
}
