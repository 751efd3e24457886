package resource

import (
	"strconv"
	"strings"
	"testing"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func newClaim() *resourcev1.ResourceClaim {
	c := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "hello", ResourceVersion: "1"}}
	c.Spec.Devices.Requests = []resourcev1.DeviceRequest{
		{Name: "gpu", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "gpu"}},
		{Name: "disk", FirstAvailable: []resourcev1.DeviceSubRequest{{Name: "fast", DeviceClassName: "fast"}, {Name: "slow", DeviceClassName: "slow"}}},
	}
	ResourceClaim().Default(c)
	return c
}

func TestClaimFaults(t *testing.T) {
	tests := []struct {
		name string
		edit func(*resourcev1.DeviceClaim)
		want []string
	}{
		{"whole", func(*resourcev1.DeviceClaim) {}, nil},
		{"none and both", func(d *resourcev1.DeviceClaim) {
			d.Requests[0].FirstAvailable = d.Requests[1].FirstAvailable
			d.Requests[1].FirstAvailable = nil
		}, []string{`spec.devices.requests[0]: Invalid value: "gpu": exactly one of`, "spec.devices.requests[1]: Required value: exactly one of"}},
		{"names", func(d *resourcev1.DeviceClaim) {
			d.Requests[1].Name = "gpu"
			d.Requests[1].FirstAvailable[1].Name = "Fast"
			d.Requests[0].Exactly.DeviceClassName = ""
		}, []string{`spec.devices.requests[0].exactly.deviceClassName: Required value`, `spec.devices.requests[1].name: Duplicate value: "gpu"`, `spec.devices.requests[1].firstAvailable[1].name: Invalid value: "Fast"`}},
		{"modes", func(d *resourcev1.DeviceClaim) {
			d.Requests[0].Exactly.AllocationMode = "Some"
			d.Requests[1].FirstAvailable[0].AllocationMode = "All"
			d.Requests[1].FirstAvailable[1].Count = -1
		}, []string{
			`spec.devices.requests[0].exactly.allocationMode: Unsupported value: "Some"`,
			"spec.devices.requests[1].firstAvailable[0].count: Invalid value: 1: must not be specified",
			"spec.devices.requests[1].firstAvailable[1].count: Invalid value: -1: must be greater than zero",
		}},
		{"selectors and tolerations", func(d *resourcev1.DeviceClaim) {
			e := d.Requests[0].Exactly
			e.Selectors = []resourcev1.DeviceSelector{{}, {CEL: &resourcev1.CELDeviceSelector{}}}
			e.Tolerations = []resourcev1.DeviceToleration{{Operator: "Equal"}, {Operator: "Exists", Value: "x"}, {Operator: "Exists", Effect: "Sleep"}}
		}, []string{
			"spec.devices.requests[0].exactly.selectors[0].cel: Required value", "spec.devices.requests[0].exactly.selectors[1].cel.expression: Required value",
			"spec.devices.requests[0].exactly.tolerations[0].key: Required value", `spec.devices.requests[0].exactly.tolerations[1].value: Invalid value: "x"`,
			`spec.devices.requests[0].exactly.tolerations[2].effect: Unsupported value: "Sleep"`,
		}},
		{"references", func(d *resourcev1.DeviceClaim) {
			d.Constraints = []resourcev1.DeviceConstraint{
				{Requests: []string{"gpu", "disk/fast", "disk/none"}, MatchAttribute: ptr.To[resourcev1.FullyQualifiedName]("socket")},
				{Requests: []string{"gpu", "gpu"}},
			}
		}, []string{
			`spec.devices.constraints[0].requests[2]: Invalid value: "disk/none"`, `spec.devices.constraints[0].matchAttribute: Invalid value: "socket": must include a domain`,
			`spec.devices.constraints[1].requests[1]: Duplicate value: "gpu"`, "spec.devices.constraints[1].matchAttribute: Required value",
		}},
		{"parameters", func(d *resourcev1.DeviceClaim) {
			config := func(raw string) (c resourcev1.DeviceClaimConfiguration) {
				c.Opaque = &resourcev1.OpaqueDeviceConfiguration{Driver: "d.example.com", Parameters: runtime.RawExtension{Raw: []byte(raw)}}
				return c
			}
			d.Config = []resourcev1.DeviceClaimConfiguration{config(`{"a":1}`), config(`[1]`), config(``), config(`{"a":"` + strings.Repeat("x", 10*1024) + `"}`), {}}
		}, []string{
			"spec.devices.config[1].opaque.parameters: Invalid value", "spec.devices.config[2].opaque.parameters: Required value",
			"spec.devices.config[3].opaque.parameters: Too long", "spec.devices.config[4].opaque: Required value",
		}},
		{"too many", func(d *resourcev1.DeviceClaim) { d.Constraints = make([]resourcev1.DeviceConstraint, 33) }, nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c := newClaim()
			test.edit(&c.Spec.Devices)
			if test.name == "too many" {
				if errs := ResourceClaim().Validate(c); len(errs) == 0 || errs[0].Error() != "spec.devices.constraints: Too many: 33: must have at most 32 items" {
					t.Errorf("%v", errs)
				}
				return
			}
			checktest.Faults(t, ResourceClaim().Validate(c), test.want...)
		})
	}
	changed := newClaim()
	changed.Spec.Devices.Requests[0].Exactly.Count = 2
	checktest.Faults(t, ResourceClaim().ValidateUpdate(changed, newClaim()), "spec: Invalid value")
}

func TestClaimStatus(t *testing.T) {
	k := ResourceClaim()
	allocated := func() *resourcev1.ResourceClaim {
		c := newClaim()
		c.Status.Allocation = &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{Results: []resourcev1.DeviceRequestAllocationResult{
			{Request: "gpu", Driver: "d.example.com", Pool: "n1", Device: "gpu-0"},
		}}}
		return c
	}
	checktest.Faults(t, k.Status.ValidateUpdate(allocated(), newClaim()))
	checktest.Faults(t, k.Status.ValidateUpdate(newClaim(), allocated())) // given back

	other := allocated()
	other.Status.Allocation.Devices.Results[0].Request = "none"
	other.Status.Allocation.Devices.Results[0].Pool = ""
	other.Status.Devices = []resourcev1.AllocatedDeviceStatus{{Driver: "d.example.com", Pool: "n1", Device: "gpu-1"}}
	checktest.Faults(t, k.Status.ValidateUpdate(other, allocated()),
		"status.allocation: Invalid value", `status.allocation.devices.results[0].request: Invalid value: "none"`,
		"status.allocation.devices.results[0].pool: Required value", `status.devices[0]: Invalid value: "d.example.com/n1/gpu-1": must be an allocated device`)

	used := newClaim()
	used.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: "a", UID: "1"}, {Resource: "pods", Name: "b", UID: "1"}, {}}
	checktest.Faults(t, k.Status.ValidateUpdate(used, newClaim()),
		`status.reservedFor[1].uid: Duplicate value: "1"`, "status.reservedFor[2].resource: Required value", "status.reservedFor[2].name: Required value",
		"status.reservedFor[2].uid: Required value", "status.reservedFor: Forbidden")
}

func TestSliceFaults(t *testing.T) {
	k := ResourceSlice()
	base := func() *resourcev1.ResourceSlice {
		return &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "s", ResourceVersion: "1"}, Spec: resourcev1.ResourceSliceSpec{
			Driver: "d.example.com", NodeName: ptr.To("n1"), Pool: resourcev1.ResourcePool{Name: "n1", ResourceSliceCount: 1},
			Devices: []resourcev1.Device{{Name: "gpu-0"}},
		}}
	}
	checktest.Faults(t, k.Validate(base()))

	empty := &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "s"}}
	checktest.Faults(t, k.Validate(empty), "spec.driver: Required value", "spec.pool.name: Required value",
		"spec.pool.resourceSliceCount: Invalid value: 0: must be greater than zero", "spec: Invalid value: 0: exactly one of")

	bad := base()
	bad.Spec.AllNodes = ptr.To(false)
	bad.Spec.Devices = append(bad.Spec.Devices, resourcev1.Device{Name: "gpu-0", AllNodes: ptr.To(true), Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{
		"model": {StringValue: ptr.To("a"), IntValue: ptr.To[int64](1)},
	}}, resourcev1.Device{Name: "gpu-1", Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"Not/an id": {VersionValue: ptr.To("one")}}})
	checktest.Faults(t, k.Validate(bad), "spec.allNodes: Invalid value: false", "spec: Invalid value: 2: exactly one of",
		`spec.devices[1].name: Duplicate value: "gpu-0"`, "spec.devices[1]: Forbidden", "spec.devices[1].attributes[model]: Invalid value: 2: exactly one value",
		`spec.devices[2].attributes: Invalid value: "Not"`, `spec.devices[2].attributes: Invalid value: "an id"`, `spec.devices[2].attributes[Not/an id].version: Invalid value: "one"`)

	moved := base()
	moved.Spec.Driver, moved.Spec.Pool.Name, moved.Spec.NodeName = "e.example.com", "n2", ptr.To("n2")
	checktest.Faults(t, k.ValidateUpdate(moved, base()), "spec.driver: Invalid value", "spec.pool.name: Invalid value", "spec.nodeName: Invalid value")
}

func TestClassGeneration(t *testing.T) {
	k := DeviceClass()
	old, c := &resourcev1.DeviceClass{}, &resourcev1.DeviceClass{}
	k.PrepareCreate(old)
	c.Labels = map[string]string{"a": "b"}
	if k.PrepareUpdate(c, old); c.Generation != 1 {
		t.Errorf("after a label generation %d, want 1", c.Generation)
	}
	c.Spec.ExtendedResourceName = ptr.To("example.com/gpu")
	if k.PrepareUpdate(c, old); c.Generation != 2 {
		t.Errorf("after a change generation %d, want 2", c.Generation)
	}
	for name, fault := range map[string]string{
		"example.com/gpu": "", "a b": "spec.extendedResourceName: Invalid value", "gpu": "spec.extendedResourceName: Invalid value: \"gpu\": must be the name of an extended resource",
		"deviceclass.resource.kubernetes.io/x": "spec.extendedResourceName: Invalid value", "kubernetes.io/gpu": "spec.extendedResourceName: Invalid value",
	} {
		class := &resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Spec: resourcev1.DeviceClassSpec{ExtendedResourceName: &name}}
		var want []string
		if fault != "" {
			want = append(want, fault)
		}
		checktest.Faults(t, k.Validate(class), want...)
	}
}

func TestTaintRules(t *testing.T) {
	rule := func(edit func(*resourcev1.DeviceTaintRule)) *resourcev1.DeviceTaintRule {
		r := &resourcev1.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: "r", ResourceVersion: "1", Generation: 1}}
		r.Spec.DeviceSelector = &resourcev1.DeviceTaintSelector{Driver: ptr.To("gpu.example.com"), Pool: ptr.To("rack/n1"), Device: ptr.To("gpu-0")}
		r.Spec.Taint = resourcev1.DeviceTaint{Key: "gpu.example.com/hot", Value: "yes", Effect: resourcev1.DeviceTaintEffectNoExecute, TimeAdded: &metav1.Time{Time: time.Unix(1, 0)}}
		edit(r)
		return r
	}
	k := DeviceTaintRule()
	for _, test := range []struct {
		name string
		edit func(*resourcev1.DeviceTaintRule)
		want []string
	}{
		{"whole", func(*resourcev1.DeviceTaintRule) {}, nil},
		{"all devices", func(r *resourcev1.DeviceTaintRule) { r.Spec.DeviceSelector = &resourcev1.DeviceTaintSelector{} }, nil},
		{"no device", func(r *resourcev1.DeviceTaintRule) { r.Spec.DeviceSelector = nil }, nil},
		{"selectors", func(r *resourcev1.DeviceTaintRule) {
			r.Spec.DeviceSelector = &resourcev1.DeviceTaintSelector{Driver: ptr.To("gpu_x"), Pool: ptr.To("rack//n1"), Device: ptr.To("gpu.0")}
		}, []string{`spec.deviceSelector.driver: Invalid value: "gpu_x"`, "spec.deviceSelector.pool: Invalid value", `spec.deviceSelector.device: Invalid value: "gpu.0"`}},
		{"empty selectors", func(r *resourcev1.DeviceTaintRule) {
			r.Spec.DeviceSelector = &resourcev1.DeviceTaintSelector{Driver: ptr.To(""), Pool: ptr.To(""), Device: ptr.To("")}
		}, []string{"spec.deviceSelector.driver: Required value", "spec.deviceSelector.pool: Required value", "spec.deviceSelector.device: Required value"}},
		{"no taint", func(r *resourcev1.DeviceTaintRule) { r.Spec.Taint = resourcev1.DeviceTaint{} }, []string{"spec.taint.key: Required value", "spec.taint.effect: Required value"}},
		{"a wrong taint", func(r *resourcev1.DeviceTaintRule) {
			r.Spec.Taint = resourcev1.DeviceTaint{Key: "a b", Value: "c d", Effect: "PreferNoSchedule"}
		}, []string{`spec.taint.key: Invalid value: "a b"`, `spec.taint.value: Invalid value: "c d"`, `spec.taint.effect: Unsupported value: "PreferNoSchedule"`}},
		{"a name", func(r *resourcev1.DeviceTaintRule) { r.Name = "R" }, []string{`metadata.name: Invalid value: "R"`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			checktest.Faults(t, k.Validate(rule(test.edit)), test.want...)
			if test.name != "a name" {
				checktest.Faults(t, k.ValidateUpdate(rule(test.edit), rule(func(*resourcev1.DeviceTaintRule) {})), test.want...)
			}
		})
	}

	// The time is that of the effect.
	old := rule(func(*resourcev1.DeviceTaintRule) {})
	milder := rule(func(r *resourcev1.DeviceTaintRule) { r.Spec.Taint.Effect = resourcev1.DeviceTaintEffectNone })
	k.PrepareUpdate(milder, old)
	if milder.Spec.Taint.TimeAdded == nil || milder.Spec.Taint.TimeAdded.Unix() < time.Now().Unix()-3600 || milder.Generation != 2 {
		t.Errorf("another effect: since %v, generation %d", milder.Spec.Taint.TimeAdded, milder.Generation)
	}
	dated := rule(func(r *resourcev1.DeviceTaintRule) {
		r.Spec.Taint.Effect, r.Spec.Taint.TimeAdded = resourcev1.DeviceTaintEffectNone, &metav1.Time{Time: time.Unix(9, 0)}
	})
	k.PrepareUpdate(dated, old)
	if dated.Spec.Taint.TimeAdded == nil || dated.Spec.Taint.TimeAdded.Unix() != 9 {
		t.Errorf("another effect and time: since %v", dated.Spec.Taint.TimeAdded)
	}
	crowded := rule(func(r *resourcev1.DeviceTaintRule) {
		for i := range resourcev1.DeviceTaintRuleStatusMaxConditions + 1 {
			r.Status.Conditions = append(r.Status.Conditions, metav1.Condition{Type: "C" + strconv.Itoa(i), Status: "True", Reason: "R", LastTransitionTime: metav1.Time{Time: time.Unix(1, 0)}})
		}
	})
	checktest.Faults(t, k.Status.ValidateUpdate(crowded, old), "status.conditions: Too many: 9")
}

// TestWarnings: what is stored and not acted on is said, and nothing else.
func TestWarnings(t *testing.T) {
	derived := newClaim()
	derived.Spec.Devices.Requests[1].FirstAvailable[1].DerivedAttributes = []resourcev1.DeviceDerivedAttribute{{Name: "a/b", Expression: "1"}}
	template := &resourcev1.ResourceClaimTemplate{Spec: resourcev1.ResourceClaimTemplateSpec{Spec: derived.Spec}}
	for name, c := range map[string]struct {
		got  []string
		want string // the beginning of the only one
	}{
		"claim":    {got: ResourceClaim().Warnings(newClaim())},
		"derived":  {got: ResourceClaim().Warnings(derived), want: "spec.devices.requests[1]: derivedAttributes"},
		"template": {got: ResourceClaimTemplate().Warnings(template), want: "spec.spec.devices.requests[1]: derivedAttributes"},
	} {
		if len(c.got) > 1 || (len(c.got) == 1) != (c.want != "") || len(c.got) == 1 && !strings.HasPrefix(c.got[0], c.want) {
			t.Errorf("%s: %q, want %q", name, c.got, c.want)
		}
	}
}

// TestTaintTimes: taints get the time at which they were added, and keep it when
// they are written without it.
func TestTaintTimes(t *testing.T) {
	then, now := metav1.NewTime(time.Unix(1, 0)), metav1.NewTime(time.Unix(9, 5))
	slice := func(device string, taints ...resourcev1.DeviceTaint) *resourcev1.ResourceSlice {
		return &resourcev1.ResourceSlice{Spec: resourcev1.ResourceSliceSpec{Devices: []resourcev1.Device{{Name: device, Taints: taints}}}}
	}
	taint := func(key string, effect resourcev1.DeviceTaintEffect, at *metav1.Time) resourcev1.DeviceTaint {
		return resourcev1.DeviceTaint{Key: key, Effect: effect, TimeAdded: at}
	}
	const no, ex = resourcev1.DeviceTaintEffectNoSchedule, resourcev1.DeviceTaintEffectNoExecute
	for name, c := range map[string]struct {
		slice, old *resourcev1.ResourceSlice
		want       int64
	}{
		"new":             {slice: slice("d", taint("k", ex, nil)), want: 9},
		"its own":         {slice: slice("d", taint("k", ex, &then)), want: 1},
		"of before":       {slice: slice("d", taint("k", ex, nil)), old: slice("d", taint("k", ex, &then)), want: 1},
		"another effect":  {slice: slice("d", taint("k", ex, nil)), old: slice("d", taint("k", no, &then)), want: 9},
		"another device":  {slice: slice("d", taint("k", ex, nil)), old: slice("e", taint("k", ex, &then)), want: 9},
		"without, before": {slice: slice("d", taint("k", ex, nil)), old: slice("d", taint("k", ex, nil)), want: 9},
	} {
		stampDevices(c.slice, c.old, now)
		if at := c.slice.Spec.Devices[0].Taints[0].TimeAdded; at == nil || at.Unix() != c.want {
			t.Errorf("%s: since %v, want %d", name, at, c.want)
		}
	}
	k := DeviceTaintRule()
	rule := func(effect resourcev1.DeviceTaintEffect, at *metav1.Time) *resourcev1.DeviceTaintRule {
		return &resourcev1.DeviceTaintRule{Spec: resourcev1.DeviceTaintRuleSpec{Taint: taint("k", effect, at)}}
	}
	made := rule(ex, nil)
	k.PrepareCreate(made)
	if made.Spec.Taint.TimeAdded == nil {
		t.Error("a new rule has no time")
	}
	again := rule(ex, nil)
	again.Spec.Taint.Key = "other"
	k.PrepareUpdate(again, rule(ex, &then))
	if at := again.Spec.Taint.TimeAdded; at == nil || at.Unix() != 1 {
		t.Errorf("another key: since %v, want the time of before", at)
	}
}
