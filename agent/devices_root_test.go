package agent_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/utils/ptr"
)

// cardDriver is a driver that has one device, which it has described.
type cardDriver struct {
	dra.UnimplementedDRAPluginServer
	registration.UnimplementedRegistrationServer
	socket string
}

func (d cardDriver) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.DRAPlugin, Name: "cards.example.com", Endpoint: d.socket, SupportedVersions: []string{dra.DRAPluginService}}, nil
}

func (cardDriver) NotifyRegistrationStatus(context.Context, *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	return &registration.RegistrationStatusResponse{}, nil
}

func (cardDriver) NodePrepareResources(_ context.Context, q *dra.NodePrepareResourcesRequest) (*dra.NodePrepareResourcesResponse, error) {
	out := &dra.NodePrepareResourcesResponse{Claims: map[string]*dra.NodePrepareResourceResponse{}}
	for _, c := range q.Claims {
		out.Claims[c.Uid] = &dra.NodePrepareResourceResponse{Devices: []*dra.Device{{PoolName: "n1", DeviceName: "card-0", CdiDeviceIds: []string{"example.com/card=0"}}}}
	}
	return out, nil
}

func (cardDriver) NodeUnprepareResources(_ context.Context, q *dra.NodeUnprepareResourcesRequest) (*dra.NodeUnprepareResourcesResponse, error) {
	out := &dra.NodeUnprepareResourcesResponse{Claims: map[string]*dra.NodeUnprepareResourceResponse{}}
	for _, c := range q.Claims {
		out.Claims[c.Uid] = &dra.NodeUnprepareResourceResponse{}
	}
	return out, nil
}

// TestRootDevices gives a container a device of a claim: the kernel lets it read
// the device, and not write to it.
func TestRootDevices(t *testing.T) {
	const host = "/dev/loop7" // no container may use it by itself
	needRoot(t)
	if _, err := os.Stat(host); err != nil {
		t.Skipf("this machine has no device to give to a pod: %v", err)
	}
	cdi := t.TempDir()
	text := fmt.Sprintf("cdiVersion: 1.1.0\nkind: example.com/card\ndevices:\n- name: \"0\"\n  containerEdits:\n    env: [CARD=zero]\n    deviceNodes: [{path: /dev/card, hostPath: %s, permissions: r}]\n", host)
	if err := os.WriteFile(filepath.Join(cdi, "card.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	m := newMachineWith(t, &machine{cdi: []string{cdi}})
	registry := filepath.Join(m.dir, "kubelet", "plugins_registry")
	m.eventually("the node looks for plugins", func() bool {
		_, err := os.Stat(registry)
		return err == nil
	})
	d := cardDriver{socket: filepath.Join(registry, "card.sock")}
	ln, err := net.Listen("unix", d.socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	dra.RegisterDRAPluginServer(srv, d)
	registration.RegisterRegistrationServer(srv, d)
	go func() { _ = srv.Serve(ln) }()
	defer srv.Stop()
	claim := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "card", UID: "claim-1"}}
	claim.Status.Allocation = &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{Results: []resourcev1.DeviceRequestAllocationResult{{Request: "card", Driver: "cards.example.com", Pool: "n1", Device: "card-0"}}}}
	claim.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: "user", UID: types.UID("uid-user")}}
	if _, err := m.api.ResourceV1().ResourceClaims("default").Create(t.Context(), claim, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	c := app("a", "serve", "8080")
	c.Resources.Claims = []v1.ResourceClaim{{Name: "mine"}}
	p := newPod("user", c, app("none", "serve", "8081"))
	p.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "mine", ResourceClaimName: ptr.To("card")}}
	m.create(p)
	m.ready("user")
	if out, code := m.exec("user", "a", nil, "/bin/app", "cat", "/dev/card"); code != 0 {
		t.Errorf("the device cannot be read: exit %d: %s", code, out)
	}
	if out, code := m.exec("user", "a", nil, "/bin/app", "write", "/dev/card", "x"); code == 0 {
		t.Errorf("a device that is to be read only is written to: %s", out)
	}
	if out, code := m.exec("user", "none", nil, "/bin/app", "cat", "/dev/card"); code == 0 {
		t.Errorf("a container that does not ask for it has the device: %s", out)
	}
	if env, code := m.exec("user", "a", nil, "/bin/app", "env"); code != 0 || !strings.Contains(env, "CARD=zero") {
		t.Errorf("environment %q, exit %d", env, code)
	}
	records := filepath.Join(m.dir, "devices", "claims")
	if left, err := os.ReadDir(records); err != nil || len(left) != 1 {
		t.Errorf("records %v, %v", left, err)
	}
	m.delete("user", 1)
	m.eventually("the device is taken back", func() bool {
		left, err := os.ReadDir(records)
		return err == nil && len(left) == 0
	})
}
