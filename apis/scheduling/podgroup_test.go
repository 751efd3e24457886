package scheduling

import (
	"slices"
	"strings"
	"testing"

	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func gang(n int32) schedulingv1beta1.PodGroupSchedulingPolicy {
	return schedulingv1beta1.PodGroupSchedulingPolicy{Gang: &schedulingv1beta1.GangSchedulingPolicy{MinCount: n}}
}

func newGroup(change func(*schedulingv1beta1.PodGroupSpec)) *schedulingv1beta1.PodGroup {
	g := &schedulingv1beta1.PodGroup{ObjectMeta: metav1.ObjectMeta{Name: "g", Namespace: "a", ResourceVersion: "7"}}
	g.Spec.SchedulingPolicy = gang(4)
	if change != nil {
		change(&g.Spec)
	}
	PodGroup().Default(g)
	return g
}

func TestValidatePodGroup(t *testing.T) {
	type spec = schedulingv1beta1.PodGroupSpec
	basic := &schedulingv1beta1.BasicSchedulingPolicy{}
	for _, test := range []struct {
		name   string
		change func(*spec)
		want   []string
	}{
		{"a gang", nil, nil},
		{"basic", func(s *spec) { s.SchedulingPolicy = schedulingv1beta1.PodGroupSchedulingPolicy{Basic: basic} }, nil},
		{"no policy", func(s *spec) { s.SchedulingPolicy = schedulingv1beta1.PodGroupSchedulingPolicy{} },
			[]string{"spec.schedulingPolicy: Invalid value: \"\": must specify one of: `basic`, `gang`"}},
		{"both policies", func(s *spec) { s.SchedulingPolicy.Basic = basic },
			[]string{"spec.schedulingPolicy: Invalid value: \"{`basic`, `gang`}\": exactly one of `basic`, `gang` is required, but multiple fields are set"}},
		{"no count", func(s *spec) { s.SchedulingPolicy = gang(0) }, []string{"spec.schedulingPolicy.gang.minCount: Required value"}},
		{"a count below one", func(s *spec) { s.SchedulingPolicy = gang(-1) },
			[]string{"spec.schedulingPolicy.gang.minCount: Invalid value: -1: must be greater than or equal to 1"}},
		{"a parent", func(s *spec) { s.ParentCompositePodGroupName = ptr.To("p") },
			[]string{"spec.parentCompositePodGroupName: Forbidden: groups of PodGroups (CompositePodGroup) are not served"}},
		{"half a reference", func(s *spec) { s.WorkloadRef = &schedulingv1beta1.WorkloadReference{TemplateName: "A"} },
			[]string{"spec.workloadRef.workloadName: Required value", `spec.workloadRef.templateName: Invalid value: "A"`}},
		{"two domains", func(s *spec) {
			s.SchedulingConstraints = &schedulingv1beta1.PodGroupSchedulingConstraints{Topology: []schedulingv1beta1.TopologyConstraint{{Key: "zone"}, {Key: "a b"}}}
		}, []string{"spec.schedulingConstraints.topology: Too many: 2: must have at most 1 item", `spec.schedulingConstraints.topology[1].key: Invalid value: "a b"`}},
		{"claims", func(s *spec) {
			s.ResourceClaims = []schedulingv1beta1.PodGroupResourceClaim{{Name: "a", ResourceClaimName: ptr.To("c")}, {Name: "a"}, {Name: "b", ResourceClaimName: ptr.To("C"), ResourceClaimTemplateName: ptr.To("t")}}
		}, []string{`spec.resourceClaims[1].name: Duplicate value: "a"`, "spec.resourceClaims[1]: Invalid value: \"\": must specify one of",
			"spec.resourceClaims[2]: Invalid value: \"{`resourceClaimName`, `resourceClaimTemplateName`}\"", `spec.resourceClaims[2].resourceClaimName: Invalid value: "C"`}},
		{"no way to disrupt", func(s *spec) { s.DisruptionMode = &schedulingv1beta1.DisruptionMode{} },
			[]string{"spec.disruptionMode: Invalid value: \"\": must specify one of: `single`, `all`"}},
		{"importance", func(s *spec) {
			s.PriorityClassName, s.Priority, s.PreemptionPolicy = "A", ptr.To[int32](highest+1), ptr.To(schedulingv1beta1.PreemptionPolicy("Always"))
		}, []string{`spec.priorityClassName: Invalid value: "A"`, "spec.priority: Invalid value: 1000000001: must be less than or equal to 1000000000", `spec.preemptionPolicy: Unsupported value: "Always"`}},
		{"a system class", func(s *spec) { s.PriorityClassName, s.Priority = "system-cluster-critical", ptr.To[int32](2*highest) }, nil},
	} {
		t.Run(test.name, func(t *testing.T) { checktest.Faults(t, PodGroup().Validate(newGroup(test.change)), test.want...) })
	}
}

func TestPodGroupUpdate(t *testing.T) {
	type spec = schedulingv1beta1.PodGroupSpec
	for _, test := range []struct {
		name   string
		change func(*spec)
		want   []string
	}{
		{"another count", func(s *spec) { s.SchedulingPolicy.Gang.MinCount = 2 }, nil},
		{"another policy", func(s *spec) {
			s.SchedulingPolicy = schedulingv1beta1.PodGroupSchedulingPolicy{Basic: &schedulingv1beta1.BasicSchedulingPolicy{}}
		}, []string{"spec.schedulingPolicy.basic: Invalid value: {}: field is immutable", "spec.schedulingPolicy.gang: Invalid value: null: field cannot be cleared once set"}},
		{"all else", func(s *spec) {
			s.WorkloadRef = &schedulingv1beta1.WorkloadReference{WorkloadName: "w", TemplateName: "t"}
			s.DisruptionMode = &schedulingv1beta1.DisruptionMode{All: &schedulingv1beta1.AllDisruptionMode{}}
			s.SchedulingConstraints = &schedulingv1beta1.PodGroupSchedulingConstraints{Topology: []schedulingv1beta1.TopologyConstraint{{Key: "zone"}}}
			s.ResourceClaims = []schedulingv1beta1.PodGroupResourceClaim{{Name: "a", ResourceClaimName: ptr.To("c")}}
			s.PriorityClassName, s.Priority, s.PreemptionPolicy = "a", ptr.To[int32](5), ptr.To(schedulingv1beta1.PreemptNever)
		}, []string{"spec.workloadRef: Invalid value", "spec.schedulingConstraints: Invalid value", "spec.resourceClaims: Invalid value", "spec.disruptionMode: Invalid value",
			"spec.priorityClassName: Invalid value", "spec.priority: Invalid value", "spec.preemptionPolicy: Invalid value"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			checktest.Faults(t, PodGroup().ValidateUpdate(newGroup(test.change), newGroup(nil)), test.want...)
		})
	}
}

// TestPodGroupWarnings: what nothing acts on is said, what is acted on is not.
func TestPodGroupWarnings(t *testing.T) {
	if got := PodGroup().Warnings(newGroup(nil)); len(got) > 0 {
		t.Errorf("a plain gang warns of %q", got)
	}
	got := PodGroup().Warnings(newGroup(func(s *schedulingv1beta1.PodGroupSpec) {
		s.DisruptionMode = &schedulingv1beta1.DisruptionMode{All: &schedulingv1beta1.AllDisruptionMode{}}
		s.SchedulingConstraints = &schedulingv1beta1.PodGroupSchedulingConstraints{Topology: []schedulingv1beta1.TopologyConstraint{{Key: "zone"}}}
		s.ResourceClaims = []schedulingv1beta1.PodGroupResourceClaim{{Name: "a", ResourceClaimName: ptr.To("c")}}
	}))
	for _, field := range []string{"spec.schedulingConstraints.topology:", "spec.resourceClaims:", "spec.disruptionMode.all:"} {
		if !slices.ContainsFunc(got, func(w string) bool { return strings.HasPrefix(w, field) }) {
			t.Errorf("no warning of %s in %q", field, got)
		}
	}
}

func newWorkload(change func(*schedulingv1beta1.WorkloadSpec)) *schedulingv1beta1.Workload {
	w := &schedulingv1beta1.Workload{ObjectMeta: metav1.ObjectMeta{Name: "w", Namespace: "a", ResourceVersion: "7"}}
	w.Spec.PodGroupTemplates = []schedulingv1beta1.PodGroupTemplate{{Name: "workers", SchedulingPolicy: gang(4)}}
	if change != nil {
		change(&w.Spec)
	}
	return w
}

func TestValidateWorkload(t *testing.T) {
	type spec = schedulingv1beta1.WorkloadSpec
	for _, test := range []struct {
		name   string
		change func(*spec)
		want   []string
	}{
		{"one template", nil, nil},
		{"no template", func(s *spec) { s.PodGroupTemplates = nil }, []string{"spec.podGroupTemplates: Required value: must have at least one item"}},
		{"groups of groups", func(s *spec) {
			s.CompositePodGroupTemplates = []schedulingv1beta1.CompositePodGroupTemplate{{Name: "a"}}
		}, []string{"spec.compositePodGroupTemplates: Forbidden"}},
		{"nine", func(s *spec) {
			for _, name := range strings.Fields("a b c d e f g h") {
				s.PodGroupTemplates = append(s.PodGroupTemplates, schedulingv1beta1.PodGroupTemplate{Name: name, SchedulingPolicy: gang(1)})
			}
		}, []string{"spec.podGroupTemplates: Too many: 9: must have at most 8 items"}},
		{"a name twice", func(s *spec) { s.PodGroupTemplates = append(s.PodGroupTemplates, s.PodGroupTemplates[0]) },
			[]string{`spec.podGroupTemplates[1].name: Duplicate value: "workers"`}},
		{"a wrong template", func(s *spec) {
			s.PodGroupTemplates[0] = schedulingv1beta1.PodGroupTemplate{Name: "A", Priority: ptr.To[int32](highest + 1)}
		}, []string{`spec.podGroupTemplates[0].name: Invalid value: "A"`, "spec.podGroupTemplates[0].schedulingPolicy: Invalid value", "spec.podGroupTemplates[0].priority: Invalid value: 1000000001"}},
		{"a controller", func(s *spec) {
			s.ControllerRef = &schedulingv1beta1.TypedLocalObjectReference{APIGroup: "Batch", Kind: "a/b"}
		}, []string{`spec.controllerRef.apiGroup: Invalid value: "Batch"`, `spec.controllerRef.kind: Invalid value: "a/b"`, "spec.controllerRef.name: Required value"}},
	} {
		t.Run(test.name, func(t *testing.T) { checktest.Faults(t, Workload().Validate(newWorkload(test.change)), test.want...) })
	}
}

func TestWorkloadUpdate(t *testing.T) {
	type spec = schedulingv1beta1.WorkloadSpec
	for _, test := range []struct {
		name   string
		change func(*spec)
		want   []string
	}{
		{"another count", func(s *spec) { s.PodGroupTemplates[0].SchedulingPolicy = gang(9) }, nil},
		{"one more", func(s *spec) {
			s.PodGroupTemplates = append(s.PodGroupTemplates, schedulingv1beta1.PodGroupTemplate{Name: "more", SchedulingPolicy: gang(1)})
		}, []string{"spec.podGroupTemplates[1]: Forbidden: item may not be added"}},
		{"another name", func(s *spec) { s.PodGroupTemplates[0].Name = "other" },
			[]string{"spec.podGroupTemplates[0]: Forbidden: item may not be added", "spec.podGroupTemplates: Forbidden: item may not be removed"}},
		{"a controller", func(s *spec) { s.ControllerRef = &schedulingv1beta1.TypedLocalObjectReference{Kind: "Job", Name: "a"} },
			[]string{"spec.controllerRef: Invalid value"}},
		{"importance", func(s *spec) { s.PodGroupTemplates[0].PriorityClassName = "a" },
			[]string{`spec.podGroupTemplates[0].priorityClassName: Invalid value: "a": field is immutable`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			checktest.Faults(t, Workload().ValidateUpdate(newWorkload(test.change), newWorkload(nil)), test.want...)
		})
	}
}
