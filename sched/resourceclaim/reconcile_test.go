package resourceclaim

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// TestDecide: what a claim needs when some of its consumers are gone.
func TestDecide(t *testing.T) {
	a, b := resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: "a", UID: "a"}, resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: "b", UID: "b"}
	other := resourcev1.ResourceClaimConsumerReference{APIGroup: "example.com", Resource: "gangs", Name: "g", UID: "g"}
	allocation := &resourcev1.AllocationResult{}
	devices := []resourcev1.AllocatedDeviceStatus{{Driver: "d", Pool: "p", Device: "x"}}
	type claim struct {
		users     []resourcev1.ResourceClaimConsumerReference
		allocated bool
		deleting  bool
		finalizer bool
	}
	for name, c := range map[string]struct {
		claim     claim
		gone      []types.UID
		ownerOver bool
		users     []resourcev1.ResourceClaimConsumerReference // after
		allocated bool                                        // after
		written   bool
		release   bool
		drop      bool
	}{
		"in use":                        {claim: claim{users: []resourcev1.ResourceClaimConsumerReference{a}, allocated: true, finalizer: true}},
		"one of two goes":               {claim: claim{users: []resourcev1.ResourceClaimConsumerReference{a, b}, allocated: true, finalizer: true}, gone: []types.UID{"a"}, users: []resourcev1.ResourceClaimConsumerReference{b}, allocated: true, written: true},
		"the last goes":                 {claim: claim{users: []resourcev1.ResourceClaimConsumerReference{a}, allocated: true, finalizer: true}, gone: []types.UID{"a"}, written: true, release: true},
		"the last goes, of a made one":  {claim: claim{users: []resourcev1.ResourceClaimConsumerReference{a}, allocated: true, finalizer: true}, gone: []types.UID{"a"}, ownerOver: true, written: true, release: true, drop: true},
		"its pod is over, another not":  {claim: claim{users: []resourcev1.ResourceClaimConsumerReference{a, b}, allocated: true, finalizer: true}, gone: []types.UID{"a"}, ownerOver: true, users: []resourcev1.ResourceClaimConsumerReference{b}, allocated: true, written: true},
		"never used":                    {claim: claim{allocated: true, finalizer: true}},
		"never used, deleted":           {claim: claim{allocated: true, finalizer: true, deleting: true}, written: true, release: true},
		"in use, deleted":               {claim: claim{users: []resourcev1.ResourceClaimConsumerReference{a}, allocated: true, finalizer: true, deleting: true}},
		"not allocated, deleted":        {claim: claim{finalizer: true, deleting: true}, release: true},
		"another's finalizer":           {claim: claim{deleting: true}},
		"what reserves it is not a pod": {claim: claim{users: []resourcev1.ResourceClaimConsumerReference{other}, allocated: true, finalizer: true}},
		"made, never allocated":         {claim: claim{}, ownerOver: true, drop: true},
		"made, deleted already":         {claim: claim{deleting: true}, ownerOver: true},
	} {
		t.Run(name, func(t *testing.T) {
			in := &resourcev1.ResourceClaim{Status: resourcev1.ResourceClaimStatus{ReservedFor: c.claim.users}}
			if c.claim.allocated {
				in.Status.Allocation, in.Status.Devices = allocation, devices
			}
			if c.claim.deleting {
				in.DeletionTimestamp = &metav1.Time{}
			}
			if c.claim.finalizer {
				in.Finalizers = []string{"example.com/keep", resourcev1.Finalizer}
			}
			before := in.DeepCopy()
			d := decide(in, func(user resourcev1.ResourceClaimConsumerReference) bool {
				for _, uid := range c.gone {
					if user.UID == uid {
						return true
					}
				}
				return false
			}, c.ownerOver)
			if diff := cmp.Diff(before, in); diff != "" {
				t.Errorf("the claim was changed: %s", diff)
			}
			if (d.status != nil) != c.written || d.release != c.release || d.drop != c.drop {
				t.Fatalf("status %v, release %t, drop %t; want written %t, %t, %t", d.status, d.release, d.drop, c.written, c.release, c.drop)
			}
			if d.status == nil {
				return
			}
			if diff := cmp.Diff(c.users, d.status.ReservedFor); diff != "" {
				t.Errorf("users: %s", diff)
			}
			if (d.status.Allocation != nil) != c.allocated || (len(d.status.Devices) > 0) != c.allocated {
				t.Errorf("allocation %v with devices %v, want allocated %t", d.status.Allocation, d.status.Devices, c.allocated)
			}
		})
	}
}

// TestClaimNames: names are valid, of the pod and the entry, and differ where the
// pod's UID, the entry or the try differs.
func TestClaimNames(t *testing.T) {
	long, longer := strings.Repeat("p", 250), strings.Repeat("e", 63)
	seen := map[string]string{}
	for _, pod := range []string{"web-0", long} {
		for _, uid := range []types.UID{"u1", "u2"} {
			for _, entry := range []string{"gpu", longer} {
				for try := range 2 {
					p := schedtest.Pod(pod).Obj()
					p.UID = uid
					name := claimName(p, entry, try)
					if errs := validation.IsDNS1123Label(name); len(errs) > 0 {
						t.Errorf("%q: %v", name, errs)
					}
					if pod == "web-0" && entry == "gpu" && !strings.HasPrefix(name, "web-0-gpu-") || !strings.HasPrefix(name, pod[:5]) || !strings.Contains(name, "-"+entry[:3]) {
						t.Errorf("%q does not show pod and entry", name)
					}
					if was, ok := seen[name]; ok {
						t.Errorf("%q is of %s, too", name, was)
					}
					seen[name] = pod + "/" + entry
					if name != claimName(p, entry, try) {
						t.Error("the name changes")
					}
				}
			}
		}
	}
}

// TestOver: which pods use devices no more.
func TestOver(t *testing.T) {
	now := metav1.Now()
	for name, c := range map[string]struct {
		pod  *schedtest.PodBuilder
		want bool
	}{
		"waits":                     {schedtest.Pod("p"), false},
		"runs":                      {schedtest.Pod("p").On("n").Phase(corev1.PodRunning), false},
		"has succeeded":             {schedtest.Pod("p").On("n").Phase(corev1.PodSucceeded), true},
		"is ended on its node":      {schedtest.Pod("p").On("n").Phase(corev1.PodRunning).Deleting(now.Time), false},
		"deleted before it started": {schedtest.Pod("p").Deleting(now.Time), true},
	} {
		if got := over(c.pod.Obj()); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
