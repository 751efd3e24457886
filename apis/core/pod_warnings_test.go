package core

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

func TestPodWarnings(t *testing.T) {
	pod := newPod(inContainer(func(c *corev1.Container) {
		c.Env = []corev1.EnvVar{{Name: "A"}, {Name: "A"}}
		c.Ports = []corev1.ContainerPort{{ContainerPort: 80}, {ContainerPort: 80}}
		c.Resources.Requests = corev1.ResourceList{"memory": resource.MustParse("100m")}
	}))
	want := []string{
		`spec.containers[0].env[1]: hides previous definition of "A", which may be dropped when using apply`,
		`spec.containers[0].ports[1]: duplicate port definition with spec.containers[0].ports[0]`,
		`spec.containers[0].resources.requests[memory]: fractional byte value "100m" is invalid, must be an integer`,
	}
	if diff := cmp.Diff(want, podWarnings(pod)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
