// Package csitest is a CSI driver for tests: its volumes are directories, or files
// behind loop devices, of one directory that all nodes share. It serves the
// identity and node services and registers as drivers do; what it was asked is
// kept, and it can be made to fail, to hang and to be gone.
package csitest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// Config of a Driver.
type Config struct {
	Name   string // "disks.example.com"
	NodeID string
	// Root is the node's directory for drivers; Disks holds the volumes.
	Root, Disks string
	Topology    map[string]string
	MaxVolumes  int64
	// Mounts makes mounts; nil: the kernel's.
	Mounts Mounts
}

// Mounts are what the driver does on the machine.
type Mounts interface {
	// Bind mounts a directory or device at target, which exists.
	Bind(source, target string, readOnly bool) error
	Unmount(target string) error
	Mounted(target string) (bool, error)
}

// Driver is one node's driver.
type Driver struct {
	spec.UnimplementedIdentityServer
	spec.UnimplementedNodeServer
	cfg Config

	mu     sync.Mutex // guards all below
	server *grpc.Server
	calls  []Call
	faults map[string]error
	hangs  map[string]chan struct{}
}

// Call is one that the driver has got.
type Call struct {
	Method  string // "NodeStageVolume"
	Request proto.Message
}

// New returns a driver that does not run.
func New(cfg Config) *Driver {
	if cfg.Mounts == nil {
		cfg.Mounts = kernel{}
	}
	return &Driver{cfg: cfg, faults: map[string]error{}, hangs: map[string]chan struct{}{}}
}

// Sockets of the driver: its own, and the one by which it registers.
func (d *Driver) sockets() (own, register string) {
	return filepath.Join(d.cfg.Root, "plugins", d.cfg.Name, "csi.sock"), filepath.Join(d.cfg.Root, "plugins_registry", d.cfg.Name+"-reg.sock")
}

// Start serves the driver and registers it.
func (d *Driver) Start() error {
	own, register := d.sockets()
	server := grpc.NewServer(grpc.UnaryInterceptor(d.intercept))
	spec.RegisterIdentityServer(server, d)
	spec.RegisterNodeServer(server, d)
	registration.RegisterRegistrationServer(server, &registrar{d: d, endpoint: own})
	for _, path := range []string{own, register} {
		if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
			return err
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		l, err := net.Listen("unix", path)
		if err != nil {
			return err
		}
		l.(*net.UnixListener).SetUnlinkOnClose(false) // as after kill -9
		go func() { _ = server.Serve(l) }()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.server = server
	return nil
}

// Kill ends the driver at once; its sockets stay, as after kill -9.
func (d *Driver) Kill() {
	d.mu.Lock()
	server := d.server
	d.server = nil
	for method, c := range d.hangs {
		close(c)
		delete(d.hangs, method)
	}
	d.mu.Unlock()
	if server != nil {
		server.Stop()
	}
}

// Remove ends the driver and removes its sockets.
func (d *Driver) Remove() error {
	d.Kill()
	own, register := d.sockets()
	return errors.Join(os.RemoveAll(own), os.RemoveAll(register))
}

// Fail makes calls of a method fail; nil: no more.
func (d *Driver) Fail(method string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.faults[method] = err
	if err == nil {
		delete(d.faults, method)
	}
}

// Hang makes calls of a method wait until resume is called.
func (d *Driver) Hang(method string) (resume func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := make(chan struct{})
	d.hangs[method] = c
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.hangs[method] == c {
			close(c)
			delete(d.hangs, method)
		}
	}
}

// Calls are those of a method so far.
func (d *Driver) Calls(method string) []Call {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []Call
	for _, c := range d.calls {
		if c.Method == method {
			out = append(out, c)
		}
	}
	return out
}

func (d *Driver) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	method := info.FullMethod[strings.LastIndex(info.FullMethod, "/")+1:]
	d.mu.Lock()
	if m, ok := req.(proto.Message); ok {
		d.calls = append(d.calls, Call{method, proto.Clone(m)})
	}
	hang, fault := d.hangs[method], d.faults[method]
	d.mu.Unlock()
	if hang != nil {
		select {
		case <-hang:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if fault != nil {
		return nil, fault
	}
	return handler(ctx, req)
}

// registrar serves the registration of the driver.
type registrar struct {
	registration.UnimplementedRegistrationServer
	d        *Driver
	endpoint string
}

func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: r.d.cfg.Name, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"}}, nil
}

func (r *registrar) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	return &registration.RegistrationStatusResponse{}, nil
}

// GetPluginInfo implements csi.IdentityServer.
func (d *Driver) GetPluginInfo(context.Context, *spec.GetPluginInfoRequest) (*spec.GetPluginInfoResponse, error) {
	return &spec.GetPluginInfoResponse{Name: d.cfg.Name, VendorVersion: "1"}, nil
}

// NodeGetInfo implements csi.NodeServer.
func (d *Driver) NodeGetInfo(context.Context, *spec.NodeGetInfoRequest) (*spec.NodeGetInfoResponse, error) {
	out := &spec.NodeGetInfoResponse{NodeId: d.cfg.NodeID, MaxVolumesPerNode: d.cfg.MaxVolumes}
	if len(d.cfg.Topology) > 0 {
		out.AccessibleTopology = &spec.Topology{Segments: d.cfg.Topology}
	}
	return out, nil
}

// NodeGetCapabilities implements csi.NodeServer.
func (d *Driver) NodeGetCapabilities(context.Context, *spec.NodeGetCapabilitiesRequest) (*spec.NodeGetCapabilitiesResponse, error) {
	out := &spec.NodeGetCapabilitiesResponse{}
	for _, t := range []spec.NodeServiceCapability_RPC_Type{
		spec.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, spec.NodeServiceCapability_RPC_GET_VOLUME_STATS, spec.NodeServiceCapability_RPC_EXPAND_VOLUME,
	} {
		out.Capabilities = append(out.Capabilities, &spec.NodeServiceCapability{Type: &spec.NodeServiceCapability_Rpc{Rpc: &spec.NodeServiceCapability_RPC{Type: t}}})
	}
	return out, nil
}

// Disk is where the content of a volume is.
func (d *Driver) Disk(handle string) string { return filepath.Join(d.cfg.Disks, handle) }

// size is the file that says how large a volume is on the node.
func (d *Driver) size(handle string) string { return d.Disk(handle) + ".size" }

// NodeStageVolume implements csi.NodeServer. A directory is mounted, a device is
// attached when it is published.
func (d *Driver) NodeStageVolume(_ context.Context, r *spec.NodeStageVolumeRequest) (*spec.NodeStageVolumeResponse, error) {
	if r.GetVolumeCapability().GetBlock() != nil {
		return &spec.NodeStageVolumeResponse{}, nil
	}
	return &spec.NodeStageVolumeResponse{}, d.bind(d.Disk(r.VolumeId), r.StagingTargetPath, false)
}

// NodeUnstageVolume implements csi.NodeServer.
func (d *Driver) NodeUnstageVolume(_ context.Context, r *spec.NodeUnstageVolumeRequest) (*spec.NodeUnstageVolumeResponse, error) {
	return &spec.NodeUnstageVolumeResponse{}, d.unbind(r.StagingTargetPath)
}

// NodePublishVolume implements csi.NodeServer.
func (d *Driver) NodePublishVolume(_ context.Context, r *spec.NodePublishVolumeRequest) (*spec.NodePublishVolumeResponse, error) {
	none := &spec.NodePublishVolumeResponse{}
	switch {
	case r.GetVolumeCapability().GetBlock() != nil:
		if done, err := d.mounted(r.TargetPath); done || err != nil {
			return none, err
		}
		device, err := attachLoop(d.Disk(r.VolumeId) + ".img")
		if err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		f, err := os.OpenFile(r.TargetPath, os.O_CREATE, 0o600)
		if err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		f.Close()
		return none, d.cfg.Mounts.Bind(device, r.TargetPath, false)
	case r.StagingTargetPath == "": // inline
		err := os.MkdirAll(d.Disk(r.VolumeId), 0o777)
		if err == nil {
			err = os.Chmod(d.Disk(r.VolumeId), 0o777) // MkdirAll is subject to the umask
		}
		if err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		return none, d.bind(d.Disk(r.VolumeId), r.TargetPath, r.Readonly)
	}
	return none, d.bind(r.StagingTargetPath, r.TargetPath, r.Readonly)
}

// NodeUnpublishVolume implements csi.NodeServer. Volumes of pods' own go.
func (d *Driver) NodeUnpublishVolume(_ context.Context, r *spec.NodeUnpublishVolumeRequest) (*spec.NodeUnpublishVolumeResponse, error) {
	if err := detachLoop(r.TargetPath); err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	if err := d.unbind(r.TargetPath); err != nil {
		return nil, err
	}
	if strings.HasPrefix(r.VolumeId, "csi-") {
		if err := os.RemoveAll(d.Disk(r.VolumeId)); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
	}
	if err := os.Remove(r.TargetPath); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &spec.NodeUnpublishVolumeResponse{}, nil
}

// NodeExpandVolume implements csi.NodeServer.
func (d *Driver) NodeExpandVolume(_ context.Context, r *spec.NodeExpandVolumeRequest) (*spec.NodeExpandVolumeResponse, error) {
	bytes := r.GetCapacityRange().GetRequiredBytes()
	if err := os.WriteFile(d.size(r.VolumeId), fmt.Append(nil, bytes), 0o600); err != nil { //nolint:forbidigo // of a test
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &spec.NodeExpandVolumeResponse{CapacityBytes: bytes}, nil
}

// NodeGetVolumeStats implements csi.NodeServer.
func (d *Driver) NodeGetVolumeStats(_ context.Context, r *spec.NodeGetVolumeStatsRequest) (*spec.NodeGetVolumeStatsResponse, error) {
	total := int64(1 << 20)
	if b, err := os.ReadFile(d.size(r.VolumeId)); err == nil {
		if _, err := fmt.Sscan(string(b), &total); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
	}
	return &spec.NodeGetVolumeStatsResponse{Usage: []*spec.VolumeUsage{{Unit: spec.VolumeUsage_BYTES, Total: total, Used: 4096, Available: total - 4096}}}, nil
}

func (d *Driver) mounted(target string) (bool, error) {
	if _, err := os.Lstat(target); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return d.cfg.Mounts.Mounted(target)
}

// bind mounts a directory at target once.
func (d *Driver) bind(source, target string, readOnly bool) error {
	if _, err := os.Stat(source); err != nil {
		return status.Errorf(codes.NotFound, "volume is not there: %v", err)
	}
	if done, err := d.mounted(target); done || err != nil {
		return err
	}
	if err := os.MkdirAll(target, 0o750); err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	if err := d.cfg.Mounts.Bind(source, target, readOnly); err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	return nil
}

func (d *Driver) unbind(target string) error {
	if is, err := d.mounted(target); err != nil || !is {
		return err
	}
	if err := d.cfg.Mounts.Unmount(target); err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	return nil
}
