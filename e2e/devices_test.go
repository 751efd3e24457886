package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/features"
)

const (
	cardDriver = "cards.example.com"
	// cardNode is what the host has, and pods have as /dev/card: a device that no
	// container may use by itself.
	cardNode = "/dev/loop7"
)

// cards is a driver of devices made with upstream's library. It describes each
// device that it prepares in a file of its own.
type cards struct {
	cdi string

	mu       sync.Mutex           // guards all below
	prepared map[types.UID]string // claim → device
	twice    []string             // devices that two claims had at one time
	pause    error                // of each preparation
}

func (c *cards) file(device string) string { return filepath.Join(c.cdi, "cards-"+device+".yaml") }

func (c *cards) PrepareResourceClaims(_ context.Context, claims []*resourcev1.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		if c.pause != nil {
			out[claim.UID] = kubeletplugin.PrepareResult{Err: c.pause}
			continue
		}
		var devices []kubeletplugin.Device
		for _, r := range claim.Status.Allocation.Devices.Results {
			for other, device := range c.prepared {
				if device == r.Device && other != claim.UID {
					c.twice = append(c.twice, device)
				}
			}
			text := fmt.Sprintf("cdiVersion: 1.1.0\nkind: example.com/card\ndevices:\n- name: %s\n  containerEdits:\n    env: [CARD=%s]\n    deviceNodes: [{path: /dev/card, hostPath: %s, permissions: r}]\n", r.Device, r.Device, cardNode)
			if err := os.WriteFile(c.file(r.Device), []byte(text), 0o644); err != nil {
				return nil, err
			}
			c.prepared[claim.UID] = r.Device
			devices = append(devices, kubeletplugin.Device{Requests: []string{r.Request}, PoolName: r.Pool, DeviceName: r.Device, CDIDeviceIDs: []string{"example.com/card=" + r.Device}})
		}
		out[claim.UID] = kubeletplugin.PrepareResult{Devices: devices}
	}
	return out, nil
}

func (c *cards) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[types.UID]error{}
	for _, claim := range claims {
		out[claim.UID] = nil
		if device, ok := c.prepared[claim.UID]; ok {
			out[claim.UID] = os.Remove(c.file(device))
			delete(c.prepared, claim.UID)
		}
	}
	return out, nil
}

// HandleError implements kubeletplugin.DRAPlugin: what fails is tried again.
func (c *cards) HandleError(context.Context, error, string) {}

// WatchHealthStatus implements kubeletplugin.DRAPlugin.
func (c *cards) WatchHealthStatus(ctx context.Context, _ chan<- kubeletplugin.DeviceHealthReport) error {
	<-ctx.Done()
	return ctx.Err()
}

func (c *cards) has() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Values(c.prepared))
}

func (c *cards) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pause = err
}

// start runs the driver beside a node; stop ends it.
func (c *cards) start(e *env, n cluster.Node, devices ...string) (stop func()) {
	e.t.Helper()
	root := filepath.Join(n.Data, "kubelet")
	data := filepath.Join(root, "plugins", cardDriver)
	e.must(os.MkdirAll(data, 0o750))
	ctx, cancel := context.WithCancel(context.WithoutCancel(e.t.Context()))
	helper, err := kubeletplugin.Start(ctx, c, kubeletplugin.DriverName(cardDriver), kubeletplugin.NodeName(n.Name), kubeletplugin.KubeClient(e.api),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(root, "plugins_registry")), kubeletplugin.PluginDataDirectoryPath(data))
	if err != nil {
		cancel()
		e.t.Fatal(err)
	}
	var pool resourceslice.Slice
	for _, d := range devices {
		pool.Devices = append(pool.Devices, resourcev1.Device{Name: d, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"model": {StringValue: ptr.To("tiny")}}})
	}
	e.must(helper.PublishResources(ctx, resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{n.Name: {Slices: []resourceslice.Slice{pool}}}}))
	return func() { cancel(); helper.Stop() }
}

// slicesAre waits until the API has so many slices of the driver.
func (e *env) slicesAre(n int) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("there are %d ResourceSlices", n), func(ctx context.Context) error {
		list, err := e.api.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.driver=" + cardDriver})
		if err == nil && len(list.Items) != n {
			err = fmt.Errorf("there are %d", len(list.Items))
		}
		return err
	})
}

// TestE2EDevices has pods that ask for devices through claims, a driver made with
// upstream's library, and a node that is killed in between.
func TestE2EDevices(t *testing.T) {
	if _, err := os.Stat(cardNode); err != nil {
		t.Skipf("this machine has no device to give to pods: %v", err)
	}
	features.Shows(t, 157) // devices; processors are TestE2ENodeOptions'
	c := &cards{cdi: t.TempDir(), prepared: map[types.UID]string{}}
	e := startBare(t, 1, func(cfg *cluster.Config) { cfg.Args = append(cfg.Args, "--cdi-dirs", c.cdi) })
	e.ready(1)
	n := e.Nodes()[0]
	stop := c.start(e, n, "card-0", "card-1", "card-2", "card-3")
	defer func() { stop() }()
	e.slicesAre(1)
	ns := e.namespace("devices")
	api := e.api.ResourceV1()
	_, err := api.DeviceClasses().Create(t.Context(), &resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "cards"}, Spec: resourcev1.DeviceClassSpec{
		Selectors: []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{Expression: `device.driver == "` + cardDriver + `" && device.attributes["` + cardDriver + `"].model == "tiny"`}}},
	}}, metav1.CreateOptions{})
	e.must(err)
	_, err = api.ResourceClaimTemplates(ns).Create(t.Context(), &resourcev1.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: "card"}, Spec: resourcev1.ResourceClaimTemplateSpec{
		Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{Name: "card", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "cards"}}}}},
	}}, metav1.CreateOptions{})
	e.must(err)

	d := deployment("users", 4)
	d.Spec.Template.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "mine", ResourceClaimTemplateName: ptr.To("card")}}
	d.Spec.Template.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "mine", Request: "card"}}
	e.createDeployment(ns, d)
	pods := e.podsReady(ns, "app=users", 4)
	seen := map[string]string{}
	for _, p := range pods {
		seen[e.card(ns, p.Name)] = p.Name
	}
	if want := []string{"card-0", "card-1", "card-2", "card-3"}; !slices.Equal(slices.Sorted(maps.Keys(seen)), want) || !slices.Equal(c.has(), want) {
		t.Fatalf("pods have %v, the driver has prepared %v", seen, c.has())
	}
	e.cardIsUsable(ns, pods[0].Name)
	e.podResourcesTell(n, ns, seen)

	// A fifth finds none, and is told so.
	e.create(ns, claimer("fifth", "card"))
	e.podIs(ns, "fifth", "waiting with a reason", func(p *corev1.Pod) error {
		cond := podCondition(p, corev1.PodScheduled)
		if cond == nil || cond.Status != corev1.ConditionFalse || !strings.Contains(cond.Message, "too few devices for request") {
			return fmt.Errorf("%+v", cond)
		}
		return nil
	})

	// The node is killed: devices stay with their pods, and nothing is prepared again.
	e.must(e.Kill(n.Name))
	began := time.Now()
	e.must(e.Start(t.Context(), n.Name))
	e.backSince(began, n.Name)
	for _, p := range e.podsReady(ns, "app=users", 4) {
		if got := seen[e.card(ns, p.Name)]; got != p.Name || p.Status.ContainerStatuses[0].RestartCount != 0 {
			t.Errorf("%s has the device of %s, %d restarts", p.Name, got, p.Status.ContainerStatuses[0].RestartCount)
		}
	}

	// A deletion frees a device for the fifth. The driver refuses at first.
	c.fail(errors.New("the card is hot"))
	e.ctl("-n", ns, "scale", "deployment", "users", "--replicas=3")
	e.podIs(ns, "fifth", "told what its driver says", func(p *corev1.Pod) error {
		if p.Status.Reason != "FailedPrepareDynamicResources" || !strings.Contains(p.Status.Message, "the card is hot") || !strings.Contains(p.Status.Message, cardDriver) {
			return fmt.Errorf("%q %q", p.Status.Reason, p.Status.Message)
		}
		return nil
	})
	// The node is killed while the pod waits for its device.
	e.must(e.Kill(n.Name))
	c.fail(nil)
	e.must(e.Start(t.Context(), n.Name))
	e.podReady(ns, "fifth")
	if got := c.has(); len(got) != 4 {
		t.Errorf("the driver has prepared %v", got)
	}

	// Without its driver a pod waits, and goes on when it is there.
	stop()
	stop = func() {}
	e.ctl("-n", ns, "delete", "pod", "fifth", "--wait=false")
	e.podIs(ns, "fifth", "told which driver is missing", func(p *corev1.Pod) error {
		if !strings.Contains(p.Status.Message, cardDriver+" is not registered") {
			return fmt.Errorf("%q %q", p.Status.Reason, p.Status.Message)
		}
		return nil
	})
	e.slicesAre(0)
	stop = c.start(e, n, "card-0", "card-1", "card-2", "card-3")
	e.slicesAre(1)
	e.ctl("-n", ns, "delete", "deployment", "users")
	e.eventually("all devices are taken back and no claim is left", func(ctx context.Context) error {
		claims, err := api.ResourceClaims(ns).List(ctx, metav1.ListOptions{})
		if err == nil && (len(claims.Items) > 0 || len(c.has()) > 0) {
			err = fmt.Errorf("%d claims, prepared are %v", len(claims.Items), c.has())
		}
		return err
	})
	e.eventually("no record stays", func(context.Context) error { // it goes after the driver's answer
		records, err := os.ReadDir(filepath.Join(n.Data, "devices", "claims"))
		if err == nil && len(records) > 0 {
			err = fmt.Errorf("records that stay: %v", records)
		}
		return err
	})
	e.devicePlugin(n, ns)
	if len(c.twice) > 0 {
		t.Errorf("two claims had %v at one time", c.twice)
	}
}

// claimer is a pod with one container that has a device and one that has none.
func claimer(name, template string) *corev1.Pod {
	p := pod(name, "sleep")
	p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "mine", ResourceClaimTemplateName: &template}}
	p.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "mine"}}
	return p
}

// card is the device that a pod's environment names.
func (e *env) card(ns, pod string) string {
	e.t.Helper()
	card := ""
	e.eventually(pod+" tells its device", func(context.Context) error { // a node that was just started takes no commands yet
		env, errs, code := e.run("clusterctl", "", "-n", ns, "exec", pod, "--", "/hello", "env")
		if code != 0 {
			return errors.New(errs)
		}
		for line := range strings.Lines(env) {
			if name, ok := strings.CutPrefix(strings.TrimSpace(line), "CARD="); ok {
				card = name
			}
		}
		return nil
	})
	return card
}

// cardIsUsable reads the device in a pod, and may not write to it.
func (e *env) cardIsUsable(ns, pod string) {
	e.t.Helper()
	if _, stderr, code := e.run("clusterctl", "", "-n", ns, "exec", pod, "--", "/hello", "cat", "/dev/card"); code != 0 {
		e.t.Errorf("the device cannot be read: exit %d: %s", code, stderr)
	}
	if _, stderr, code := e.run("clusterctl", "", "-n", ns, "exec", pod, "--", "/hello", "write", "/dev/card", "x"); code == 0 || !strings.Contains(stderr, "operation not permitted") {
		e.t.Errorf("the device, which is to be read only, is written to: exit %d: %s", code, stderr)
	}
}

// podResourcesTell asks the node's socket who has which device.
func (e *env) podResourcesTell(n cluster.Node, ns string, seen map[string]string) {
	e.t.Helper()
	told := map[string]string{}
	for _, p := range e.podResources(n) {
		for _, c := range p.Containers {
			for _, claim := range c.DynamicResources {
				for _, r := range claim.ClaimResources {
					if claim.ClaimNamespace == ns && r.DriverName == cardDriver && r.PoolName == n.Name && len(r.CdiDevices) == 1 && r.CdiDevices[0].Name == "example.com/card="+r.DeviceName {
						told[r.DeviceName] = p.Name
					}
				}
			}
		}
	}
	if !maps.Equal(told, seen) {
		e.t.Errorf("the node tells %v, pods have %v", told, seen)
	}
}
