package podmon

import (
	"fmt"
	"os"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

func validUsers(spec api.Sandbox) error {
	u := spec.Users
	switch {
	case u == nil:
	case spec.NetNS == "" || spec.HostIPC || spec.HostPID:
		return invalidf("a pod with a user namespace cannot share the host's network, IPC or PID namespace")
	case u.First == 0 || u.Count == 0 || uint64(u.First)+uint64(u.Count) > 1<<32-1:
		return invalidf("ids %d to %d of the host are no range for a user namespace", u.First, uint64(u.First)+uint64(u.Count)-1)
	}
	return nil
}

// validIDs refuses ids that a pod's user namespace does not have: on the host
// they would be another's.
func validIDs(spec *api.Container, users *api.IDRange) error {
	if users == nil {
		return nil
	}
	for _, id := range append([]uint32{spec.UID, spec.GID}, spec.ExtraGIDs...) {
		if id >= users.Count {
			return invalidf("container %s: id %d is not in the pod's user namespace, which has 0 to %d", spec.Name, id, users.Count-1)
		}
	}
	return nil
}

// hostID is the id by which the host knows an id of a pod.
func hostID(users *api.IDRange, id uint32) uint32 {
	if users == nil {
		return id
	}
	return users.First + id
}

// giveTo makes the host's user uid the owner of the pipes among files.
// libcontainer does it too, but inside a user namespace it may not.
func giveTo(uid uint32, files ...*os.File) error {
	for _, f := range files {
		st, err := f.Stat()
		if err == nil && st.Mode()&os.ModeNamedPipe != 0 {
			err = f.Chown(int(uid), -1)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// ownerOf opens the user namespace that a namespace belongs to (ioctl_nsfs(2)).
func ownerOf(ns *os.File) (*os.File, error) {
	fd, err := unix.IoctlRetInt(int(ns.Fd()), unix.NS_GET_USERNS)
	if err != nil {
		return nil, fmt.Errorf("user namespace of network namespace %s: %w", ns.Name(), err)
	}
	return os.NewFile(uintptr(fd), "user namespace of "+ns.Name()), nil
}

// checkUsers makes sure that a process's user namespace has just the ids that
// the agent keeps for its pod.
func checkUsers(pid int, want api.IDRange) error {
	for _, file := range []string{"uid_map", "gid_map"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
		if err != nil {
			return err
		}
		var inside, first, count uint32
		if n, _ := fmt.Sscan(string(b), &inside, &first, &count); n != 3 || inside != 0 || first != want.First || count != want.Count {
			return invalidf("the user namespace's %s is %q, asked for was %d ids from %d on", file, b, want.Count, want.First)
		}
	}
	return nil
}

// joinUsers puts a container into its pod's user namespace. What is bound into
// it shows the owners that it has on disk, as if there were no such namespace.
func joinUsers(cfg *configs.Config, sb *sandbox, shm string, mounts []api.Mount) {
	users := sb.status.Sandbox.Users
	if users == nil {
		return
	}
	ns := sb.nsPath("user")
	cfg.Namespaces.Add(configs.NEWUSER, ns)
	ids := []configs.IDMap{{ContainerID: 0, HostID: int64(users.First), Size: int64(users.Count)}}
	cfg.UIDMappings, cfg.GIDMappings = ids, ids
	asIs := map[string]bool{shm: true} // made for the pod's own ids
	for _, m := range mounts {
		asIs[m.Source] = asIs[m.Source] || m.Mapped
	}
	for _, m := range cfg.Mounts {
		if m.IsBind() && !asIs[m.Source] {
			m.IDMapping = &configs.MountIDMapping{UserNSPath: ns}
		}
	}
}
