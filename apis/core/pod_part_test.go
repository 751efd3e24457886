package core

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

// debugger adds an ephemeral container.
func debugger(name string, edits ...func(*corev1.EphemeralContainer)) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		c := corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: name, Image: "tools:1"}}
		for _, edit := range edits {
			edit(&c)
		}
		pod.Spec.EphemeralContainers = append(pod.Spec.EphemeralContainers, c)
	}
}

func both(edits ...func(*corev1.Pod)) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		for _, edit := range edits {
			edit(pod)
		}
	}
}

func TestEphemeralUpdate(t *testing.T) {
	for _, test := range []struct {
		name     string
		old, new func(*corev1.Pod)
		want     []string
	}{
		{"one more", both(), debugger("d"), nil},
		{"one more beside another", debugger("d"), both(debugger("d"), debugger("e")), nil},
		{"with a target", both(), debugger("d", func(c *corev1.EphemeralContainer) { c.TargetContainerName = "web" }), nil},
		{"with a target that is none", both(), debugger("d", func(c *corev1.EphemeralContainer) { c.TargetContainerName = "db" }),
			[]string{"spec.ephemeralContainers[0].targetContainerName: Not found"}},
		{"with another ephemeral one as target", debugger("d"), both(debugger("d"), debugger("e", func(c *corev1.EphemeralContainer) { c.TargetContainerName = "d" })),
			[]string{"spec.ephemeralContainers[1].targetContainerName: Not found"}},
		{"taken away", debugger("d"), both(), []string{`spec.ephemeralContainers: Forbidden: existing ephemeral containers "d" may not be removed`}},
		{"changed", debugger("d"), debugger("d", func(c *corev1.EphemeralContainer) { c.Image = "tools:2" }),
			[]string{`spec.ephemeralContainers: Forbidden: existing ephemeral containers "d" may not be changed`}},
		{"with the name of a container", both(), debugger("web"), []string{"spec.ephemeralContainers[0].name: Duplicate value"}},
		{"without image", both(), debugger("d", func(c *corev1.EphemeralContainer) { c.Image = "" }), []string{"spec.ephemeralContainers[0].image: Required"}},
		{"with what it cannot have", both(), debugger("d", func(c *corev1.EphemeralContainer) {
			c.Ports = []corev1.ContainerPort{{ContainerPort: 80}}
			c.Resources.Limits = corev1.ResourceList{"cpu": resource.MustParse("1")}
			c.Lifecycle = &corev1.Lifecycle{}
		}), []string{"spec.ephemeralContainers[0].ports: Forbidden", "spec.ephemeralContainers[0].resources: Forbidden", "spec.ephemeralContainers[0].lifecycle: Forbidden"}},
		{"to a static pod", func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"} },
			both(func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"} }, debugger("d")),
			[]string{"spec.ephemeralContainers: Forbidden: static pods"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			old, pod := newPod(test.old), newPod(test.new)
			prepareEphemeralUpdate(pod, old)
			checktest.Faults(t, validateEphemeralUpdate(pod, old), test.want...)
			if want := old.Generation + 1; pod.Generation != want {
				t.Errorf("generation %d, want %d", pod.Generation, want)
			}
		})
	}
}

// No change of a pod makes a mirror of it, or of a mirror a pod.
func TestMirrorStays(t *testing.T) {
	mirror := func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"} }
	other := func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "y"} }
	for _, test := range []struct {
		name     string
		old, new func(*corev1.Pod)
		want     []string
	}{
		{"added", both(), mirror, []string{"metadata.annotations[kubernetes.io/config.mirror]: Forbidden: may not add mirror pod annotation"}},
		{"removed", mirror, both(), []string{"metadata.annotations[kubernetes.io/config.mirror]: Forbidden: may not remove or update mirror pod annotation"}},
		{"changed", mirror, other, []string{"metadata.annotations[kubernetes.io/config.mirror]: Forbidden: may not remove or update mirror pod annotation"}},
		{"kept", mirror, mirror, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, validate := range []func(pod, old *corev1.Pod) field.ErrorList{validatePodUpdate, validatePodStatusUpdate} {
				checktest.Faults(t, validate(newPod(test.new), newPod(test.old)), test.want...)
			}
		})
	}
	checktest.Faults(t, validatePodCreate(newPod(mirror)), "metadata.annotations[kubernetes.io/config.mirror]: Invalid value: \"x\": must set spec.nodeName")
}

// TestEphemeralUpdateKeepsTheRest: whatever else the client sent is dropped.
func TestEphemeralUpdateKeepsTheRest(t *testing.T) {
	old := newPod()
	pod := newPod(debugger("d"), func(p *corev1.Pod) {
		p.Labels = map[string]string{"a": "b"}
		p.Spec.Containers[0].Image = "web:2"
		p.Status.Phase = corev1.PodFailed
	})
	prepareEphemeralUpdate(pod, old)
	if len(pod.Labels) > 0 || pod.Spec.Containers[0].Image != "web:1" || pod.Status.Phase != "" || len(pod.Spec.EphemeralContainers) != 1 {
		t.Errorf("got %+v", pod)
	}
}

// asks gives the first container requests and limits: "cpu", "100m", "200m", …
func asks(resources ...string) func(*corev1.Pod) {
	return inContainer(func(c *corev1.Container) {
		c.Resources = corev1.ResourceRequirements{Requests: corev1.ResourceList{}, Limits: corev1.ResourceList{}}
		for i := 0; i < len(resources); i += 3 {
			name := corev1.ResourceName(resources[i])
			if resources[i+1] != "" {
				c.Resources.Requests[name] = resource.MustParse(resources[i+1])
			}
			if resources[i+2] != "" {
				c.Resources.Limits[name] = resource.MustParse(resources[i+2])
			}
		}
	})
}

func TestResize(t *testing.T) {
	step := func(restart *corev1.ContainerRestartPolicy, cpu string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Name: "init", Image: "web:1", RestartPolicy: restart,
				Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse(cpu)}}}}
		}
	}
	for _, test := range []struct {
		name     string
		old, new func(*corev1.Pod)
		want     []string
	}{
		{"more and less", asks("cpu", "100m", "200m", "memory", "64Mi", "64Mi"), asks("cpu", "200m", "400m", "memory", "32Mi", "48Mi"), nil},
		{"a limit more", asks("cpu", "100m", ""), asks("cpu", "100m", "200m"), nil},
		{"a request over its limit", asks("cpu", "100m", "200m"), asks("cpu", "300m", "200m"), []string{"spec.containers[0].resources.requests: Invalid value"}},
		{"a limit removed", asks("cpu", "100m", "200m"), asks("cpu", "100m", ""), []string{"spec.containers[0].resources.limits[cpu]: Forbidden: resource limits cannot be removed"}},
		{"a request removed", asks("cpu", "100m", "", "memory", "1Mi", ""), asks("cpu", "100m", ""),
			[]string{"spec.containers[0].resources.requests[memory]: Forbidden: resource requests cannot be removed"}},
		{"another class", asks("cpu", "100m", "200m", "memory", "64Mi", "64Mi"), asks("cpu", "200m", "200m", "memory", "64Mi", "64Mi"),
			[]string{`spec: Invalid value: "Guaranteed": Pod QOS Class may not change`}},
		{"from best effort", both(), asks("cpu", "100m", ""), []string{`spec: Invalid value: "Burstable": Pod QOS Class may not change`}},
		{"another resource", asks("cpu", "100m", "", "ephemeral-storage", "1Gi", "1Gi"), asks("cpu", "100m", "", "ephemeral-storage", "2Gi", "2Gi"),
			[]string{"spec.containers[0].resources.limits[ephemeral-storage]: Forbidden: only cpu and memory", "spec.containers[0].resources.requests[ephemeral-storage]: Forbidden: only cpu and memory"}},
		{"another image", asks("cpu", "100m", ""), both(asks("cpu", "200m", ""), inContainer(func(c *corev1.Container) { c.Image = "web:2" })),
			[]string{"spec: Forbidden: only cpu and memory resources are mutable"}},
		{"what the pod asks for", func(p *corev1.Pod) {
			p.Spec.Resources = &corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("1")}, Limits: corev1.ResourceList{"cpu": resource.MustParse("2")}}
		}, func(p *corev1.Pod) {
			p.Spec.Resources = &corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("1")}, Limits: corev1.ResourceList{"cpu": resource.MustParse("3")}}
		}, []string{"spec.resources: Forbidden: what the pod as a whole asks for cannot be resized: resize its containers within it"}},
		{"one more container", asks("cpu", "100m", ""), both(asks("cpu", "100m", ""), func(p *corev1.Pod) {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "x", Image: "web:1"})
		}), []string{"spec: Forbidden: containers may not be added"}},
		{"a sidecar", step(ptr.To(corev1.ContainerRestartPolicyAlways), "1"), step(ptr.To(corev1.ContainerRestartPolicyAlways), "2"), nil},
		{"an init container", step(nil, "1"), step(nil, "2"), []string{"spec.initContainers[0].resources: Forbidden: only init containers with restartPolicy=Always"}},
		{"a pod that has ended", both(asks("cpu", "1", ""), func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }), asks("cpu", "2", ""),
			[]string{"spec: Forbidden: pod is Failed"}},
		{"its policy", asks("cpu", "1", ""), both(asks("cpu", "1", ""), inContainer(func(c *corev1.Container) {
			c.ResizePolicy = []corev1.ContainerResizePolicy{{ResourceName: "cpu", RestartPolicy: corev1.RestartContainer}}
		})), nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			old, pod := newPod(test.old), newPod(test.new)
			prepareResize(pod, old)
			checktest.Faults(t, validateResize(pod, old), test.want...)
		})
	}
}
