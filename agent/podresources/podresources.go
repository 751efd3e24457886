// Package podresources serves the kubelet PodResources API v1
// (k8s.io/kubelet/pkg/apis/podresources/v1, read-only): device monitors and programs that
// place work by CPU read from it which exclusive resources containers have.
package podresources

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// SocketName is the socket's name in its directory.
const SocketName = "kubelet.sock"

// Pod is a pod that has not ended.
type Pod struct {
	Namespace, Name string
	Containers      []Container
}

// Container is one of its containers.
type Container struct {
	Name string
	CPUs []int64 // processors that no other container runs on
	// Memory is what is kept for it alone, by type ("memory", "hugepages-2Mi"),
	// in bytes.
	Memory map[string]uint64
	// Devices are those that device plugins have given it, Claimed those of its
	// pod's claims.
	Devices []Devices
	Claimed []Claimed
}

// Devices are those of one resource, "example.com/gpu".
type Devices struct {
	Resource string
	IDs      []string
	Nodes    []int64 // of memory that they are near to
}

// Claimed is a device of a claim (dynamic resource allocation).
type Claimed struct {
	ClaimNamespace, ClaimName string
	Driver, Pool, Device      string
	Share                     string   // of a device that several claims have parts of
	CDI                       []string // its names for the container's runtime
}

// Config of a Server.
type Config struct {
	// Socket is the path to listen at; its directory is there. Required.
	Socket string
	// Pods are the node's, in the order in which they are listed. Required.
	Pods func() []Pod
	// Known is closed once Pods knows all of them. Required.
	Known <-chan struct{}
	// CPUs are the processors that containers can have for themselves.
	CPUs []int64
	// Memory is what pods can have, by type, in bytes.
	Memory func() map[string]uint64
	// Devices are those of device plugins that pods can have; nil: none.
	Devices func() []Devices
}

// Server answers at the socket.
type Server struct {
	podresources.UnimplementedPodResourcesListerServer
	cfg Config
}

// New checks the configuration. It starts nothing.
func New(cfg Config) (*Server, error) {
	if cfg.Socket == "" || cfg.Pods == nil || cfg.Known == nil || cfg.Memory == nil {
		return nil, errors.New("podresources: Socket, Pods, Known and Memory are required")
	}
	return &Server{cfg: cfg}, nil
}

// Bounds of what one machine's programs can make the node do.
const (
	maxConnections = 64
	maxStreams     = 16
	maxRequest     = 64 << 10
	stopTimeout    = time.Second
)

// Run serves until ctx ends, and removes the socket.
func (s *Server) Run(ctx context.Context) error {
	// Of an agent that was killed; the data directory's lock says that none lives.
	if err := os.Remove(s.cfg.Socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("podresources: %w", err)
	}
	// A socket's address has 107 bytes, and data directories may lie deep.
	dir, err := os.Open(filepath.Dir(s.cfg.Socket))
	if err != nil {
		return fmt.Errorf("podresources: %w", err)
	}
	defer dir.Close()
	ln, err := net.Listen("unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(s.cfg.Socket)))
	if err != nil {
		return fmt.Errorf("podresources: listen at %s: %w", s.cfg.Socket, err)
	}
	if err := os.Chmod(s.cfg.Socket, 0o600); err != nil {
		ln.Close()
		return fmt.Errorf("podresources: %w", err)
	}
	srv := grpc.NewServer(grpc.MaxConcurrentStreams(maxStreams), grpc.MaxRecvMsgSize(maxRequest), grpc.ConnectionTimeout(10*time.Second))
	podresources.RegisterPodResourcesListerServer(srv, s)
	done := make(chan error, 1)
	go func() { done <- srv.Serve(netutil.LimitListener(ln, maxConnections)) }()
	select {
	case err := <-done:
		return fmt.Errorf("podresources: %w", err)
	case <-ctx.Done():
	}
	late := time.AfterFunc(stopTimeout, srv.Stop)
	defer late.Stop()
	srv.GracefulStop()
	<-done
	return nil
}

// pods waits until all are known.
func (s *Server) pods(ctx context.Context) ([]Pod, error) {
	select {
	case <-s.cfg.Known:
		return s.cfg.Pods(), nil
	case <-ctx.Done():
	case <-time.After(10 * time.Second):
	}
	return nil, status.Error(codes.Unavailable, "the node has just started and does not know its pods yet: try again")
}

// List implements podresources.PodResourcesListerServer.
func (s *Server) List(ctx context.Context, _ *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	pods, err := s.pods(ctx)
	if err != nil {
		return nil, err
	}
	out := &podresources.ListPodResourcesResponse{}
	for _, p := range pods {
		out.PodResources = append(out.PodResources, asMessage(p))
	}
	return out, nil
}

// Get implements podresources.PodResourcesListerServer.
func (s *Server) Get(ctx context.Context, q *podresources.GetPodResourcesRequest) (*podresources.GetPodResourcesResponse, error) {
	pods, err := s.pods(ctx)
	if err != nil {
		return nil, err
	}
	for _, p := range pods {
		if p.Namespace == q.GetPodNamespace() && p.Name == q.GetPodName() {
			return &podresources.GetPodResourcesResponse{PodResources: asMessage(p)}, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "pod %s in namespace %s is not on this node", q.GetPodName(), q.GetPodNamespace())
}

// GetAllocatableResources implements podresources.PodResourcesListerServer.
func (s *Server) GetAllocatableResources(context.Context, *podresources.AllocatableResourcesRequest) (*podresources.AllocatableResourcesResponse, error) {
	out := &podresources.AllocatableResourcesResponse{CpuIds: s.cfg.CPUs, Memory: memory(s.cfg.Memory())}
	if s.cfg.Devices != nil {
		out.Devices = devices(s.cfg.Devices())
	}
	return out, nil
}

func asMessage(p Pod) *podresources.PodResources {
	out := &podresources.PodResources{Name: p.Name, Namespace: p.Namespace}
	for _, c := range p.Containers {
		out.Containers = append(out.Containers, &podresources.ContainerResources{
			Name: c.Name, CpuIds: c.CPUs, Memory: memory(c.Memory), Devices: devices(c.Devices), DynamicResources: claimed(c.Claimed),
		})
	}
	return out
}
