package podspec

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/object"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/agent/volume"
)

// NewID names a sandbox or container, unique for all time.
func NewID() string {
	var b [32]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// Input is what a container's runtime spec is made of.
type Input struct {
	Pod       *v1.Pod
	Container *v1.Container
	Kind      podstate.Kind
	ID        string // of the container, made by NewID
	Sandbox   podstate.Sandbox
	Attempt   uint32
	Image     image.Image
	RootFS    string        // where the image is mounted
	BackOff   time.Duration // before the start after this one
	Services  Services
	Target    string // the container whose processes it is to see, "": its own
}

// createError marks what is wrong with a container on this node (a profile that
// is not there, an unknown capability or user): CreateContainerError. Other
// faults of a spec are of what it refers to: CreateContainerConfigError.
type createError struct{ error }

func (e createError) Unwrap() error { return e.error }

// Reason is the status's word for an error of Builder.Container.
func Reason(err error) string {
	if errors.As(err, new(createError)) || errors.Is(err, volume.ErrImageVolume) {
		return podstate.ReasonCreateContainer
	}
	return "CreateContainerConfigError"
}

// Builder translates pods of the API into what podmon is asked for. Its methods
// may be called concurrently for different pods.
type Builder struct {
	NodeName string
	NodeIPs  []netip.Addr
	// Node returns the node's object as last known. Never nil.
	Node func() *v1.Node

	Volumes *volume.Manager
	Objects *object.Cache

	// PodDir holds one directory a pod; LogDir NS_NAME_UID/CONTAINER/N.log.
	PodDir, LogDir string

	// ResolvConf is the host's; "": the one in use.
	ResolvConf string
	// ClusterDNS are the addresses of the cluster's name servers, ClusterDomain
	// what the names of Services end with.
	ClusterDNS    []netip.Addr
	ClusterDomain string
	// NoCluster is set where there is no API, and so no names of a cluster.
	NoCluster bool
}

// Container translates a container of the API into podmon's message, and makes
// the files and directories it names. Reason is the status's word for its error.
func (b *Builder) Container(ctx context.Context, in Input) (api.Container, error) {
	c, pod := in.Container, in.Pod
	node := b.Node()
	cfg := in.Image.Config
	if err := forbiddenMAC(pod, c, seLinux()); err != nil {
		return api.Container{}, err
	}
	name, err := Hostname(pod, b.NodeName, b.ClusterDomain)
	if err != nil {
		return api.Container{}, err
	}
	lines, vars, err := buildEnv(ctx, envInput{
		pod: pod, container: c, image: cfg.Env, objects: b.Objects, services: in.Services, podIPs: in.Sandbox.IPs,
		nodeIPs: b.NodeIPs, nodeName: b.NodeName, allocatable: node.Status.Allocatable, tty: c.TTY,
		hostname: name,
		volumeDir: func(of string) (string, error) {
			dir, _, err := b.Volumes.Source(pod, of)
			return dir, err
		},
	})
	if err != nil {
		return api.Container{}, err
	}
	out := api.Container{
		ID: in.ID, SandboxID: in.Sandbox.ID, Name: c.Name, Attempt: in.Attempt, TargetID: in.Target, Rootfs: in.RootFS,
		Env: lines, Cwd: cfg.WorkingDir, TTY: c.TTY, Stdin: c.Stdin, StdinOnce: c.StdinOnce,
		Resources: podstate.ContainerResources(pod, c.Resources), OOMScoreAdj: podstate.OomScoreAdj(pod, c, node.Status.Capacity.Memory().Value()),
		Labels: map[string]string{
			podstate.LabelHash: podstate.Hash(c), podstate.LabelType: string(in.Kind), podstate.LabelImage: c.Image, podstate.LabelImageID: in.Image.NameFor(c.Image), podstate.LabelBackOff: in.BackOff.String(),
			podstate.LabelSignal: signalName(StopSignal(c, cfg.StopSignal)),
		},
	}
	if c.WorkingDir != "" {
		out.Cwd = c.WorkingDir
		if !filepath.IsAbs(out.Cwd) {
			return out, createError{fmt.Errorf("workingDir %q: must be an absolute path", out.Cwd)}
		}
	}
	out.Cwd = filepath.Join("/", out.Cwd)
	if out.Args, err = argv(c, cfg.Entrypoint, cfg.Cmd, vars); err != nil {
		return out, err
	}
	if err := Startable(&out); err != nil {
		return out, err
	}
	out.Resources.Hugepages = podstate.Hugepages(c.Resources.Limits, node.Status.Capacity)
	if out.OOMSingleProcess, err = podstate.OomSingleProcess(pod, c.Name); err != nil {
		return out, err
	}
	if err := security(&out, pod, c, filepath.Join(b.PodDir, "..", "seccomp")); err != nil {
		return out, err
	}
	if err := identity(&out, pod, c, cfg.User, in.RootFS); err != nil {
		return out, err
	}
	if err := insideUsers(&out, pod); err != nil {
		return out, err
	}
	if out.Mounts, err = b.mounts(ctx, pod, c, out.Privileged, vars); err != nil {
		return out, err
	}
	if out.Volumes, err = b.devices(pod, c); err != nil {
		return out, err
	}
	msg, err := b.messageFile(pod, c, in.Attempt)
	if err != nil {
		return out, err
	}
	if msg != "" {
		out.Labels[podstate.LabelMessage] = msg
		out.Mounts = append(out.Mounts, api.Mount{Source: msg, Destination: messagePath(c)})
	}
	out.LogPath = b.LogPath(pod, c.Name, in.Attempt)
	return out, os.MkdirAll(filepath.Dir(out.LogPath), 0o755)
}

// argv is command and args over the image's entrypoint and cmd.
func argv(c *v1.Container, entrypoint, cmd []string, vars map[string]string) ([]string, error) {
	var long error
	total := 0
	expand := func(in []string) []string {
		out := make([]string, len(in))
		for i, s := range in {
			if total > maxStrings {
				long = createError{fmt.Errorf("command and args have more than %d bytes, which is all that Linux takes: use a volume instead", maxStrings)}
				break
			}
			out[i] = Expand(s, vars)
			total += len(out[i]) + 1
		}
		return out
	}
	var out []string
	switch {
	case len(c.Command) > 0:
		out = append(expand(c.Command), expand(c.Args)...)
	case len(c.Args) > 0:
		out = append(append(out, entrypoint...), expand(c.Args)...)
	default:
		out = append(append(out, entrypoint...), cmd...)
	}
	if long != nil {
		return nil, long
	}
	if len(out) == 0 {
		return nil, createError{fmt.Errorf("no command specified: neither the container nor its image %q names one", c.Image)}
	}
	return out, nil
}

// mounts are the volumes and the files the node gives every container.
func (b *Builder) mounts(ctx context.Context, pod *v1.Pod, c *v1.Container, privileged bool, vars map[string]string) ([]api.Mount, error) {
	out := []api.Mount{}
	taken := map[string]bool{}
	for i, vm := range c.VolumeMounts {
		if b.Volumes.IsDevice(pod, vm.Name) {
			return nil, fmt.Errorf("volume %q has volumeMode Block, but is named in volumeMounts: name it in volumeDevices", vm.Name)
		}
		src, ro, err := b.Volumes.Source(pod, vm.Name)
		if err != nil {
			return nil, err
		}
		sub := vm.SubPath
		if vm.SubPathExpr != "" {
			if sub = Expand(vm.SubPathExpr, vars); strings.Contains(sub, "$(") {
				return nil, fmt.Errorf("subPathExpr %q names a variable that is not set", vm.SubPathExpr)
			}
		}
		if sub != "" {
			if src, err = b.Volumes.SubPath(ctx, pod, vm.Name, c.Name, i, sub); err != nil {
				return nil, err
			}
		} else if err := b.Volumes.Present(ctx, pod, vm.Name, c.Name); err != nil {
			return nil, err
		}
		mount := api.Mount{Source: src, Destination: vm.MountPath, ReadOnly: vm.ReadOnly || ro}
		if podstate.RecursiveReadOnly(&vm, ReadOnlyTrees()) {
			mount.Options = []string{"rro"}
		} else if mode := vm.RecursiveReadOnly; mode != nil && *mode == v1.RecursiveReadOnlyEnabled {
			return nil, fmt.Errorf("volumeMount %q: recursiveReadOnly: Enabled needs Linux 5.12 or newer; IfPossible does without", vm.Name)
		}
		if podstate.ImageSource(&pod.Spec, vm.Name) != nil {
			mount.Mapped = HasUsers(pod) // see mountVolume
			mount.Options = append(mount.Options, "noexec", "nosuid", "nodev")
		}
		if p := vm.MountPropagation; p != nil {
			switch *p {
			case v1.MountPropagationHostToContainer:
				mount.Propagation = "rslave"
			case v1.MountPropagationBidirectional:
				if !privileged {
					return nil, fmt.Errorf("volumeMount %q: Bidirectional propagation needs a privileged container", vm.Name)
				}
				mount.Propagation = "rshared"
			}
		}
		taken[filepath.Clean(vm.MountPath)] = true
		out = append(out, mount)
	}
	for dst, name := range map[string]string{"/etc/hosts": "etc-hosts", "/etc/resolv.conf": "resolv.conf"} {
		if !taken[dst] && !taken["/etc"] {
			out = append(out, api.Mount{Source: filepath.Join(b.podDir(pod), name), Destination: dst})
		}
	}
	return out, nil
}

// devices are the volumes that the container has as block devices.
func (b *Builder) devices(pod *v1.Pod, c *v1.Container) ([]api.DeviceVolume, error) {
	var out []api.DeviceVolume
	for _, vd := range c.VolumeDevices {
		src, ro, err := b.Volumes.Device(pod, vd.Name)
		if err != nil {
			return nil, err
		}
		out = append(out, api.DeviceVolume{Source: src, Destination: vd.DevicePath, ReadOnly: ro})
	}
	return out, nil
}

// ReadOnlyTrees reports whether the kernel can change a whole tree of mounts
// (mount_setattr(2), Linux 5.12): it is asked about no file at all.
var ReadOnlyTrees = sync.OnceValue(func() bool {
	return !errors.Is(unix.MountSetattr(-1, "", 0, &unix.MountAttr{}), unix.ENOSYS)
})

func messagePath(c *v1.Container) string {
	if c.TerminationMessagePath == "" {
		return v1.TerminationMessagePathDefault
	}
	return c.TerminationMessagePath
}

// messageFile makes the file in which the container may leave its last words.
func (b *Builder) messageFile(pod *v1.Pod, c *v1.Container, attempt uint32) (string, error) {
	p := b.MessagePath(pod, c.Name, attempt)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		return "", err
	}
	f, err := os.OpenFile(p, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o666)
	if err != nil {
		return "", err
	}
	defer f.Close()
	return p, f.Chmod(0o666) // for any user the container runs as
}
