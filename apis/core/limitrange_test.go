package core

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/google/go-cmp/cmp"
)

func TestLimits(t *testing.T) {
	list := func(name, amount string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceName(name): resource.MustParse(amount)}
	}
	for name, test := range map[string]struct {
		item corev1.LimitRangeItem
		want []string
	}{
		"a container's":      {corev1.LimitRangeItem{Type: "Container", Max: list("cpu", "2"), Min: list("cpu", "1")}, nil},
		"a claim's":          {corev1.LimitRangeItem{Type: "PersistentVolumeClaim", Max: list("storage", "2Gi")}, nil},
		"of a domain":        {corev1.LimitRangeItem{Type: "example.com/Thing", Max: list("example.com/part", "2")}, nil},
		"an extended one":    {corev1.LimitRangeItem{Type: "Container", Max: list("example.com/gpu", "2")}, nil},
		"an unknown type":    {corev1.LimitRangeItem{Type: "Thing", Max: list("cpu", "2")}, []string{`spec.limits[0].type: Invalid value: "Thing": must be a standard limit type or fully qualified: Pod, Container, PersistentVolumeClaim, or one of a domain`}},
		"an unknown name":    {corev1.LimitRangeItem{Type: "Pod", Max: list("cpus", "2")}, []string{`spec.limits[0].max[cpus]: Invalid value: "cpus": must be a standard resource for containers`}},
		"a claim's, unknown": {corev1.LimitRangeItem{Type: "PersistentVolumeClaim", Min: list("storage", "1"), Max: list("disk", "2")}, []string{`spec.limits[0].max[disk]: Invalid value: "disk": must be a standard resource type or fully qualified`}},
		"two defaults of what is not overcommitted": {corev1.LimitRangeItem{Type: "Container", Default: list("example.com/gpu", "2"), DefaultRequest: list("example.com/gpu", "1")},
			[]string{`spec.limits[0].defaultRequest[example.com/gpu]: Invalid value: "1": default value 2 must equal to defaultRequest value 1 in example.com/gpu`}},
		"a ratio": {corev1.LimitRangeItem{Type: "Pod", Max: list("cpu", "2"), Min: list("cpu", "500m"), MaxLimitRequestRatio: list("cpu", "4")}, nil},
		"a ratio that is never reached": {corev1.LimitRangeItem{Type: "Pod", Max: list("cpu", "2"), Min: list("cpu", "1"), MaxLimitRequestRatio: list("cpu", "3")},
			[]string{`spec.limits[0].maxLimitRequestRatio[cpu]: Invalid value: "3": ratio 3 is greater than max/min = 2.000000`}},
	} {
		var got []string
		for _, err := range validateLimits([]corev1.LimitRangeItem{test.item}, nil) {
			got = append(got, err.Error())
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	// What a version stored that did not check names goes on.
	old := []corev1.LimitRangeItem{{Type: "Thing", Max: list("cpus", "2")}}
	if errs := validateLimits(old, old); len(errs) > 0 {
		t.Errorf("stored before: %v", errs)
	}
}
