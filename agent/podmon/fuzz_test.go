package podmon

import (
	"bytes"
	"encoding/json"
	"path"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podmon/api/frame"
)

// FuzzRequest decodes what a client may send and holds it against the rules by
// which podmon takes it: what is taken names no directory, cgroup or kernel switch
// outside of the pod's own.
func FuzzRequest(f *testing.F) {
	for _, req := range []api.Request{
		{Op: api.OpCreateSandbox, Sandbox: &api.Sandbox{ID: "p", CgroupParent: "/clusterd/podp", NetNS: "/run/ns", Sysctls: map[string]string{"net.ipv4.ip_forward": "1", "kernel/shmmax": "1"}}},
		{Op: api.OpCreateSandbox, Sandbox: &api.Sandbox{ID: "../p", CgroupParent: "/a/../..", Sysctls: map[string]string{"net/../../../etc/passwd": "x", "kernel.core_pattern": "|x"}}},
		{Op: api.OpStartContainer, Container: &api.Container{ID: "c", SandboxID: "p", Rootfs: "/r", Args: []string{"a"}, Mounts: []api.Mount{{Destination: "../x"}}, LogPath: "log"}},
		{Op: api.OpSignal, Signal: &api.Signal{ID: "c", Signal: 99}},
		{Op: api.OpFence, Fence: &api.Fence{Deadline: 1 << 40, Add: []api.FencedPod{{UID: "u", Dirs: []string{"/var/lib/x/pods/u"}}}, Drop: []string{"v"}}},
		{Op: api.OpFence, Fence: &api.Fence{Deadline: -1, Add: []api.FencedPod{{Dirs: []string{"/", "../x"}}}}},
	} {
		b, err := frame.Encode(req)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte("\x00\x00\x00\x02{}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var req api.Request
		if frame.Decode(bytes.NewReader(b), &req) != nil {
			return
		}
		if sb := req.Sandbox; sb != nil && validSandbox(*sb) == nil {
			if strings.Contains(sb.ID, "/") || strings.HasPrefix(sb.ID, ".") || path.Clean(sb.CgroupParent) != sb.CgroupParent || sb.CgroupParent == "/" {
				t.Errorf("taken: %+v", sb)
			}
			for name := range sb.Sysctls {
				file, err := sysctlFile(name, *sb)
				if err != nil || path.Clean(file) != file || !strings.HasPrefix(file, "/proc/sys/net/") && !strings.HasPrefix(file, "/proc/sys/kernel/shm") &&
					!strings.HasPrefix(file, "/proc/sys/kernel/msg") && file != "/proc/sys/kernel/sem" && !strings.HasPrefix(file, "/proc/sys/fs/mqueue/") {
					t.Errorf("sysctl %q is taken as %s, %v", name, file, err)
				}
			}
		}
		if f := req.Fence; f != nil && validFence(*f) == nil {
			for _, p := range f.Add {
				for _, d := range p.Dirs {
					if path.Clean(d) != d || !path.IsAbs(d) || d == "/" {
						t.Errorf("taken: %+v", f)
					}
				}
			}
		}
		if c := req.Container; c != nil && validContainer(*c) == nil {
			if strings.ContainsAny(c.ID+c.SandboxID, "/\x00") || !path.IsAbs(c.Rootfs) || len(c.Args) == 0 {
				t.Errorf("taken: %+v", c)
			}
		}
	})
}

// FuzzState reads records as a crash or a bad disk may leave them.
func FuzzState(f *testing.F) {
	for _, v := range []any{
		sandboxFile{Version: stateVersion, BootID: "b", Start: 1, Status: api.SandboxStatus{Sandbox: api.Sandbox{ID: "p"}, State: api.StateRunning, Pid: 1 << 30}},
		containerFile{Version: stateVersion, State: stateRunning, Start: 1, Status: api.ContainerStatus{Container: api.Container{ID: "c"}, Pid: 1 << 30}},
		handoverFile{Version: handoverVersion, Kept: []handedKept{{kept: kept{ID: "c", Pid: 1, Files: []string{keptTTY}}, FDs: []int{5}}}, LockFD: 4},
	} {
		b, err := json.Marshal(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var sb sandboxFile
		if json.Unmarshal(b, &sb) == nil {
			if p, err := openProcess(sb.Status.Pid, sb.Start); err == nil {
				if sb.Start != 0 && p.start != sb.Start {
					t.Errorf("took hold of another process: %+v", sb)
				}
				p.close()
			}
		}
		var in handoverFile
		if json.Unmarshal(b, &in) == nil {
			for _, e := range in.Kept {
				// More names than descriptors must not panic.
				if k := e.kept; k.take(keptTTY) != nil {
					t.Error("a descriptor from nowhere")
				}
			}
		}
	})
}
