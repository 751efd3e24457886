package e2e

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/clusterd/clusterd/features"
)

// TestE2EOOM lets containers take more memory than they may.
func TestE2EOOM(t *testing.T) {
	features.Shows(t, 233, 234, 243)
	e := start(t)
	ns := e.namespace("oom")
	greedy := func(name string, policy corev1.RestartPolicy) *corev1.Pod {
		p := pod(name, "alloc", "96")
		p.Spec.RestartPolicy = policy
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("48Mi")}
		// One that keeps to itself beside it.
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "modest", Image: image, Args: []string{"sleep"}})
		return p
	}
	never := greedy("never", corev1.RestartPolicyNever)
	never.Spec.Containers = never.Spec.Containers[:1]
	e.create(ns, never)
	e.create(ns, greedy("always", corev1.RestartPolicyAlways))

	p := e.podIs(ns, "never", "Failed", func(p *corev1.Pod) error {
		if p.Status.Phase != corev1.PodFailed {
			return errors.New("phase " + string(p.Status.Phase))
		}
		return nil
	})
	if s := p.Status.ContainerStatuses[0].State.Terminated; s == nil || s.Reason != "OOMKilled" || s.ExitCode != 137 {
		t.Errorf("never: %s", brief(p))
	}
	p = e.podIs(ns, "always", "killed and started again", func(p *corev1.Pod) error {
		for _, s := range p.Status.ContainerStatuses {
			if l := s.LastTerminationState.Terminated; s.Name == "main" && s.RestartCount > 0 && l != nil {
				if l.Reason != "OOMKilled" || l.ExitCode != 137 {
					t.Errorf("always: %s", brief(p))
				}
				return nil
			}
		}
		return errors.New("not restarted")
	})
	for _, s := range p.Status.ContainerStatuses {
		if s.Name == "modest" && (s.RestartCount != 0 || s.State.Running == nil) {
			t.Errorf("the other container suffered: %s", brief(p))
		}
	}
	mustContain(t, "get", e.ctl("-n", ns, "get", "pod", "never"), "OOMKilled")
	e.eventuallyHas([]string{"-n", ns, "describe", "pod", "always"}, "OOMKilled", "Exit Code:    137")
}
