package scheduler

import (
	"errors"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	resourcelisters "k8s.io/client-go/listers/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/devices"
)

// deviceFeatures are what the allocator may use: what upstream's scheduler has
// on by default.
var deviceFeatures = structured.Features{
	AdminAccess:             true,
	ConsumableCapacity:      true,
	DeviceBindingAndStatus:  true,
	DeviceTaints:            true,
	FractionalCapacityRange: true,
	PartitionableDevices:    true,
	PrioritizedList:         true,
}

// expressions is how many compiled CEL expressions are kept.
const expressions = 1000

// deviceView is what there is of devices and claims to them. The truth about who
// has a device is status.allocation of claims; what was decided and is not
// written yet is remembered beside it. The scheduler's mutex guards it.
type deviceView struct {
	classes classes
	slices  resourcelisters.ResourceSliceLister
	rules   resourcelisters.DeviceTaintRuleLister
	cel     *cel.Cache

	// offered holds the slices with the taints of rules, and pools what is known of
	// each pool; both are made again when asked for after stale was set.
	offered []*resourcev1.ResourceSlice
	// onNode are those of offered that are one node's, by its name; anywhere are the
	// others.
	onNode   map[string][]*resourcev1.ResourceSlice
	anywhere []*resourcev1.ResourceSlice
	pools    map[poolID]*pool
	stale    bool

	// byResource names the class that gives an extended resource; nil: it is found
	// out when asked for.
	byResource map[corev1.ResourceName]string

	// shared are claims that get their devices in the decision about a gang that is
	// being made: its other pods may use them. nil: no such decision is being made.
	shared map[types.UID]*sharedClaim

	claims map[types.NamespacedName]*knownClaim
	// assumed are allocations of claims that are on their way to the server.
	assumed map[types.UID]*resourcev1.AllocationResult
	// counted is, of each claim, the allocation that taken and holders count.
	counted map[types.UID]*resourcev1.AllocationResult
	taken   structured.AllocatedState
	// holders are the claims that have a device for themselves. More than one is the
	// work of two leaders at once.
	holders map[structured.DeviceID]sets.Set[types.UID]
}

// knownClaim is a claim in the newest version that a watch or an answer showed.
type knownClaim struct {
	claim *resourcev1.ResourceClaim
	// shown is the version that the watch has come to.
	shown string
}

// sharedClaim is a claim that one pod of a gang is to have allocated, and others of
// it use: all of them are written with the allocation.
type sharedClaim struct{ others []*corev1.Pod }

type poolID struct{ driver, name string }

// pool is what a driver says of a set of devices, spread over slices.
type pool struct {
	generation   int64
	slices, want int64 // how many there are, and how many there should be
}

func (p *pool) complete() bool { return p.slices == p.want }

// classes lists DeviceClasses as the allocator wants them.
type classes struct {
	resourcelisters.DeviceClassLister
}

// Get implements structured.DeviceClassLister.
func (c classes) Get(name string) (*resourcev1.DeviceClass, error) {
	return c.DeviceClassLister.Get(name)
}

// List implements structured.DeviceClassLister.
func (c classes) List() ([]*resourcev1.DeviceClass, error) {
	return c.DeviceClassLister.List(labels.Everything())
}

func newDeviceView(deviceClasses resourcelisters.DeviceClassLister, slices resourcelisters.ResourceSliceLister, rules resourcelisters.DeviceTaintRuleLister) *deviceView {
	return &deviceView{
		classes: classes{deviceClasses}, slices: slices, rules: rules, stale: true,
		cel:     cel.NewCache(expressions, cel.Features{EnableConsumableCapacity: deviceFeatures.ConsumableCapacity}),
		claims:  map[types.NamespacedName]*knownClaim{},
		assumed: map[types.UID]*resourcev1.AllocationResult{},
		counted: map[types.UID]*resourcev1.AllocationResult{},
		holders: map[structured.DeviceID]sets.Set[types.UID]{},
		taken: structured.AllocatedState{
			AllocatedDevices:         sets.New[structured.DeviceID](),
			AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
			AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
		},
	}
}

// show takes in what the watch says of a claim; claim is nil if it went.
func (v *deviceView) show(old, claim *resourcev1.ResourceClaim) {
	if claim == nil {
		key := nameOf(old)
		if k := v.claims[key]; k != nil && k.claim.UID == old.UID {
			delete(v.claims, key)
			v.count(old.UID, nil)
		}
		return
	}
	k := v.claims[nameOf(claim)]
	if k != nil && k.claim.UID != claim.UID {
		v.count(k.claim.UID, nil) // deleted and made again between two events
		k = nil
	}
	if k == nil {
		k = &knownClaim{claim: claim}
		v.claims[nameOf(claim)] = k
	}
	k.shown = claim.ResourceVersion
	if !older(claim.ResourceVersion, k.claim.ResourceVersion) {
		k.claim = claim
	}
	v.count(claim.UID, k.claim)
}

// behind reports whether the watch has yet to show the claim as it is known to be.
func (v *deviceView) behind(claim *resourcev1.ResourceClaim) bool {
	k := v.claims[nameOf(claim)]
	return k != nil && older(k.shown, k.claim.ResourceVersion)
}

// wrote takes in the server's answer to a write. A claim that the watch has shown
// to be gone stays gone.
func (v *deviceView) wrote(claim *resourcev1.ResourceClaim) {
	k := v.claims[nameOf(claim)]
	if k == nil || k.claim.UID != claim.UID {
		return
	}
	if older(k.claim.ResourceVersion, claim.ResourceVersion) {
		k.claim = claim
	}
	v.count(claim.UID, k.claim)
}

// assume counts an allocation that is about to be written.
func (v *deviceView) assume(claim *resourcev1.ResourceClaim, a *resourcev1.AllocationResult) {
	v.assumed[claim.UID] = a
	v.recount(claim)
}

// settle ends assume: the allocation has been written, or will not be.
func (v *deviceView) settle(claim *resourcev1.ResourceClaim) {
	delete(v.assumed, claim.UID)
	v.recount(claim)
}

func (v *deviceView) recount(claim *resourcev1.ResourceClaim) {
	if k := v.claims[nameOf(claim)]; k != nil && k.claim.UID == claim.UID {
		v.count(claim.UID, k.claim)
	} else {
		v.count(claim.UID, nil)
	}
}

// count counts what the claim has, or is assumed to have, and nothing else of it.
// claim is nil if it does not exist: what is assumed of it counts on, for its
// write may be under way.
func (v *deviceView) count(uid types.UID, claim *resourcev1.ResourceClaim) {
	now := v.assumed[uid]
	if claim != nil && claim.Status.Allocation != nil {
		now = claim.Status.Allocation
	}
	was := v.counted[uid]
	if was == now {
		return
	}
	if was != nil {
		delete(v.counted, uid)
		v.add(uid, was, false)
	}
	if now != nil {
		v.counted[uid] = now
		v.add(uid, now, true)
	}
}

// add counts, or no longer counts, the devices of an allocation. Access for
// administrators takes nothing.
func (v *deviceView) add(uid types.UID, a *resourcev1.AllocationResult, takes bool) {
	for i := range a.Devices.Results {
		r := &a.Devices.Results[i]
		if ptr.Deref(r.AdminAccess, false) {
			continue
		}
		id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
		if r.ShareID != nil {
			share, capacity := structured.MakeSharedDeviceID(id, r.ShareID), structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity)
			if takes {
				v.taken.AllocatedSharedDeviceIDs.Insert(share)
				v.taken.AggregatedCapacity.Insert(capacity)
			} else {
				v.taken.AllocatedSharedDeviceIDs.Delete(share)
				v.taken.AggregatedCapacity.Remove(capacity)
			}
			continue
		}
		if takes {
			if v.holders[id] == nil {
				v.holders[id] = sets.New[types.UID]()
			}
			v.holders[id].Insert(uid)
			v.taken.AllocatedDevices.Insert(id)
			continue
		}
		if v.holders[id].Delete(uid); v.holders[id].Len() == 0 {
			delete(v.holders, id)
			v.taken.AllocatedDevices.Delete(id)
		}
	}
}

// refresh lists the slices again if one, or a rule, has changed.
func (v *deviceView) refresh() error {
	if !v.stale {
		return nil
	}
	all, err := v.slices.List(labels.Everything())
	rules, ruleErr := v.rules.List(labels.Everything())
	if err := errors.Join(err, ruleErr); err != nil {
		return err
	}
	v.offered = make([]*resourcev1.ResourceSlice, 0, len(all))
	v.pools = map[poolID]*pool{}
	v.onNode, v.anywhere = map[string][]*resourcev1.ResourceSlice{}, nil
	for _, slice := range all {
		offer := devices.Tainted(slice, rules)
		v.offered = append(v.offered, offer)
		if name := ptr.Deref(slice.Spec.NodeName, ""); name != "" {
			v.onNode[name] = append(v.onNode[name], offer)
		} else {
			v.anywhere = append(v.anywhere, offer)
		}
		spec := &slice.Spec.Pool
		id := poolID{slice.Spec.Driver, spec.Name}
		p := v.pools[id]
		if p == nil || p.generation < spec.Generation {
			p = &pool{generation: spec.Generation, want: spec.ResourceSliceCount}
			v.pools[id] = p
		}
		if p.generation == spec.Generation {
			p.slices++
		}
	}
	v.stale = false
	return nil
}

// current reports whether the slice is of its pool's newest generation.
func (v *deviceView) current(slice *resourcev1.ResourceSlice) bool {
	p := v.pools[poolID{slice.Spec.Driver, slice.Spec.Pool.Name}]
	return p != nil && p.generation == slice.Spec.Pool.Generation
}

func nameOf(claim *resourcev1.ResourceClaim) types.NamespacedName {
	return types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
}
