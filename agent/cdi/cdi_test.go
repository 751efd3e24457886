package cdi

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

const gpu = `cdiVersion: "1.1.0"
kind: example.com/gpu
containerEdits:
  env: ["GPUS=some"]
devices:
- name: "0"
  containerEdits:
    env: ["GPU=0", "PATH=/gpu/bin"]
    deviceNodes:
    - {path: /dev/gpu0, hostPath: /dev/null, permissions: rw, fileMode: 0o640, uid: 7, gid: 8}
    - {path: /dev/zero}
    mounts:
    - {hostPath: /opt/gpu, containerPath: /gpu, options: [ro, nosuid, rbind, rslave]}
    - {hostPath: tmpfs, containerPath: /scratch, type: tmpfs, options: [size=1m]}
    additionalGids: [44]
- name: "1"
  containerEdits:
    deviceNodes: [{path: /dev/gpu1, type: c, major: 195, minor: 1, permissions: none}]
- name: hooked
  containerEdits:
    hooks:
    - {hookName: poststop, path: /usr/bin/gpu-reset}
    - {hookName: createContainer, path: /usr/bin/ldconfig-hook, args: [ldconfig-hook, --folder, /gpu], env: [A=b], timeout: 7}
- name: wired
  containerEdits:
    netDevices: [{hostInterfaceName: eth9, name: gpu0}]
`

func folder(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestInject(t *testing.T) {
	dirs := []string{folder(t, map[string]string{"gpu.yaml": gpu}), filepath.Join(t.TempDir(), "missing")}
	c := api.Container{
		Env: []string{"PATH=/bin", "HOME=/"}, UID: 1000, ExtraGIDs: []uint32{5},
		Mounts:  []api.Mount{{Source: "/data", Destination: "/data"}, {Source: "/old", Destination: "/gpu"}},
		Volumes: []api.DeviceVolume{{Source: "/dev/loop0", Destination: "/dev/disk"}, {Source: "/dev/full", Destination: "/dev/zero"}},
	}
	if err := Inject(dirs, []string{"example.com/gpu=0", "example.com/gpu=1"}, &c); err != nil {
		t.Fatal(err)
	}
	want := api.Container{
		Env: []string{"PATH=/gpu/bin", "HOME=/", "GPUS=some", "GPU=0"}, UID: 1000, ExtraGIDs: []uint32{5, 44},
		Mounts: []api.Mount{
			{Source: "/data", Destination: "/data"},
			{Type: "bind", Source: "/opt/gpu", Destination: "/gpu", ReadOnly: true, Propagation: "rslave", Options: []string{"nosuid"}},
			{Type: "tmpfs", Source: "tmpfs", Destination: "/scratch", Options: []string{"size=1m"}},
		},
		Volumes: []api.DeviceVolume{
			{Source: "/dev/loop0", Destination: "/dev/disk"},
			{Source: "/dev/null", Destination: "/dev/gpu0", Access: "rw", Mode: ptr.To[uint32](0o640), UID: ptr.To[uint32](7), GID: ptr.To[uint32](8), Number: &api.DeviceNumber{Type: "c", Major: 1, Minor: 3}},
			{Source: "/dev/zero", Destination: "/dev/zero", Access: "rwm", Mode: ptr.To[uint32](0o666), UID: ptr.To[uint32](1000), Number: &api.DeviceNumber{Type: "c", Major: 1, Minor: 5}},
			{Source: "/dev/gpu1", Destination: "/dev/gpu1", Access: api.AccessNone, UID: ptr.To[uint32](1000), Number: &api.DeviceNumber{Type: "c", Major: 195, Minor: 1}},
		},
	}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Error(diff)
	}
}

func TestInjectHooks(t *testing.T) {
	dirs := []string{folder(t, map[string]string{"gpu.yaml": gpu})}
	c := api.Container{Hooks: []api.Hook{{When: api.HookPoststart, Path: "/of/another"}}}
	if err := Inject(dirs, []string{"example.com/gpu=hooked"}, &c); err != nil {
		t.Fatal(err)
	}
	want := []api.Hook{
		{When: api.HookPoststart, Path: "/of/another"},
		{When: api.HookCreateContainer, Path: "/usr/bin/ldconfig-hook", Args: []string{"ldconfig-hook", "--folder", "/gpu"}, Env: []string{"A=b"}, TimeoutSeconds: 7},
		{When: api.HookPoststop, Path: "/usr/bin/gpu-reset"},
	}
	if diff := cmp.Diff(want, c.Hooks); diff != "" {
		t.Error(diff)
	}
}

func TestNothingToInject(t *testing.T) {
	c := api.Container{Env: []string{"A=1"}}
	if err := Inject([]string{"/nowhere"}, nil, &c); err != nil || !cmp.Equal(c, api.Container{Env: []string{"A=1"}}) {
		t.Errorf("%v, %+v", err, c)
	}
}

func TestWhatCannotBeInjected(t *testing.T) {
	dir := folder(t, map[string]string{"gpu.yaml": gpu, "broken.json": "{"})
	for device, want := range map[string]string{
		"example.com/gpu=9":     "broken.json",
		"example.com/gpu=wired": "netDevices",
		"not a name":            "not a name",
	} {
		c := api.Container{Env: []string{"A=1"}}
		err := Inject([]string{dir}, []string{device}, &c)
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), device) {
			t.Errorf("%s: %v, want %q in it", device, err, want)
		}
		if !cmp.Equal(c, api.Container{Env: []string{"A=1"}}) {
			t.Errorf("%s: the container was changed: %+v", device, c)
		}
	}
}
