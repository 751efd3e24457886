package scheduler

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/apis/core"
)

// A pod may ask for devices by an extended resource that a DeviceClass names. On
// a node that has none of the resource itself, by a device plugin, the pod gets
// them by a ResourceClaim that is made for it, and for the node, before it is bound.

// extended is what of a pod's extended resources classes of devices can give.
type extended struct {
	pod     *corev1.Pod
	classes map[corev1.ResourceName]string
	// made is the claim of an earlier attempt; nil: there is none. It is the pod's
	// only one: a node where it would have to ask for other devices is refused.
	made *resourcev1.ResourceClaim
	// claims are what is asked for, by the resources that devices are to give.
	claims map[string]*extendedClaim
}

// extendedClaim is a claim for resources, and which container has which of its
// requests. claim is nil if nothing is asked for.
type extendedClaim struct {
	claim    *resourcev1.ResourceClaim
	mappings []corev1.ContainerExtendedResourceRequest
}

// classOf is the class that gives the resource. Of several that name it the newest
// does, of equally old ones the first by name; each class gives the resource
// that has its own name, too.
func (v *deviceView) classOf(name corev1.ResourceName) (class string) {
	if v.byResource == nil {
		all, err := v.classes.DeviceClassLister.List(labels.Everything())
		if err != nil {
			return ""
		}
		v.byResource = map[corev1.ResourceName]string{}
		slices.SortFunc(all, func(a, b *resourcev1.DeviceClass) int {
			if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
				return c
			}
			return strings.Compare(b.Name, a.Name)
		})
		for _, c := range all {
			if c.Spec.ExtendedResourceName != nil {
				v.byResource[corev1.ResourceName(*c.Spec.ExtendedResourceName)] = c.Name
			}
		}
		for _, c := range all {
			v.byResource[corev1.ResourceName(resourcev1.ResourceDeviceClassPrefix+c.Name)] = c.Name
		}
	}
	return v.byResource[name]
}

// extendedOf finds what of the pod's resources devices can give; nil: nothing.
func (v *deviceView) extendedOf(p *podInfo) *extended {
	var out *extended
	for name, n := range p.requests.other {
		if n == 0 || !core.IsExtended(name) {
			continue
		}
		class := v.classOf(name)
		if class == "" {
			continue
		}
		if out == nil {
			out = &extended{pod: p.pod, classes: map[corev1.ResourceName]string{}, claims: map[string]*extendedClaim{}}
		}
		out.classes[name] = class
	}
	if out == nil {
		return nil
	}
	if k := v.claims[types.NamespacedName{Namespace: p.pod.Namespace, Name: extendedClaimName(p.pod)}]; k != nil && metav1.IsControlledBy(k.claim, p.pod) {
		out.made = k.claim
	}
	return out
}

// asksExtended reports whether the pod asks for an extended resource: a class that
// comes, or a claim that goes, may help it.
func asksExtended(p *podInfo) bool {
	for name := range p.requests.other {
		if core.IsExtended(name) {
			return true
		}
	}
	return false
}

// gives reports whether devices, not the node itself, are to give the resource on
// the node.
func (d *deviceDemand) gives(n *nodeInfo, name corev1.ResourceName) bool {
	return d != nil && d.extended != nil && d.extended.classes[name] != "" && n.allocatable.of(name) == 0
}

// on is what is asked of devices on the node.
func (e *extended) on(d *deviceDemand, n *nodeInfo) *extendedClaim {
	var names []string
	for name := range e.classes {
		if d.gives(n, name) {
			names = append(names, string(name))
		}
	}
	slices.Sort(names)
	key := strings.Join(names, ",")
	c := e.claims[key]
	if c != nil {
		return c
	}
	c = &extendedClaim{}
	if len(names) > 0 {
		claim := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
			Namespace: e.pod.Namespace, Name: extendedClaimName(e.pod), UID: "not made yet/" + e.pod.UID,
			Annotations:     map[string]string{resourcev1.ExtendedResourceClaimAnnotation: "true"},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(e.pod, corev1.SchemeGroupVersion.WithKind("Pod"))},
		}}
		claim.Spec.Devices.Requests, c.mappings = extendedRequests(e.pod, names, e.classes)
		c.claim = claim
	}
	e.claims[key] = c
	return c
}

// fitsMade reports whether the claim of an earlier attempt is what is asked for on
// the node.
func (e *extended) fitsMade(d *deviceDemand, n *nodeInfo) bool {
	c := e.on(d, n)
	return c.claim != nil && apiequality.Semantic.DeepEqual(c.claim.Spec.Devices.Requests, e.made.Spec.Devices.Requests)
}

// extendedClaimName is a function of the pod: a second attempt to make the claim is
// refused by the server.
func extendedClaimName(pod *corev1.Pod) string {
	const infix = "-extended-resources-"
	sum := sha256.Sum256([]byte(pod.UID))
	suffix := infix + hex.EncodeToString(sum[:])[:8]
	return strings.TrimRight(pod.Name[:min(len(pod.Name), 63-len(suffix))], "-.") + suffix
}

// extendedRequests are the requests for the resources, and which container has
// which of them. Each container that runs beside others has its own; init
// containers use those of containers that start after them, and share one request
// for what they need beyond that, as one after the other has it.
func extendedRequests(pod *corev1.Pod, names []string, classes map[corev1.ResourceName]string) (requests []resourcev1.DeviceRequest, mappings []corev1.ContainerExtendedResourceRequest) {
	all := slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers)
	for _, name := range names {
		wants := func(i int) int64 {
			q := all[i].Resources.Requests[corev1.ResourceName(name)]
			return q.Value()
		}
		mapTo := func(i int, request string) {
			mappings = append(mappings, corev1.ContainerExtendedResourceRequest{ContainerName: all[i].Name, ResourceName: name, RequestName: request})
		}
		ask := func(request string, n int64) {
			requests = append(requests, resourcev1.DeviceRequest{Name: request, Exactly: &resourcev1.ExactDeviceRequest{
				DeviceClassName: classes[corev1.ResourceName(name)], AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: n,
			}})
		}
		stays := func(i int) bool { return i >= len(pod.Spec.InitContainers) || core.IsSidecar(&all[i]) }
		// What init containers need beyond what later ones have, and who needs most.
		most, more := -1, int64(0)
		lacks := map[int]bool{}
		for i := range all {
			if wants(i) == 0 {
				continue
			}
			if stays(i) {
				ask(requestName(all[i].Resources.Requests, i, name), wants(i))
				mapTo(i, requestName(all[i].Resources.Requests, i, name))
				continue
			}
			left := wants(i)
			for j := i + 1; j < len(all) && left > 0; j++ {
				if stays(j) && wants(j) > 0 {
					mapTo(i, requestName(all[j].Resources.Requests, j, name))
					left -= wants(j)
				}
			}
			if left > 0 {
				lacks[i] = true
			}
			if left > more {
				most, more = i, left
			}
		}
		if most < 0 {
			continue
		}
		shared := requestName(all[most].Resources.Requests, most, name)
		ask(shared, more)
		for i := range all {
			if lacks[i] {
				mapTo(i, shared)
			}
		}
	}
	slices.SortFunc(requests, func(a, b resourcev1.DeviceRequest) int { return strings.Compare(a.Name, b.Name) })
	return requests, mappings
}

// requestName is upstream's: by the places of the container and of the resource
// among those that it asks for.
func requestName(asked corev1.ResourceList, container int, name string) string {
	names := make([]string, 0, len(asked))
	for n := range asked {
		names = append(names, string(n))
	}
	slices.Sort(names)
	return fmt.Sprintf("container-%d-request-%d", container, slices.Index(names, name))
}

// makeExtended makes the claim that was decided on, and has the view count its
// devices as that claim's.
func (s *scheduler) makeExtended(ctx context.Context, pod *corev1.Pod, choice deviceChoice, off <-chan struct{}) (deviceChoice, error) {
	api := s.client.ResourceV1().ResourceClaims(pod.Namespace)
	claim := choice.claim.DeepCopy()
	claim.UID = ""
	made, err := api.Create(ctx, claim, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		made, err = api.Get(ctx, claim.Name, metav1.GetOptions{})
	}
	switch {
	case err != nil:
		return choice, fmt.Errorf("make resourceclaim %s for extended resources: %w", claim.Name, err)
	case !metav1.IsControlledBy(made, pod):
		return choice, fmt.Errorf("make resourceclaim %s for extended resources: another object has the name: delete it", claim.Name)
	case made.DeletionTimestamp != nil || made.Status.Allocation != nil || !apiequality.Semantic.DeepEqual(made.Spec.Devices.Requests, claim.Spec.Devices.Requests):
		return choice, fmt.Errorf("make resourceclaim %s for extended resources: %w", claim.Name, errClaimChanged)
	}
	timeout := s.clock.NewTimer(deviceTimeout)
	defer timeout.Stop()
	for {
		news := s.deviceNews.wait()
		s.mu.Lock()
		if k := s.devices.claims[nameOf(made)]; k != nil && k.claim.UID == made.UID {
			s.devices.assume(made, choice.allocation)
			s.devices.settle(choice.claim)
			choice.claim, choice.make = k.claim, false
			s.mu.Unlock()
			return choice, nil
		}
		s.mu.Unlock()
		select {
		case <-ctx.Done():
			return choice, ctx.Err()
		case <-news:
		case <-off:
			return choice, errCalledOff
		case <-timeout.C():
			return choice, fmt.Errorf("the watch has not shown resourceclaim %s within %v", made.Name, deviceTimeout)
		}
	}
}

// writeExtended writes into the pod's status which claim gives its extended
// resources; nil: none does.
func (s *scheduler) writeExtended(ctx context.Context, pod *corev1.Pod, status *corev1.PodExtendedResourceClaimStatus) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"status":   map[string]any{"extendedResourceClaimStatus": status},
	})
	if err != nil {
		return fmt.Errorf("encode the claim for extended resources: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, bindTimeout)
	defer cancel()
	if _, err = s.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
		return fmt.Errorf("write the claim for extended resources into the pod's status: %w", err)
	}
	return nil
}

// clearExtended takes the claim of an earlier attempt out of the pod's status, and
// deletes it: the node, or its device plugin, gives what it was for.
func (s *scheduler) clearExtended(ctx context.Context, pod *corev1.Pod) error {
	s.mu.Lock()
	k := s.devices.claims[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Status.ExtendedResourceClaimStatus.ResourceClaimName}]
	s.mu.Unlock()
	if k != nil && isExtended(k.claim) && metav1.IsControlledBy(k.claim, pod) {
		if err := s.giveBack(ctx, pod, k.claim); err != nil {
			return err
		}
	}
	return s.writeExtended(ctx, pod, nil)
}

// isExtended reports whether the claim was made for a pod's extended resources.
func isExtended(claim *resourcev1.ResourceClaim) bool {
	return claim.Annotations[resourcev1.ExtendedResourceClaimAnnotation] == "true"
}
