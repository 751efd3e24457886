package node

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func newClass(handler string) *nodev1.RuntimeClass {
	return &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "a", ResourceVersion: "7"}, Handler: handler}
}

func TestValidateRuntimeClass(t *testing.T) {
	for _, test := range []struct {
		name  string
		spoil func(*nodev1.RuntimeClass)
		want  []string
	}{
		{"plain", func(*nodev1.RuntimeClass) {}, nil},
		{"full", func(c *nodev1.RuntimeClass) {
			c.Overhead = &nodev1.Overhead{PodFixed: corev1.ResourceList{"cpu": resource.MustParse("250m"), "memory": resource.MustParse("120Mi")}}
			c.Scheduling = &nodev1.Scheduling{
				NodeSelector: map[string]string{"sandbox": "yes"},
				Tolerations:  []corev1.Toleration{{Key: "sandbox", Operator: corev1.TolerationOpExists}},
			}
		}, nil},
		{"no handler", func(c *nodev1.RuntimeClass) { c.Handler = "" }, []string{"handler: Required value"}},
		{"handler", func(c *nodev1.RuntimeClass) { c.Handler = "Big One" }, []string{`handler: Invalid value: "Big One"`}},
		{"name", func(c *nodev1.RuntimeClass) { c.Name = "a_b" }, []string{`metadata.name: Invalid value: "a_b"`}},
		{"overhead", func(c *nodev1.RuntimeClass) {
			c.Overhead = &nodev1.Overhead{PodFixed: corev1.ResourceList{"cpu": resource.MustParse("-1"), "lunch": resource.MustParse("1")}}
		}, []string{
			`overhead.podFixed[cpu]: Invalid value: "-1": must be greater than or equal to 0`,
			`overhead.podFixed[lunch]: Invalid value: "lunch": must be a standard resource for containers`,
		}},
		{"scheduling", func(c *nodev1.RuntimeClass) {
			twice := corev1.Toleration{Key: "a", Operator: corev1.TolerationOpExists}
			c.Scheduling = &nodev1.Scheduling{
				NodeSelector: map[string]string{"disk": "a b"},
				Tolerations:  []corev1.Toleration{twice, {Key: "a", Operator: "Like"}, twice},
			}
		}, []string{
			`scheduling.nodeSelector: Invalid value: "a b"`,
			`scheduling.tolerations[1].operator: Unsupported value: "Like"`,
			`scheduling.tolerations[2]: Duplicate value`,
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := newClass("runc")
			test.spoil(c)
			checktest.Faults(t, validateRuntimeClass(c), test.want...)
		})
	}
}

func TestRuntimeClassUpdate(t *testing.T) {
	c := newClass("other")
	c.Overhead = &nodev1.Overhead{PodFixed: corev1.ResourceList{"cpu": resource.MustParse("1")}}
	checktest.Faults(t, RuntimeClass().ValidateUpdate(c, newClass("runc")), `handler: Invalid value: "other": field is immutable`)
}
