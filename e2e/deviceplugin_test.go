package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	deviceplugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/e2e/cluster"
)

const antennas = "example.com/antenna"

// antennaPlugin is a device plugin with two devices.
type antennaPlugin struct {
	deviceplugin.UnimplementedDevicePluginServer
}

func (antennaPlugin) ListAndWatch(_ *deviceplugin.Empty, stream grpc.ServerStreamingServer[deviceplugin.ListAndWatchResponse]) error {
	err := stream.Send(&deviceplugin.ListAndWatchResponse{Devices: []*deviceplugin.Device{{ID: "left", Health: deviceplugin.Healthy}, {ID: "right", Health: deviceplugin.Healthy}}})
	if err == nil {
		<-stream.Context().Done()
	}
	return err
}

func (antennaPlugin) Allocate(_ context.Context, q *deviceplugin.AllocateRequest) (*deviceplugin.AllocateResponse, error) {
	out := &deviceplugin.AllocateResponse{}
	for _, c := range q.ContainerRequests {
		out.ContainerResponses = append(out.ContainerResponses, &deviceplugin.ContainerAllocateResponse{
			Envs:    map[string]string{"CARD": strings.Join(c.DevicesIds, ",")},
			Devices: []*deviceplugin.DeviceSpec{{HostPath: cardNode, ContainerPath: "/dev/card", Permissions: "r"}},
		})
	}
	return out, nil
}

// startAntennas runs the plugin beside a node and registers it.
func (e *env) startAntennas(n cluster.Node) (stop func()) {
	e.t.Helper()
	dir := filepath.Join(n.Data, "kubelet", "device-plugins")
	socket := filepath.Join(dir, "antenna.sock")
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		e.t.Fatal(err)
	}
	ln, err := net.Listen("unix", socket)
	e.must(err)
	srv := grpc.NewServer()
	deviceplugin.RegisterDevicePluginServer(srv, antennaPlugin{})
	go func() { _ = srv.Serve(ln) }()
	conn, err := grpc.NewClient("unix://"+filepath.Join(dir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	e.must(err)
	defer conn.Close()
	e.eventually("the plugin registers", func(ctx context.Context) error {
		_, err := deviceplugin.NewRegistrationClient(conn).Register(ctx, &deviceplugin.RegisterRequest{
			Version: deviceplugin.Version, Endpoint: "antenna.sock", ResourceName: antennas, Options: &deviceplugin.DevicePluginOptions{},
		})
		return err
	})
	return srv.Stop
}

// nodeHas waits until the node tells of so many of the plugin's devices.
func (e *env) nodeHas(n cluster.Node, capacity, allocatable int64) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("%s tells of %d devices, %d of them for pods", n.Name, capacity, allocatable), func(ctx context.Context) error {
		node, err := e.api.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		all, free := node.Status.Capacity[antennas], node.Status.Allocatable[antennas]
		if all.Value() != capacity || free.Value() != allocatable {
			return fmt.Errorf("%s and %s", all.String(), free.String())
		}
		return nil
	})
}

// devicePlugin has pods that ask for an extended resource of a device plugin.
func (e *env) devicePlugin(n cluster.Node, ns string) {
	e.t.Helper()
	stop := e.startAntennas(n)
	defer func() { stop() }()
	e.nodeHas(n, 2, 2)
	user := func(name string) *corev1.Pod {
		p := pod(name, "sleep")
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{antennas: resource.MustParse("1")}
		// A plugin's device has the host's owner and mode.
		p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{RunAsUser: ptr.To[int64](0)}
		return p
	}
	for _, name := range []string{"ear-1", "ear-2", "ear-3"} {
		e.create(ns, user(name))
		if name != "ear-3" {
			e.podReady(ns, name)
		}
	}
	e.podIs(ns, "ear-3", "waiting for a device", func(p *corev1.Pod) error {
		cond := podCondition(p, corev1.PodScheduled)
		if cond == nil || cond.Status != corev1.ConditionFalse || !strings.Contains(cond.Message, antennas) {
			return fmt.Errorf("%+v", cond)
		}
		return nil
	})
	has := map[string]string{"ear-1": e.card(ns, "ear-1"), "ear-2": e.card(ns, "ear-2")}
	if both := []string{has["ear-1"], has["ear-2"]}; !slices.Contains(both, "left") || !slices.Contains(both, "right") {
		e.t.Errorf("pods have %v", has)
	}
	e.cardIsUsable(ns, "ear-1")
	for _, p := range e.podResources(n) {
		if want, ok := has[p.Name]; ok && p.Namespace == ns {
			c := p.Containers[0]
			if len(c.Devices) != 1 || c.Devices[0].ResourceName != antennas || !slices.Equal(c.Devices[0].DeviceIds, []string{want}) {
				e.t.Errorf("the node tells of %s %v, it has %s", p.Name, c.Devices, want)
			}
		}
	}
	// The node is killed: pods keep what they have, and the plugin comes back.
	e.must(e.Kill(n.Name))
	e.must(e.Start(e.t.Context(), n.Name))
	stop()
	stop = e.startAntennas(n)
	e.eventually("the node knows the plugin's devices again", func(ctx context.Context) error { // its status may be from before
		var ids []string
		err := e.askPodResources(n, func(c podresources.PodResourcesListerClient) error {
			all, err := c.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
			for _, d := range all.GetDevices() {
				ids = append(ids, d.GetDeviceIds()...)
			}
			return err
		})
		if err == nil && (!slices.Contains(ids, "left") || !slices.Contains(ids, "right")) {
			err = fmt.Errorf("it has %v", ids)
		}
		return err
	})
	e.nodeHas(n, 2, 2)
	if got := e.card(ns, "ear-1"); got != has["ear-1"] {
		e.t.Errorf("ear-1 has %s after the restart, had %s", got, has["ear-1"])
	}
	e.ctl("-n", ns, "delete", "pod", "ear-2")
	e.podReady(ns, "ear-3")
	if got := e.card(ns, "ear-3"); got != has["ear-2"] {
		e.t.Errorf("ear-3 has %s, given back was %s", got, has["ear-2"])
	}
	stop()
	stop = func() {}
	e.nodeHas(n, 2, 0)
	e.ctl("-n", ns, "delete", "pod", "ear-1", "ear-3")
}

// podResources asks the node's socket who has what.
func (e *env) podResources(n cluster.Node) []*podresources.PodResources {
	e.t.Helper()
	var list *podresources.ListPodResourcesResponse
	e.must(e.askPodResources(n, func(c podresources.PodResourcesListerClient) (err error) {
		list, err = c.List(e.t.Context(), &podresources.ListPodResourcesRequest{})
		return err
	}))
	return list.PodResources
}

func (e *env) askPodResources(n cluster.Node, ask func(podresources.PodResourcesListerClient) error) error {
	conn, err := grpc.NewClient("unix://"+filepath.Join(n.Data, "pod-resources", "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	return ask(podresources.NewPodResourcesListerClient(conn))
}
