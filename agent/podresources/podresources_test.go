package podresources

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// TestServer asks over the socket, also one that a killed agent has left.
func TestServer(t *testing.T) {
	socket := filepath.Join(t.TempDir(), SocketName)
	if err := os.WriteFile(socket, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	known := make(chan struct{})
	pods := []Pod{{"default", "web", []Container{{
		Name: "main", CPUs: []int64{2, 3}, Memory: map[string]uint64{"memory": 64 << 20, "hugepages-2Mi": 4 << 20},
		Devices: []Devices{{Resource: "example.com/nic", IDs: []string{"n0", "n1"}, Nodes: []int64{0, 1}}},
		Claimed: []Claimed{
			{ClaimNamespace: "default", ClaimName: "web-gpu", Driver: "gpu.example.com", Pool: "n1", Device: "gpu-0", CDI: []string{"example.com/gpu=0", "example.com/gpu=all"}},
			{ClaimNamespace: "default", ClaimName: "shared", Driver: "gpu.example.com", Pool: "n1", Device: "gpu-1", Share: "s1"},
			{ClaimNamespace: "default", ClaimName: "web-gpu", Driver: "gpu.example.com", Pool: "n1", Device: "gpu-2"},
		},
	}, {Name: "side"}}}}
	s, err := New(Config{
		Socket: socket, Pods: func() []Pod { return pods }, Known: known, CPUs: []int64{1, 2, 3},
		Memory:  func() map[string]uint64 { return map[string]uint64{"memory": 1 << 30} },
		Devices: func() []Devices { return []Devices{{Resource: "example.com/nic", IDs: []string{"n0"}}} },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := podresources.NewPodResourcesListerClient(conn)
	wait := grpc.WaitForReady(true)
	short, stop := context.WithTimeout(ctx, 300*time.Millisecond)
	defer stop()
	if got, err := client.List(short, &podresources.ListPodResourcesRequest{}, wait); err == nil {
		t.Errorf("before the pods are known: %v", got)
	}
	close(known)
	long, stop := context.WithTimeout(ctx, 30*time.Second)
	defer stop()
	web := &podresources.PodResources{Name: "web", Namespace: "default", Containers: []*podresources.ContainerResources{
		{
			Name: "main", CpuIds: []int64{2, 3}, Memory: []*podresources.ContainerMemory{{MemoryType: "hugepages-2Mi", Size: 4 << 20}, {MemoryType: "memory", Size: 64 << 20}},
			Devices: []*podresources.ContainerDevices{{ResourceName: "example.com/nic", DeviceIds: []string{"n0", "n1"}, Topology: &podresources.TopologyInfo{Nodes: []*podresources.NUMANode{{ID: 0}, {ID: 1}}}}},
			DynamicResources: []*podresources.DynamicResource{
				{ClaimNamespace: "default", ClaimName: "web-gpu", ClaimResources: []*podresources.ClaimResource{
					{DriverName: "gpu.example.com", PoolName: "n1", DeviceName: "gpu-0", CdiDevices: []*podresources.CDIDevice{{Name: "example.com/gpu=0"}, {Name: "example.com/gpu=all"}}},
					{DriverName: "gpu.example.com", PoolName: "n1", DeviceName: "gpu-2"},
				}},
				{ClaimNamespace: "default", ClaimName: "shared", ClaimResources: []*podresources.ClaimResource{{DriverName: "gpu.example.com", PoolName: "n1", DeviceName: "gpu-1", ShareId: proto.String("s1")}}},
			},
		},
		{Name: "side"},
	}}
	list, err := client.List(long, &podresources.ListPodResourcesRequest{}, wait)
	if diff := cmp.Diff(&podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{web}}, list, protocmp.Transform()); diff != "" || err != nil {
		t.Error(err, diff)
	}
	one, err := client.Get(long, &podresources.GetPodResourcesRequest{PodNamespace: "default", PodName: "web"})
	if diff := cmp.Diff(web, one.GetPodResources(), protocmp.Transform()); diff != "" || err != nil {
		t.Error(err, diff)
	}
	if _, err := client.Get(long, &podresources.GetPodResourcesRequest{PodNamespace: "other", PodName: "web"}); status.Code(err) != codes.NotFound {
		t.Error(err)
	}
	all, err := client.GetAllocatableResources(long, &podresources.AllocatableResourcesRequest{})
	want := &podresources.AllocatableResourcesResponse{CpuIds: []int64{1, 2, 3}, Memory: []*podresources.ContainerMemory{{MemoryType: "memory", Size: 1 << 30}},
		Devices: []*podresources.ContainerDevices{{ResourceName: "example.com/nic", DeviceIds: []string{"n0"}}}}
	if diff := cmp.Diff(want, all, protocmp.Transform()); diff != "" || err != nil {
		t.Error(err, diff)
	}
	if st, err := os.Stat(socket); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(socket); !os.IsNotExist(err) {
		t.Errorf("the socket stays: %v", err)
	}
}

func TestSocketThatCannotBe(t *testing.T) {
	s, err := New(Config{
		Socket: filepath.Join(t.TempDir(), "missing", SocketName), Pods: func() []Pod { return nil }, Known: make(chan struct{}), Memory: func() map[string]uint64 { return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(t.Context()); err == nil {
		t.Error("it listens nowhere")
	}
	if _, err := New(Config{}); err == nil {
		t.Error("an empty configuration passed")
	}
}

func TestMemory(t *testing.T) {
	got := Memory(v1.ResourceList{
		v1.ResourceCPU: resource.MustParse("2"), v1.ResourceMemory: resource.MustParse("1Ki"), "hugepages-2Mi": resource.MustParse("2Mi"), "hugepages-1Gi": resource.MustParse("0"),
	})
	if diff := cmp.Diff(map[string]uint64{"memory": 1024, "hugepages-2Mi": 2 << 20}, got); diff != "" {
		t.Error(diff)
	}
	if got := Memory(nil); got != nil {
		t.Error(got)
	}
}
