package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// TestE2EExtendedResources: one resource that a device plugin gives on one node and
// a driver's class on the two others. Pods that ask for it know nothing of that.
func TestE2EExtendedResources(t *testing.T) {
	if _, err := os.Stat(cardNode); err != nil {
		t.Skipf("this machine has no device to give to pods: %v", err)
	}
	drivers := map[string]*cards{}
	dirs := t.TempDir()
	e := startBare(t, 3, func(cfg *cluster.Config) { cfg.Args = append(cfg.Args, "--cdi-dirs", dirs) })
	e.ready(3)
	ns := e.namespace("extended")
	n1, n2, n3 := e.Nodes()[0], e.Nodes()[1], e.Nodes()[2]
	stop := e.startAntennas(n1)
	defer stop()
	e.nodeHas(n1, 2, 2)
	for n, devices := range map[*cluster.Node][]string{&n2: {"two-a", "two-b"}, &n3: {"three-a"}} {
		drivers[n.Name] = &cards{cdi: dirs, prepared: map[types.UID]string{}}
		defer drivers[n.Name].start(e, *n, devices...)()
	}
	e.slicesAre(2)
	_, err := e.api.ResourceV1().DeviceClasses().Create(t.Context(), &resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "cards"}, Spec: resourcev1.DeviceClassSpec{
		ExtendedResourceName: ptr.To(antennas),
		Selectors:            []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{Expression: `device.driver == "` + cardDriver + `"`}}},
	}}, metav1.CreateOptions{})
	e.must(err)

	d := deployment("users", 5)
	wantsOne(&d.Spec.Template.Spec.Containers[0], antennas)
	e.createDeployment(ns, d)
	byNode := map[string][]string{}
	for _, p := range e.podsReady(ns, "app=users", 5) {
		device := e.card(ns, p.Name)
		byNode[p.Spec.NodeName] = append(byNode[p.Spec.NodeName], device)
		e.givenBy(ns, &p, device, p.Spec.NodeName != n1.Name)
	}
	for _, devices := range byNode {
		slices.Sort(devices)
	}
	if want := map[string][]string{n1.Name: {"left", "right"}, n2.Name: {"two-a", "two-b"}, n3.Name: {"three-a"}}; !maps.EqualFunc(byNode, want, slices.Equal) {
		t.Fatalf("the nodes' pods have %v, want %v", byNode, want)
	}

	// One more finds none, and has what another one leaves, with its claim.
	more := pod("more", "sleep")
	more.Spec.InitContainers = []corev1.Container{{Name: "before", Image: image, Args: []string{"cat", "/dev/card"}}}
	for _, c := range []*corev1.Container{&more.Spec.InitContainers[0], &more.Spec.Containers[0]} {
		wantsOne(c, resourcev1.ResourceDeviceClassPrefix+"cards") // the class's own name
	}
	e.create(ns, more)
	e.podIs(ns, "more", "waiting with a reason", func(p *corev1.Pod) error {
		c := podCondition(p, corev1.PodScheduled)
		if c == nil || c.Status != corev1.ConditionFalse || !strings.Contains(c.Message, "too few devices") {
			return fmt.Errorf("%+v", c)
		}
		return nil
	})
	e.ctl("-n", ns, "scale", "deployment", "users", "--replicas=0")
	p := e.podReady(ns, "more")
	if p.Spec.NodeName == n1.Name {
		t.Error("by the name of the class it was given a plugin's device")
	}
	if s := p.Status.ExtendedResourceClaimStatus; s == nil || len(s.RequestMappings) != 2 || s.RequestMappings[0].RequestName != s.RequestMappings[1].RequestName {
		t.Errorf("the init container does not use the device of the container after it: %+v", s)
	}
	e.givenBy(ns, p, e.card(ns, "more"), true)
	e.ctl("-n", ns, "delete", "pod", "more")
	e.eventually("the claims have gone with their pods, and their devices were taken back", func(ctx context.Context) error {
		list, err := e.api.ResourceV1().ResourceClaims(ns).List(ctx, metav1.ListOptions{})
		if err == nil && len(list.Items) > 0 {
			err = fmt.Errorf("%d claims", len(list.Items))
		}
		for name, c := range drivers {
			if has := c.has(); len(has) > 0 {
				err = errors.Join(err, fmt.Errorf("on %s are prepared %v", name, has))
			}
		}
		return err
	})
	for name, c := range drivers {
		if len(c.twice) > 0 {
			t.Errorf("on %s two claims had %v at one time", name, c.twice)
		}
	}
}

// wantsOne has the container ask for one of the resource, and run as the owner of
// what a plugin gives.
func wantsOne(c *corev1.Container, name string) {
	c.Resources.Limits = corev1.ResourceList{corev1.ResourceName(name): resource.MustParse("1")}
	c.SecurityContext = &corev1.SecurityContext{RunAsUser: ptr.To[int64](0)}
}

// givenBy fails the test unless the pod has the device by a claim of its own that
// its status names, or, without a claim, by a plugin.
func (e *env) givenBy(ns string, p *corev1.Pod, device string, claim bool) {
	e.t.Helper()
	e.cardIsUsable(ns, p.Name)
	s := p.Status.ExtendedResourceClaimStatus
	if !claim {
		if s != nil {
			e.t.Errorf("%s has a claim beside the plugin's device: %+v", p.Name, s)
		}
		return
	}
	if s == nil || !strings.HasPrefix(s.ResourceClaimName, p.Name+"-extended-resources-") || len(s.RequestMappings) == 0 || s.RequestMappings[len(s.RequestMappings)-1].ContainerName != "main" {
		e.t.Fatalf("the status of %s names no claim: %+v", p.Name, s)
	}
	c, err := e.api.ResourceV1().ResourceClaims(ns).Get(e.t.Context(), s.ResourceClaimName, metav1.GetOptions{})
	e.must(err)
	if c.Status.Allocation == nil || len(c.Status.Allocation.Devices.Results) != 1 || c.Status.Allocation.Devices.Results[0].Device != device || !metav1.IsControlledBy(c, p) {
		e.t.Errorf("claim %s of %s, which has %s, is %+v, owners %v", c.Name, p.Name, device, c.Status.Allocation, c.OwnerReferences)
	}
}
