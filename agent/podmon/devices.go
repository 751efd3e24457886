package podmon

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	devices "github.com/opencontainers/cgroups/devices/config"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

func charDevice(path string, major, minor int64) *devices.Device {
	return &devices.Device{
		Path: path, FileMode: 0o666,
		Rule: devices.Rule{Type: devices.CharDevice, Major: major, Minor: minor, Permissions: "rwm", Allow: true},
	}
}

// standardDevices are in every container's /dev.
func standardDevices() []*devices.Device {
	return []*devices.Device{
		charDevice("/dev/null", 1, 3),
		charDevice("/dev/zero", 1, 5),
		charDevice("/dev/full", 1, 7),
		charDevice("/dev/random", 1, 8),
		charDevice("/dev/urandom", 1, 9),
		charDevice("/dev/tty", 5, 0),
	}
}

// hostDevice describes the device node at path, for the same path inside.
func hostDevice(path string) (*devices.Device, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return nil, fmt.Errorf("device %s: %w", path, err)
	}
	d := &devices.Device{
		Path: path, FileMode: os.FileMode(st.Mode & 0o777), Uid: st.Uid, Gid: st.Gid,
		Rule: devices.Rule{
			Major: int64(unix.Major(uint64(st.Rdev))), Minor: int64(unix.Minor(uint64(st.Rdev))),
			Permissions: "rwm", Allow: true,
		},
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFCHR:
		d.Type = devices.CharDevice
	case unix.S_IFBLK:
		d.Type = devices.BlockDevice
	default:
		return nil, fmt.Errorf("device %s: not a device node", path)
	}
	return d, nil
}

// volumeDevice describes a device node of the host under the container's own
// name for it.
func volumeDevice(v api.DeviceVolume) (*devices.Device, error) {
	d, err := sourceDevice(v)
	if err != nil {
		return nil, err
	}
	if !isHostPath(v.Destination) || v.Destination == "/" {
		return nil, invalidf("device %s: destination %q is not an absolute path", v.Source, v.Destination)
	}
	d.Path = v.Destination
	switch {
	case v.Access == api.AccessNone:
		d.Permissions = ""
	case strings.Trim(v.Access, "rwm") != "":
		return nil, invalidf("device %s: access %q: the letters r, w and m, or %s, are known", v.Destination, v.Access, api.AccessNone)
	case v.Access != "":
		d.Permissions = devices.Permissions(v.Access)
	case v.ReadOnly:
		d.Permissions = "rm"
	}
	if v.Mode != nil {
		d.FileMode = os.FileMode(*v.Mode & 0o777)
	}
	if v.UID != nil {
		d.Uid = *v.UID
	}
	if v.GID != nil {
		d.Gid = *v.GID
	}
	return d, nil
}

// sourceDevice describes what a container is given, by its number or as the host
// has it.
func sourceDevice(v api.DeviceVolume) (*devices.Device, error) {
	if v.Number == nil {
		return hostDevice(v.Source)
	}
	d := charDevice(v.Source, v.Number.Major, v.Number.Minor)
	switch v.Number.Type {
	case "c":
	case "b":
		d.Type = devices.BlockDevice
	case "p":
		d.Type, d.Permissions = devices.FifoDevice, "" // cgroups know none
	default:
		return nil, invalidf("device %s: type %q: c, b and p are known", v.Destination, v.Number.Type)
	}
	return d, nil
}

// hostDevices are the device nodes of the host's /dev, for a privileged
// container. Terminals and what a container mounts itself are left out.
func hostDevices() ([]*devices.Device, error) {
	var out []*devices.Device
	err := filepath.WalkDir("/dev", func(path string, e os.DirEntry, err error) error {
		if err != nil {
			return nil // gone, or not for us
		}
		if e.IsDir() {
			switch path {
			case "/dev/pts", "/dev/shm", "/dev/fd", "/dev/mqueue":
				return filepath.SkipDir
			}
			return nil
		}
		if e.Type()&os.ModeDevice == 0 || path == "/dev/console" || path == "/dev/ptmx" {
			return nil
		}
		if d, err := hostDevice(path); err == nil {
			out = append(out, d)
		}
		return nil
	})
	return out, err
}
