package podmon

import (
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/google/go-cmp/cmp"
	devices "github.com/opencontainers/cgroups/devices/config"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

func TestMounts(t *testing.T) {
	got, err := mounts(&api.Container{Mounts: []api.Mount{
		{Source: "/src/deep", Destination: "/data/deep/er", ReadOnly: true},
		{Source: "/src/conf.d", Destination: "/conf/d"},
		{Source: "/src/conf", Destination: "/conf/"},
		{Source: "/src", Destination: "/data", Propagation: "rslave"},
		{Type: "tmpfs", Source: "tmpfs", Destination: "/dev/shm", Options: []string{"size=64m", "noexec"}},
	}}, "/shm")
	if err != nil {
		t.Fatal(err)
	}
	var order []string
	byDest := map[string]*configs.Mount{}
	for _, m := range got {
		order = append(order, m.Destination)
		byDest[m.Destination] = m
	}
	want := []string{"/proc", "/dev", "/dev/pts", "/dev/mqueue", "/sys", "/sys/fs/cgroup", "/conf/", "/data", "/conf/d", "/dev/shm", "/data/deep/er"}
	if d := cmp.Diff(want, order); d != "" {
		t.Errorf("order: %s", d)
	}
	if m := byDest["/data/deep/er"]; m.Flags != unix.MS_BIND|unix.MS_REC|unix.MS_RDONLY || m.Device != "bind" {
		t.Errorf("read-only bind: %+v", m)
	}
	if m := byDest["/data"]; m.PropagationFlags[0] != unix.MS_SLAVE|unix.MS_REC {
		t.Errorf("propagation: %+v", m)
	}
	if m := byDest["/dev/shm"]; m.Device != "tmpfs" || m.Data != "size=64m" || m.Flags != unix.MS_NOEXEC {
		t.Errorf("tmpfs: %+v", m)
	}
	for name, m := range map[string]api.Mount{
		"propagation":      {Source: "/s", Destination: "/d", Propagation: "sideways"},
		"relative source":  {Source: "s", Destination: "/d"},
		"data with a bind": {Source: "/s", Destination: "/d", Options: []string{"size=1m"}},
	} {
		var e *api.Error
		if _, err := mounts(&api.Container{Mounts: []api.Mount{m}}, "/shm"); !errors.As(err, &e) || e.Code != api.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPropagationOfRoot(t *testing.T) {
	for want, ps := range map[int][]string{
		unix.MS_PRIVATE | unix.MS_REC: {"", "private"},
		unix.MS_SLAVE | unix.MS_REC:   {"private", "rslave"},
		unix.MS_SHARED | unix.MS_REC:  {"rslave", "rshared", ""},
	} {
		var ms []api.Mount
		for _, p := range ps {
			ms = append(ms, api.Mount{Propagation: p})
		}
		if got := rootPropagation(ms); got != want {
			t.Errorf("%v: %#x, want %#x", ps, got, want)
		}
	}
}

func TestSysctlFile(t *testing.T) {
	own := api.Sandbox{NetNS: "/n"}
	host := api.Sandbox{HostIPC: true}
	for _, tc := range []struct {
		name string
		in   api.Sandbox
		want string // "" for refused
	}{
		{"net.core.somaxconn", own, "/proc/sys/net/core/somaxconn"},
		{"net/ipv4/conf/eth0.1/rp_filter", own, "/proc/sys/net/ipv4/conf/eth0.1/rp_filter"},
		{"kernel.shmmax", own, "/proc/sys/kernel/shmmax"},
		{"fs.mqueue.msg_max", own, "/proc/sys/fs/mqueue/msg_max"},
		{"net.core.somaxconn", host, ""},
		{"kernel.shmmax", host, ""},
		{"kernel.pid_max", own, ""},
		{"vm.swappiness", own, ""},
		{"net/../kernel/pid_max", own, ""},
		{"net..kernel", own, ""},
		{"", own, ""},
	} {
		got, err := sysctlFile(tc.name, tc.in)
		if got != tc.want || (err == nil) != (tc.want != "") {
			t.Errorf("%s: %q %v, want %q", tc.name, got, err, tc.want)
		}
	}
}

func TestSeccompProfileIsChecked(t *testing.T) {
	if _, err := seccompFilter(&api.Container{Seccomp: "/no/such/file"}); !api.IsCode(err, api.CodeInvalid) {
		t.Error(err)
	}
}

func TestLimits(t *testing.T) {
	got, err := rlimits([]api.Rlimit{{Type: "RLIMIT_CORE", Soft: 1, Hard: 2}})
	if err != nil || len(got) != 2 || got[0] != (configs.Rlimit{Type: unix.RLIMIT_CORE, Soft: 1, Hard: 2}) || got[1].Type != unix.RLIMIT_NOFILE {
		t.Errorf("%+v %v", got, err)
	}
	for _, bad := range []api.Rlimit{{Type: "RLIMIT_X"}, {Type: "RLIMIT_CORE", Soft: 2, Hard: 1}} {
		if _, err := rlimits([]api.Rlimit{bad}); err == nil {
			t.Errorf("%+v was taken", bad)
		}
	}
	if _, err := capabilities(&api.Container{Capabilities: []string{"CAP_X"}}); err == nil {
		t.Error("CAP_X was taken")
	}
	if s := clampOOMScore(5000); s != 1000 {
		t.Errorf("oom score %d", s)
	}
}

func TestMergeEnv(t *testing.T) {
	base := []string{"A=1", "B=2"}
	if d := cmp.Diff([]string{"A=1", "B=3", "C=4"}, mergeEnv(base, []string{"B=3", "C=4"})); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(base, mergeEnv(base, nil)); d != "" {
		t.Error(d)
	}
}

func TestValidID(t *testing.T) {
	for id, ok := range map[string]bool{"a": true, "a-b_c.D9": true, "": false, ".": false, "..": false, ".x": false, "a/b": false, "a b": false, "ä": false} {
		if err := validID(id); (err == nil) != ok {
			t.Errorf("%q: %v", id, err)
		}
	}
}

func FuzzProcStat(f *testing.F) {
	f.Add([]byte("42 (a) b) (c) Z 1 42 42 0 -1 4 0 0 0 0 0 0 0 0 20 0 1 0 777 0 0"))
	f.Add([]byte(""))
	f.Fuzz(func(t *testing.T, b []byte) { _, _ = parseProcStat(b) })
}

func TestProcStat(t *testing.T) {
	st, err := parseProcStat([]byte("42 (a) b) (c) Z 1 42 42 0 -1 4 0 0 0 0 0 0 0 0 20 0 1 0 777 0 0"))
	if err != nil || st.state != 'Z' || st.ppid != 1 || st.start != 777 {
		t.Errorf("%+v %v", st, err)
	}
	own, err := readProcStat(os.Getpid())
	if err != nil || own.ppid != os.Getppid() || own.start == 0 {
		t.Errorf("own: %+v %v", own, err)
	}
	if _, err := readProcStat(1 << 30); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("nobody: %v", err)
	}
}

func TestHubCutsOffTheSlow(t *testing.T) {
	var h hub
	slow, cancel := h.subscribe()
	defer cancel()
	for range eventBuffer + 1 {
		h.send(api.Event{Kind: "x"})
	}
	n := 0
	for range slow {
		n++
	}
	if n != eventBuffer {
		t.Errorf("%d events before the cut", n)
	}
}

func TestVolumeDevice(t *testing.T) {
	mode, id := uint32(0o640), uint32(7)
	for name, c := range map[string]struct {
		in   api.DeviceVolume
		want *devices.Device // nil: refused
	}{
		"as the host's": {api.DeviceVolume{Source: "/dev/null", Destination: "/dev/x", ReadOnly: true}, &devices.Device{
			Path: "/dev/x", FileMode: 0o666, Rule: devices.Rule{Type: devices.CharDevice, Major: 1, Minor: 3, Permissions: "rm", Allow: true}}},
		"with rights of its own": {api.DeviceVolume{Source: "/dev/null", Destination: "/dev/x", Access: "rw", Mode: &mode, UID: &id, GID: &id}, &devices.Device{
			Path: "/dev/x", FileMode: 0o640, Uid: 7, Gid: 7, Rule: devices.Rule{Type: devices.CharDevice, Major: 1, Minor: 3, Permissions: "rw", Allow: true}}},
		"by number": {api.DeviceVolume{Source: "/dev/none", Destination: "/dev/x", Access: api.AccessNone, Number: &api.DeviceNumber{Type: "b", Major: 7, Minor: 200}}, &devices.Device{
			Path: "/dev/x", FileMode: 0o666, Rule: devices.Rule{Type: devices.BlockDevice, Major: 7, Minor: 200, Allow: true}}},
		"not there":      {api.DeviceVolume{Source: "/dev/none", Destination: "/dev/x"}, nil},
		"unknown type":   {api.DeviceVolume{Source: "/dev/null", Destination: "/dev/x", Number: &api.DeviceNumber{Type: "x"}}, nil},
		"unknown access": {api.DeviceVolume{Source: "/dev/null", Destination: "/dev/x", Access: "rx"}, nil},
		"relative":       {api.DeviceVolume{Source: "/dev/null", Destination: "x"}, nil},
	} {
		got, err := volumeDevice(c.in)
		if (err != nil) != (c.want == nil) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	// What gives no right makes no rule.
	node := &devices.Device{Path: "/dev/x", Rule: devices.Rule{Type: devices.CharDevice, Major: 195, Minor: 1, Allow: true}}
	if with, without := deviceRules(false, []*devices.Device{node}), deviceRules(false, nil); len(with) != len(without) {
		t.Errorf("%d rules instead of %d", len(with), len(without))
	}
}

// TestHooksOfUserNamespaces: what would run with the pod's ids and could not read
// the node's files is refused; hooks that run elsewhere are not.
func TestHooksOfUserNamespaces(t *testing.T) {
	s := &Supervisor{}
	pod := &api.Sandbox{Users: &api.IDRange{First: 65536, Count: 65536}}
	for when, refused := range map[string]bool{
		api.HookPrestart: false, api.HookCreateRuntime: false, api.HookCreateContainer: true, api.HookStartContainer: false, api.HookPoststart: false, api.HookPoststop: false,
	} {
		spec := &api.Container{ID: "c", Hooks: []api.Hook{{When: when, Path: "/usr/bin/hook"}}}
		err := s.setHooks(&configs.Config{}, spec, pod)
		var e *api.Error
		if refused != (err != nil) || refused && (!errors.As(err, &e) || e.Code != api.CodeInvalid) {
			t.Errorf("%s: %v", when, err)
		}
		if err := s.setHooks(&configs.Config{}, spec, &api.Sandbox{}); err != nil {
			t.Errorf("%s without a user namespace: %v", when, err)
		}
	}
}

// TestHooksShareTheStart: the hooks of a start have less time than the start, however
// many there are; those that fit in have what they want.
func TestHooksShareTheStart(t *testing.T) {
	s := &Supervisor{}
	for name, tc := range map[string]struct {
		hooks []api.Hook
		want  []time.Duration
	}{
		"one":    {[]api.Hook{{When: api.HookPrestart}}, []time.Duration{maxHookTime}},
		"short":  {[]api.Hook{{When: api.HookPrestart, TimeoutSeconds: 2}, {When: api.HookCreateContainer, TimeoutSeconds: 30}}, []time.Duration{2 * time.Second, maxHookTime}},
		"behind": {[]api.Hook{{When: api.HookPoststart}, {When: api.HookPoststop}, {When: api.HookPoststop}}, []time.Duration{maxHookTime}},
		"many": {[]api.Hook{{When: api.HookCreateRuntime}, {When: api.HookStartContainer, TimeoutSeconds: 5}, {When: api.HookPoststart}},
			[]time.Duration{15 * time.Second, 3750 * time.Millisecond, 15 * time.Second}},
	} {
		var got []time.Duration
		for _, h := range s.startHooks(tc.hooks) {
			got = append(got, h.limit)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}
