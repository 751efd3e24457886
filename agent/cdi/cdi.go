// Package cdi gives containers the devices that are described on this machine by
// the Container Device Interface (tags.cncf.io/container-device-interface): what
// drivers name, "vendor.com/class=name", stands in files that they or the machine's
// administrator have written. Who writes there is root already, so the files are
// trusted.
//
// It edits what podmon is asked for. What podmon cannot do (network devices,
// Intel RDT) is refused, since a device without it is not the device that
// was described.
package cdi

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// DefaultDirs are where the files are, on every machine; later ones win.
var DefaultDirs = []string{"/etc/cdi", "/var/run/cdi"}

// Inject adds the devices to the container. Files are read at each call: a driver
// writes its own right before it names what is in them.
func Inject(dirs, devices []string, c *api.Container) error {
	if len(devices) == 0 {
		return nil
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dirs...), cdi.WithAutoRefresh(false))
	if err != nil {
		return fmt.Errorf("CDI files in %s: %w", strings.Join(dirs, ", "), err)
	}
	spec := &oci.Spec{Process: &oci.Process{Env: c.Env, User: oci.User{UID: c.UID, GID: c.GID, AdditionalGids: c.ExtraGIDs}}}
	if missing, err := cache.InjectDevices(spec, devices...); err != nil {
		if len(missing) > 0 {
			return fmt.Errorf("CDI devices %s are described in no valid file in %s%s", strings.Join(missing, ", "), strings.Join(dirs, ", "), faults(cache))
		}
		return fmt.Errorf("CDI devices %s: %w", strings.Join(devices, ", "), err)
	}
	if err := supported(spec); err != nil {
		return fmt.Errorf("CDI devices %s: %w", strings.Join(devices, ", "), err)
	}
	c.Env, c.ExtraGIDs = spec.Process.Env, spec.Process.User.AdditionalGids
	if spec.Linux != nil {
		addNodes(spec.Linux, hostPaths(cache, devices), c)
	}
	addMounts(spec.Mounts, c)
	addHooks(spec.Hooks, c)
	return nil
}

// faults are what is wrong with files that were not read.
func faults(cache *cdi.Cache) string {
	var out []string
	for path, errs := range cache.GetErrors() {
		out = append(out, fmt.Sprintf("%s: %v", path, errors.Join(errs...)))
	}
	slices.Sort(out)
	if len(out) == 0 {
		return ""
	}
	return " (wrong are " + strings.Join(out, "; ") + ")"
}

// supported says what of the description podmon cannot do.
func supported(spec *oci.Spec) error {
	if l := spec.Linux; l != nil {
		if len(l.NetDevices) > 0 {
			return errors.New("containerEdits.netDevices is not supported")
		}
		if l.IntelRdt != nil {
			return errors.New("containerEdits.intelRdt is not supported")
		}
	}
	return nil
}

// addHooks adds the programs that the devices need to have run.
func addHooks(h *oci.Hooks, c *api.Container) {
	if h == nil {
		return
	}
	for _, moment := range []struct {
		when  string
		hooks []oci.Hook
	}{
		{api.HookPrestart, h.Prestart}, //nolint:staticcheck // deprecated, and in use
		{api.HookCreateRuntime, h.CreateRuntime},
		{api.HookCreateContainer, h.CreateContainer},
		{api.HookStartContainer, h.StartContainer},
		{api.HookPoststart, h.Poststart},
		{api.HookPoststop, h.Poststop},
	} {
		for _, hook := range moment.hooks {
			out := api.Hook{When: moment.when, Path: hook.Path, Args: hook.Args, Env: hook.Env}
			if hook.Timeout != nil {
				out.TimeoutSeconds = *hook.Timeout
			}
			c.Hooks = append(c.Hooks, out)
		}
	}
}

// hostPaths are the nodes of the host by those of the container.
func hostPaths(cache *cdi.Cache, devices []string) map[string]string {
	out := map[string]string{}
	for _, name := range devices {
		d := cache.GetDevice(name)
		for _, node := range slices.Concat(d.GetSpec().ContainerEdits.DeviceNodes, d.ContainerEdits.DeviceNodes) {
			if out[node.Path] = node.Path; node.HostPath != "" {
				out[node.Path] = node.HostPath
			}
		}
	}
	return out
}

// addNodes adds device nodes, with the rights that the description gives.
func addNodes(l *oci.Linux, hosts map[string]string, c *api.Container) {
	for _, d := range l.Devices {
		node := api.DeviceVolume{
			Source: hosts[d.Path], Destination: d.Path, Access: access(l, d), UID: d.UID, GID: d.GID,
			Number: &api.DeviceNumber{Type: d.Type, Major: d.Major, Minor: d.Minor},
		}
		if d.Type == "u" { // unbuffered: the same to Linux
			node.Number.Type = "c"
		}
		if d.FileMode != nil {
			mode := uint32(*d.FileMode & os.ModePerm)
			node.Mode = &mode
		}
		c.Volumes = slices.DeleteFunc(c.Volumes, func(v api.DeviceVolume) bool { return v.Destination == node.Destination })
		c.Volumes = append(c.Volumes, node)
	}
}

// access are the rights to a device that the rules of the description say.
func access(l *oci.Linux, d oci.LinuxDevice) string {
	if l.Resources == nil {
		return api.AccessNone
	}
	out := api.AccessNone
	for _, r := range l.Resources.Devices {
		if r.Allow && r.Type == d.Type && r.Major != nil && *r.Major == d.Major && r.Minor != nil && *r.Minor == d.Minor && r.Access != "" {
			out = r.Access
		}
	}
	return out
}

// addMounts adds mounts, in the place of those at the same path.
func addMounts(mounts []oci.Mount, c *api.Container) {
	for _, m := range mounts {
		out := api.Mount{Type: m.Type, Source: m.Source, Destination: m.Destination}
		for _, o := range m.Options {
			switch o {
			case "bind", "rbind":
				out.Type = "bind"
			case "private", "rprivate", "slave", "rslave", "shared", "rshared":
				out.Propagation = o
			case "ro":
				out.ReadOnly = true
			default:
				out.Options = append(out.Options, o)
			}
		}
		if out.Type == "none" {
			out.Type = "bind"
		}
		c.Mounts = slices.DeleteFunc(c.Mounts, func(v api.Mount) bool { return v.Destination == out.Destination })
		c.Mounts = append(c.Mounts, out)
	}
}
