package e2e

import (
	"errors"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/features"
)

// TestE2ERestartPolicies goes through how pods end under each policy.
func TestE2ERestartPolicies(t *testing.T) {
	e := start(t)
	ns := e.namespace("policies")
	features.Conforms(t, 271)
	const (
		always    = corev1.RestartPolicyAlways
		onFailure = corev1.RestartPolicyOnFailure
		never     = corev1.RestartPolicyNever
	)
	tests := []struct {
		row      int
		name     string
		policy   corev1.RestartPolicy
		programs [][]string
		phase    corev1.PodPhase
		restarts []bool // of each container: it is started again
	}{
		{221, "zero-always", always, [][]string{{"exit", "0"}}, corev1.PodRunning, []bool{true}},
		{222, "zero-onfailure", onFailure, [][]string{{"exit", "0"}}, corev1.PodSucceeded, []bool{false}},
		{223, "zero-never", never, [][]string{{"exit", "0"}}, corev1.PodSucceeded, []bool{false}},
		{224, "one-always", always, [][]string{{"exit", "1"}}, corev1.PodRunning, []bool{true}},
		{225, "one-onfailure", onFailure, [][]string{{"exit", "1"}}, corev1.PodRunning, []bool{true}},
		{226, "one-never", never, [][]string{{"exit", "1"}}, corev1.PodFailed, []bool{false}},
		{227, "half-always", always, [][]string{{"exit", "1"}, {"sleep"}}, corev1.PodRunning, []bool{true, false}},
		{228, "half-onfailure", onFailure, [][]string{{"exit", "1"}, {"sleep"}}, corev1.PodRunning, []bool{true, false}},
		{229, "half-never", never, [][]string{{"exit", "1"}, {"sleep"}}, corev1.PodRunning, []bool{false, false}},
		{230, "both-always", always, [][]string{{"exit", "1"}, {"exit", "0"}}, corev1.PodRunning, []bool{true, true}},
		{231, "both-onfailure", onFailure, [][]string{{"exit", "1"}, {"exit", "0"}}, corev1.PodRunning, []bool{true, false}},
		{232, "both-never", never, [][]string{{"exit", "1"}, {"exit", "0"}}, corev1.PodFailed, []bool{false, false}},
	}
	for _, tt := range tests {
		p := pod(tt.name)
		p.Spec.RestartPolicy = tt.policy
		p.Spec.Containers = nil
		for i, args := range tt.programs {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: fmt.Sprintf("c%d", i), Image: image, Args: args})
		}
		e.create(ns, p)
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			features.Shows(t, tt.row)
			e.podIs(ns, tt.name, string(tt.phase), func(p *corev1.Pod) error {
				if p.Status.Phase != tt.phase || len(p.Status.ContainerStatuses) != len(tt.programs) {
					return errors.New("phase " + string(p.Status.Phase))
				}
				for i, again := range tt.restarts {
					s := p.Status.ContainerStatuses[i]
					if again && s.RestartCount == 0 {
						return fmt.Errorf("%s was not started again yet", s.Name)
					}
					if !again && tt.programs[i][0] == "exit" && s.State.Terminated == nil {
						return fmt.Errorf("%s has not ended", s.Name)
					}
					if !again && s.RestartCount > 0 {
						t.Fatalf("%s was started again: %s", s.Name, brief(p))
					}
				}
				return nil
			})
		})
	}
	t.Run("back-off", func(t *testing.T) {
		features.Shows(t, 202)
		e.podIs(ns, "one-always", "in CrashLoopBackOff", func(p *corev1.Pod) error {
			if w := waiting(p); w == nil || w.Reason != "CrashLoopBackOff" {
				return errors.New("not backing off")
			}
			return nil
		})
		e.eventuallyHas([]string{"-n", ns, "get", "pods"}, "CrashLoopBackOff", "Completed", "Error")
	})
}
