package core

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

func TestQOSClass(t *testing.T) {
	list := func(cpu, memory string) corev1.ResourceList {
		l := corev1.ResourceList{}
		if cpu != "" {
			l["cpu"] = resource.MustParse(cpu)
		}
		if memory != "" {
			l["memory"] = resource.MustParse(memory)
		}
		return l
	}
	tests := []struct {
		name             string
		limits, requests corev1.ResourceList
		want             corev1.PodQOSClass
	}{
		{"nothing said", nil, nil, corev1.PodQOSBestEffort},
		{"limited", list("1", "1Gi"), nil, corev1.PodQOSGuaranteed},
		{"requests less", list("1", "1Gi"), list("500m", ""), corev1.PodQOSBurstable},
		{"only memory limited", list("", "1Gi"), nil, corev1.PodQOSBurstable},
		{"only requested", nil, list("1", "1Gi"), corev1.PodQOSBurstable},
	}
	for _, test := range tests {
		pod := newPod(inContainer(func(c *corev1.Container) {
			c.Resources = corev1.ResourceRequirements{Limits: test.limits, Requests: test.requests}
		}))
		if got := QOSClass(pod); got != test.want {
			t.Errorf("%s: %s, want %s", test.name, got, test.want)
		}
	}
}
