package scheduler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// dynamicResources is the name of the rule, as upstream has it.
const dynamicResources = "DynamicResources"

// searchTime bounds the search for one pod's devices, on all nodes together: in
// the worst case it tries all combinations, and other pods wait meanwhile.
const searchTime = 2 * time.Second

// noDevices stands for a refusal whose words are found only if they are read
// them: see deviceDemand.words.
var noDevices = []string{"node(s) cannot allocate the devices of the pod's resourceclaims"}

// deviceDemand is what a pod asks of devices.
type deviceDemand struct {
	view *deviceView
	// placed are claims that are allocated, waiting those that are not.
	placed  []placedClaim
	waiting []*resourcev1.ResourceClaim
	// extended are resources that devices can give; nil: none.
	extended *extended
	// joins are claims of placed that another pod of the gang is to have allocated.
	joins map[types.UID]*sharedClaim
	// ranked says that a claim prefers some devices to others.
	ranked bool

	allocator structured.Allocator // nil: nothing waits
	// answers of the allocator, by node: while a pod is decided about, no other pod
	// takes devices.
	answers map[string][]resourcev1.AllocationResult
	spent   time.Duration
	// fault ends the search on all nodes.
	fault error
	// refused are the nodes without the devices.
	refused []*nodeInfo
	// astray are the placed claims whose devices some node does not reach.
	astray map[types.UID]*resourcev1.ResourceClaim
}

type placedClaim struct {
	claim *resourcev1.ResourceClaim
	on    *nodeaffinity.NodeSelector // nil: everywhere
}

// deviceChoice is what is to be written before the pod is bound: the claim is
// reserved for it, and gets the allocation if that is not nil.
type deviceChoice struct {
	claim      *resourcev1.ResourceClaim
	allocation *resourcev1.AllocationResult
	// make says that the claim does not exist yet: it is for extended resources, and
	// mappings, which its pod's status gets, are to be written with it.
	make     bool
	mappings []corev1.ContainerExtendedResourceRequest
	// wait says that the claim's allocation is known from an answer, and the watch was
	// behind it when it was decided on: what was written before it is not known yet.
	wait bool
	// shared is with whom the allocation is shared, if others of a gang may join; of a
	// choice that joins it is set, too, and nothing is to be written for it.
	shared *sharedClaim
	joins  bool
	// clear has the claim of an earlier attempt taken out of the pod's status; there
	// is no claim then.
	clear bool
}

// need finds the pod's claims. why tells what no node can help with; astray is
// then a claim that has to give its devices back, if that is the reason.
func (v *deviceView) need(s *snapshot, p *podInfo) (d *deviceDemand, why string) {
	if v == nil {
		return nil, ""
	}
	pod, more := p.pod, v.extendedOf(p)
	if len(pod.Spec.ResourceClaims) == 0 && more == nil && pod.Status.ExtendedResourceClaimStatus == nil {
		return nil, ""
	}
	d = &deviceDemand{view: v, extended: more, answers: map[string][]resourcev1.AllocationResult{}, astray: map[types.UID]*resourcev1.ResourceClaim{}}
	seen := map[types.UID]bool{}
	for i := range pod.Spec.ResourceClaims {
		entry := &pod.Spec.ResourceClaims[i]
		name, made, err := resourceclaim.Name(pod, entry)
		switch {
		case errors.Is(err, resourceclaim.ErrClaimNotFound):
			return d, fmt.Sprintf("waiting for the resourceclaim of %q to be made from resourceclaimtemplate %q", entry.Name, ptr.Deref(entry.ResourceClaimTemplateName, ""))
		case err != nil:
			return d, err.Error()
		case name == nil:
			continue // none is needed
		}
		k := v.claims[types.NamespacedName{Namespace: pod.Namespace, Name: *name}]
		switch {
		case k == nil:
			return d, fmt.Sprintf("resourceclaim %q not found", *name)
		case made && !metav1.IsControlledBy(k.claim, pod):
			return d, fmt.Sprintf("resourceclaim %q was not made for pod %q (the pod is not its owner)", *name, pod.Name)
		case seen[k.claim.UID]:
			continue
		}
		seen[k.claim.UID] = true
		if why := d.take(s, pod, k.claim); why != "" {
			return d, why
		}
	}
	if more != nil && more.made != nil {
		if why := d.take(s, pod, more.made); why != "" {
			return d, why
		}
	}
	if len(d.waiting) == 0 && more == nil {
		return d, ""
	}
	err := v.refresh()
	if err == nil {
		d.allocator, err = structured.NewAllocator(context.Background(), deviceFeatures, v.taken, v.classes, v.offered, v.cel)
	}
	if err != nil {
		return d, fmt.Sprintf("devices cannot be looked for: %v", err)
	}
	return d, ""
}

// take adds one claim to the demand.
func (d *deviceDemand) take(s *snapshot, pod *corev1.Pod, claim *resourcev1.ResourceClaim) (why string) {
	reserved := resourceclaim.IsReservedForPod(pod, claim, false)
	switch {
	case claim.DeletionTimestamp != nil:
		return fmt.Sprintf("resourceclaim %q is being deleted", claim.Name)
	case d.view.assumed[claim.UID] != nil:
		shared := d.view.shared[claim.UID]
		if shared == nil {
			return fmt.Sprintf("resourceclaim %q is being allocated", claim.Name)
		}
		if len(claim.Status.ReservedFor)+1+len(shared.others) >= resourcev1.ResourceClaimReservedForMaxSize {
			return fmt.Sprintf("resourceclaim %q is reserved for %d pods, the most it can be", claim.Name, resourcev1.ResourceClaimReservedForMaxSize)
		}
		on, err := reach(d.view.assumed[claim.UID])
		if err != nil {
			return fmt.Sprintf("the devices for resourceclaim %q: %v", claim.Name, err)
		}
		if d.joins == nil {
			d.joins = map[types.UID]*sharedClaim{}
		}
		d.joins[claim.UID] = shared
		d.placed = append(d.placed, placedClaim{claim, on})
		return ""
	case !reserved && len(claim.Status.ReservedFor) >= resourcev1.ResourceClaimReservedForMaxSize:
		return fmt.Sprintf("resourceclaim %q is reserved for %d pods, the most it can be", claim.Name, len(claim.Status.ReservedFor))
	}
	if a := claim.Status.Allocation; a != nil {
		if device := d.view.clash(claim, a); device != "" {
			d.astray[claim.UID] = claim
			return fmt.Sprintf("device %s of resourceclaim %q is allocated to another claim, too: it is given back once no other pod uses it", device, claim.Name)
		}
		on, err := reach(a)
		if err != nil {
			return fmt.Sprintf("status.allocation.nodeSelector of resourceclaim %q: %v", claim.Name, err)
		}
		d.placed = append(d.placed, placedClaim{claim, on})
	} else {
		d.waiting = append(d.waiting, claim)
	}
	for i := range claim.Spec.Devices.Requests {
		r := &claim.Spec.Devices.Requests[i]
		d.ranked = d.ranked || len(r.FirstAvailable) > 1
		if claim.Status.Allocation != nil {
			continue
		}
		if r.Exactly != nil && ptr.Deref(r.Exactly.AdminAccess, false) && s.namespaces[claim.Namespace][resourcev1.DRAAdminNamespaceLabelKey] != "true" {
			return fmt.Sprintf("request %q of resourceclaim %q has adminAccess, for which namespace %q needs the label %s=true", r.Name, claim.Name, claim.Namespace, resourcev1.DRAAdminNamespaceLabelKey)
		}
		for _, asked := range askedOf(r) {
			if _, err := d.view.classes.Get(asked.class); err != nil {
				return fmt.Sprintf("deviceclass %q of request %q of resourceclaim %q not found", asked.class, asked.name, claim.Name)
			}
		}
	}
	return ""
}

// reach says which nodes reach the devices of an allocation; nil: all.
func reach(a *resourcev1.AllocationResult) (*nodeaffinity.NodeSelector, error) {
	if a.NodeSelector == nil {
		return nil, nil
	}
	return nodeaffinity.NewNodeSelector(a.NodeSelector)
}

// filterDevices refuses nodes that do not reach the devices that the pod's claims
// have, and those on which what its other claims ask for cannot be allocated.
func filterDevices(_ *snapshot, p *podInfo) func(*nodeInfo) []string {
	d := p.devices
	if d == nil || len(d.placed)+len(d.waiting) == 0 && d.extended == nil {
		return nil
	}
	return func(n *nodeInfo) []string {
		if e := d.extended; e != nil && e.made != nil && !e.fitsMade(d, n) {
			d.astray[e.made.UID] = e.made
			return []string{fmt.Sprintf("node(s) would need other devices than resourceclaim %q of an earlier attempt", e.made.Name)}
		}
		for i := range d.placed {
			if on := d.placed[i].on; on != nil && !on.Match(n.node) {
				if d.joins[d.placed[i].claim.UID] == nil {
					d.astray[d.placed[i].claim.UID] = d.placed[i].claim
				}
				return []string{fmt.Sprintf("node(s) didn't reach the devices of resourceclaim %q", d.placed[i].claim.Name)}
			}
		}
		if d.allocator != nil && len(d.claimsOn(n)) > 0 && d.on(n) == nil {
			return noDevices
		}
		return nil
	}
}

// on is what the waiting claims get on the node, in their order; nil: not all of
// them get something.
func (d *deviceDemand) on(n *nodeInfo) []resourcev1.AllocationResult {
	if answer, ok := d.answers[n.name]; ok || d.fault != nil {
		return answer
	}
	start := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), searchTime-d.spent)
	claims := d.claimsOn(n)
	answer, err := d.allocator.Allocate(ctx, n.node, claims)
	cancel()
	d.spent += time.Since(start)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		d.fault = fmt.Errorf("the search for devices was ended after %v: fewer devices a request, or narrower selectors, make it shorter", searchTime)
	case err != nil && !errors.Is(err, structured.ErrFailedAllocationOnNode):
		// What is asked for is at fault, not this node.
		d.fault = err
	}
	if err != nil || len(answer) != len(claims) {
		answer = nil
		d.refused = append(d.refused, n)
	}
	d.answers[n.name] = answer
	return answer
}

// claimsOn are the claims that are to be allocated on the node.
func (d *deviceDemand) claimsOn(n *nodeInfo) []*resourcev1.ResourceClaim {
	if d.extended == nil || d.extended.made != nil {
		return d.waiting
	}
	if c := d.extended.on(d, n); c.claim != nil {
		return append(slices.Clip(d.waiting), c.claim)
	}
	return d.waiting
}

// choose says what is to be written for the node that was chosen, and has the
// view count it.
func (d *deviceDemand) choose(pod *corev1.Pod, n *nodeInfo) (out []deviceChoice) {
	if d == nil {
		return nil
	}
	var mappings []corev1.ContainerExtendedResourceRequest
	if d.extended != nil {
		mappings = d.extended.on(d, n).mappings
	}
	if mappings == nil && pod.Status.ExtendedResourceClaimStatus != nil {
		out = append(out, deviceChoice{clear: true})
	}
	for i := range d.placed {
		choice := deviceChoice{claim: d.placed[i].claim, wait: d.view.behind(d.placed[i].claim)}
		if shared := d.joins[choice.claim.UID]; shared != nil {
			shared.others = append(shared.others, pod)
			out = append(out, deviceChoice{claim: choice.claim, shared: shared, joins: true})
			continue
		}
		if isExtended(choice.claim) {
			choice.mappings = mappings
		}
		if choice.wait || choice.mappings != nil || awaits(choice.claim) || !resourceclaim.IsReservedForPod(pod, choice.claim, false) {
			out = append(out, choice)
		}
	}
	claims := d.claimsOn(n)
	if len(claims) == 0 {
		return out
	}
	answer := d.on(n)
	for i, claim := range claims {
		choice := deviceChoice{claim: claim, allocation: &answer[i], make: i >= len(d.waiting)}
		if isExtended(claim) {
			choice.mappings = mappings
		}
		if d.view.shared != nil {
			choice.shared = &sharedClaim{}
			d.view.shared[claim.UID] = choice.shared
		}
		d.view.assume(claim, choice.allocation)
		out = append(out, choice)
	}
	return out
}

// givesBack is a claim whose devices no node that is left reaches, and that
// no other pod uses; nil: none. It is allocated again for the pod.
func (d *deviceDemand) givesBack(pod *corev1.Pod) *resourcev1.ResourceClaim {
	if d == nil {
		return nil
	}
	for _, claim := range d.astray {
		users := claim.Status.ReservedFor
		if len(users) == 0 || len(users) == 1 && users[0].UID == pod.UID {
			return claim
		}
	}
	return nil
}

// scoreDevices prefers nodes where claims get an earlier one of the alternatives
// that they name.
func scoreDevices(_ *snapshot, p *podInfo) func(*nodeInfo) int64 {
	d := p.devices
	if d == nil || !d.ranked || d.allocator == nil {
		return nil
	}
	return func(n *nodeInfo) (sum int64) {
		answer := d.on(n)
		for i := range d.waiting[:min(len(d.waiting), len(answer))] {
			sum += rank(d.waiting[i], &answer[i])
		}
		return sum
	}
}

// rank is the higher the earlier the alternatives are that the claim got.
func rank(claim *resourcev1.ResourceClaim, a *resourcev1.AllocationResult) (sum int64) {
	got := map[string]bool{}
	for i := range a.Devices.Results {
		got[a.Devices.Results[i].Request] = true
	}
	for i := range claim.Spec.Devices.Requests {
		r := &claim.Spec.Devices.Requests[i]
		for j := range r.FirstAvailable {
			if got[r.Name+"/"+r.FirstAvailable[j].Name] {
				sum += int64(resourcev1.FirstAvailableDeviceRequestMaxSize - j)
			}
		}
	}
	return sum
}

// asked is one way in which a request can be met.
type asked struct {
	name, class string
	mode        resourcev1.DeviceAllocationMode
	count       int64
	selectors   []resourcev1.DeviceSelector
	tolerations []resourcev1.DeviceToleration
	admin       bool
}

// askedOf takes a request apart: into one, or its alternatives.
func askedOf(r *resourcev1.DeviceRequest) (out []asked) {
	if e := r.Exactly; e != nil {
		out = append(out, asked{r.Name, e.DeviceClassName, e.AllocationMode, e.Count, e.Selectors, e.Tolerations, ptr.Deref(e.AdminAccess, false)})
	}
	for i := range r.FirstAvailable {
		sub := &r.FirstAvailable[i]
		out = append(out, asked{r.Name + "/" + sub.Name, sub.DeviceClassName, sub.AllocationMode, sub.Count, sub.Selectors, sub.Tolerations, false})
	}
	return out
}

func (a *asked) String() string {
	if a.mode == resourcev1.DeviceAllocationModeAll {
		return fmt.Sprintf("all of class %q", a.class)
	}
	return fmt.Sprintf("%d of class %q", a.count, a.class)
}

// quoted lists the claims' names.
func quoted(claims []*resourcev1.ResourceClaim) string {
	out := make([]string, 0, len(claims))
	for _, claim := range claims {
		out = append(out, fmt.Sprintf("%q", claim.Name))
	}
	return strings.Join(out, ", ")
}
