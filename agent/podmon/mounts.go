package podmon

import (
	"path/filepath"
	"slices"
	"strings"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

const nosuidNoexecNodev = unix.MS_NOSUID | unix.MS_NOEXEC | unix.MS_NODEV

// shmSource is what a pod's containers see as /dev/shm.
func (s *Supervisor) shmSource(pod *api.Sandbox) string {
	if pod.HostIPC {
		return "/dev/shm"
	}
	return s.sandboxPath(pod.ID, "shm")
}

// mounts are a container's: the file systems every process expects, then the
// agent's, parents before what lies in them.
func mounts(spec *api.Container, shm string) ([]*configs.Mount, error) {
	ro := unix.MS_RDONLY
	if spec.Privileged {
		ro = 0
	}
	out := []*configs.Mount{
		{Device: "proc", Source: "proc", Destination: "/proc", Flags: nosuidNoexecNodev},
		{Device: "tmpfs", Source: "tmpfs", Destination: "/dev", Flags: unix.MS_NOSUID | unix.MS_STRICTATIME, Data: "mode=755,size=65536k"},
		{Device: "devpts", Source: "devpts", Destination: "/dev/pts", Flags: unix.MS_NOSUID | unix.MS_NOEXEC, Data: "newinstance,ptmxmode=0666,mode=0620,gid=5"},
		{Device: "mqueue", Source: "mqueue", Destination: "/dev/mqueue", Flags: nosuidNoexecNodev},
		{Device: "sysfs", Source: "sysfs", Destination: "/sys", Flags: nosuidNoexecNodev | ro},
		{Device: "cgroup", Source: "cgroup", Destination: "/sys/fs/cgroup", Flags: nosuidNoexecNodev | unix.MS_RELATIME | ro},
		{Device: "bind", Source: shm, Destination: "/dev/shm", Flags: unix.MS_BIND | nosuidNoexecNodev, PropagationFlags: []int{unix.MS_PRIVATE}},
	}
	asked := make([]*configs.Mount, 0, len(spec.Mounts))
	for _, m := range spec.Mounts {
		cm, err := mount(m)
		if err != nil {
			return nil, err
		}
		asked = append(asked, cm)
	}
	slices.SortStableFunc(asked, func(a, b *configs.Mount) int {
		return strings.Count(filepath.Clean(a.Destination), "/") - strings.Count(filepath.Clean(b.Destination), "/")
	})
	for _, m := range asked {
		out = slices.DeleteFunc(out, func(std *configs.Mount) bool { return std.Destination == filepath.Clean(m.Destination) })
		out = append(out, m)
	}
	return out, nil
}

// mountFlags are the options mount(8) knows that are flags to the kernel.
var mountFlags = map[string]int{
	"ro": unix.MS_RDONLY, "nosuid": unix.MS_NOSUID, "nodev": unix.MS_NODEV, "noexec": unix.MS_NOEXEC,
	"sync": unix.MS_SYNCHRONOUS, "dirsync": unix.MS_DIRSYNC, "noatime": unix.MS_NOATIME,
	"nodiratime": unix.MS_NODIRATIME, "relatime": unix.MS_RELATIME, "strictatime": unix.MS_STRICTATIME,
	"bind": unix.MS_BIND, "rbind": unix.MS_BIND | unix.MS_REC, "nosymfollow": unix.MS_NOSYMFOLLOW,
}

// mountClears are options that take a flag away.
var mountClears = map[string]int{
	"rw": unix.MS_RDONLY, "suid": unix.MS_NOSUID, "dev": unix.MS_NODEV, "exec": unix.MS_NOEXEC,
}

var mountPropagations = map[string]int{
	"": unix.MS_PRIVATE | unix.MS_REC, "private": unix.MS_PRIVATE, "rprivate": unix.MS_PRIVATE | unix.MS_REC,
	"slave": unix.MS_SLAVE, "rslave": unix.MS_SLAVE | unix.MS_REC,
	"shared": unix.MS_SHARED, "rshared": unix.MS_SHARED | unix.MS_REC,
}

func mount(m api.Mount) (*configs.Mount, error) {
	prop, ok := mountPropagations[m.Propagation]
	if !ok {
		return nil, invalidf("mount %s: unknown propagation %q", m.Destination, m.Propagation)
	}
	out := &configs.Mount{
		Device: m.Type, Source: m.Source, Destination: m.Destination, PropagationFlags: []int{prop},
	}
	if m.Type == "" || m.Type == "bind" {
		out.Device = "bind"
		out.Flags = unix.MS_BIND | unix.MS_REC
		if !isHostPath(m.Source) {
			return nil, invalidf("mount %s: source %q is not an absolute path", m.Destination, m.Source)
		}
	}
	var data []string
	for _, o := range m.Options {
		if f, ok := mountFlags[o]; ok {
			out.Flags |= f
		} else if f, ok := mountClears[o]; ok {
			out.Flags &^= f
			out.ClearedFlags |= f
		} else if o == "rro" { // read-only with everything mounted below it
			out.Flags |= unix.MS_RDONLY
			out.RecAttr = &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
		} else {
			data = append(data, o)
		}
	}
	if out.Device == "bind" && len(data) > 0 {
		return nil, invalidf("mount %s: option %q cannot be used with a bind", m.Destination, data[0])
	}
	out.Data = strings.Join(data, ",")
	if m.ReadOnly {
		out.Flags |= unix.MS_RDONLY
	}
	return out, nil
}

// rootPropagation lets mounts through to and from the container as far as the
// most open of its mounts asks for it.
func rootPropagation(ms []api.Mount) int {
	p := unix.MS_PRIVATE | unix.MS_REC
	for _, m := range ms {
		switch m.Propagation {
		case "rshared", "shared":
			return unix.MS_SHARED | unix.MS_REC
		case "rslave", "slave":
			p = unix.MS_SLAVE | unix.MS_REC
		}
	}
	return p
}
