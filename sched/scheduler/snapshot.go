package scheduler

import (
	"maps"
	"math"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/clusterd/clusterd/sched/internal/pods"
)

var assumedRequests = corev1.ResourceList{
	corev1.ResourceCPU:    *resource.NewMilliQuantity(assumedCPU, resource.DecimalSI),
	corev1.ResourceMemory: *resource.NewQuantity(assumedMemory, resource.BinarySI),
}

// podInfo is a pod with what the rules ask of it again and again.
type podInfo struct {
	pod       *corev1.Pod
	requests  amounts
	weight    amounts
	ports     []hostPort
	owner     types.UID // its controller; empty if it has none
	affinity  nodeaffinity.RequiredNodeAffinity
	attract   []term // required pod affinity
	repel     []term // required pod anti-affinity
	preferred []weightedTerm
	choosy    bool          // it says which of the nodes that fit it prefers
	storage   *demand       // what its claims ask for; nil: it has none
	devices   *deviceDemand // the same of its resourceclaims
	search    search        // how far the preemptions for it have come
}

func newPodInfo(pod *corev1.Pod) *podInfo {
	p := &podInfo{
		pod:      pod,
		requests: requests(pod),
		weight:   weight(pod),
		ports:    hostPorts(pod),
		affinity: nodeaffinity.GetRequiredNodeAffinity(pod),
	}
	if ref := metav1.GetControllerOf(pod); ref != nil {
		p.owner = ref.UID
	}
	if e := pod.Status.ExtendedResourceClaimStatus; e != nil && pod.Spec.NodeName != "" {
		for i := range e.RequestMappings { // a claim gives them, not the node
			delete(p.requests.other, corev1.ResourceName(e.RequestMappings[i].ResourceName))
		}
	}
	p.attract, p.repel, p.preferred = terms(pod)
	p.choosy = choosy(pod)
	return p
}

// choosy reports whether the pod has wishes about its node beyond what it needs.
func choosy(pod *corev1.Pod) bool {
	for i := range pod.Spec.TopologySpreadConstraints {
		if pod.Spec.TopologySpreadConstraints[i].WhenUnsatisfiable == corev1.ScheduleAnyway {
			return true
		}
	}
	a := pod.Spec.Affinity
	return a != nil && (a.NodeAffinity != nil && len(a.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution) > 0 ||
		a.PodAffinity != nil && len(a.PodAffinity.PreferredDuringSchedulingIgnoredDuringExecution) > 0 ||
		a.PodAntiAffinity != nil && len(a.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution) > 0)
}

// nodeInfo is a node with the pods that are bound or about to be bound to it.
type nodeInfo struct {
	// What a search reads of each of thousands of nodes comes first, and without a look
	// at the object.
	out         bool           // no pod may be put there: it has no object, or one that is being deleted
	cordoned    bool           // spec.unschedulable
	taints      []corev1.Taint // of the object, read only
	allocatable amounts
	requested   amounts
	maxPods     int64 // of allocatable; a field, as every pod asks for one
	pods        map[types.UID]*podInfo
	name        string
	// node is nil while only pods of the node are known.
	node   *corev1.Node
	weight amounts
	// owners counts the pods of each controller that are not about to go.
	owners map[types.UID]int
	index  int    // in snapshot.list
	zone   string // that its labels name
	zoneID int
}

// snapshot is the cluster as the scheduler sees it: what informers report plus
// what it has itself decided and they do not show yet (assumed pods). It is
// kept up to date change by change; nothing is copied for a decision. The
// scheduler's mutex guards it.
type snapshot struct {
	// profiles are how pods are placed, by their schedulerName.
	profiles profiles
	// storage finds claims and volumes; nil: there are none.
	storage *storageView
	// devices knows claims to devices; nil: there are none.
	devices *deviceView
	nodes   map[string]*nodeInfo
	// list holds the values of nodes; next is where the next search begins.
	list   []*nodeInfo
	next   int
	zones  zones
	images images
	// all counts each known node once: which domains there are.
	all *tally
	// placed maps each counted pod to its node.
	placed map[types.UID]string
	// assumed holds pods whose binding no informer has confirmed.
	assumed map[types.UID]bool
	// repelling are the required anti-affinity terms of placed pods, attracting their
	// required affinity terms, and preferring those that they prefer, by weight.
	repelling, attracting, preferring *heldTerms
	// nominated holds the waiting pods that were promised a node.
	nominated map[types.UID]nomination
	// namespaces' labels, for terms with a namespaceSelector.
	namespaces map[string]labels.Set
	// matchings are the tallies that rules asked for, by what they count.
	matchings map[string]*matching
	// byOwner are those that constraints of a profile asked for, by controller.
	byOwner map[types.UID]*tally
}

func newSnapshot() *snapshot {
	return &snapshot{
		profiles:   profilesOf(defaultProfile()),
		nodes:      map[string]*nodeInfo{},
		images:     images{},
		zones:      newZones(),
		all:        newTally(),
		placed:     map[types.UID]string{},
		assumed:    map[types.UID]bool{},
		nominated:  map[types.UID]nomination{},
		namespaces: map[string]labels.Set{},
		matchings:  map[string]*matching{},
		byOwner:    map[types.UID]*tally{},
		repelling:  newHeldTerms(),
		attracting: newHeldTerms(),
		preferring: newHeldTerms(),
	}
}

// profile is the one of p's schedulerName; p is ours.
func (s *snapshot) profile(p *podInfo) *profile { return s.profiles.of(p.pod) }

func (s *snapshot) entry(name string) *nodeInfo {
	n := s.nodes[name]
	if n == nil {
		n = &nodeInfo{name: name, out: true, pods: map[types.UID]*podInfo{}, owners: map[types.UID]int{}, index: len(s.list)}
		s.nodes[name] = n
		s.list = append(s.list, n)
		s.zones.mixed = false
	}
	return n
}

func (s *snapshot) setNode(node *corev1.Node) {
	n := s.entry(node.Name)
	before, known := n.labels(), n.node != nil
	var had []corev1.ContainerImage
	if known {
		had = n.node.Status.Images
	}
	n.node = node
	n.out, n.cordoned, n.taints = node.DeletionTimestamp != nil, node.Spec.Unschedulable, node.Spec.Taints
	s.reimaged(n, had, node.Status.Images)
	if !known {
		s.all.add(n, 1)
	}
	n.allocatable = amountsOf(node.Status.Allocatable)
	n.maxPods = math.MaxInt64
	if q, ok := node.Status.Allocatable[corev1.ResourcePods]; ok {
		n.maxPods = q.Value()
	}
	if !maps.Equal(before, node.Labels) {
		s.relabelled(n, before)
		if known {
			s.all.relabel(n, before)
		}
	}
}

// labels returns the node's labels; none while only pods of it are known.
func (n *nodeInfo) labels() map[string]string {
	if n.node == nil {
		return nil
	}
	return n.node.Labels
}

func (s *snapshot) removeNode(name string) {
	if n := s.nodes[name]; n != nil {
		before := n.labels()
		if n.node != nil {
			s.all.add(n, -1)
			s.reimaged(n, n.node.Status.Images, nil)
		}
		n.node, n.out, n.cordoned, n.taints = nil, true, false, nil
		s.relabelled(n, before)
		s.prune(n)
	}
}

func (s *snapshot) prune(n *nodeInfo) {
	if n.node == nil && len(n.pods) == 0 {
		delete(s.nodes, n.name)
		last := s.list[len(s.list)-1]
		s.list[n.index], last.index = last, n.index
		s.list[len(s.list)-1] = nil
		s.list = s.list[:len(s.list)-1]
		s.zones.mixed = false
	}
}

// setPod counts a pod that the API shows bound to a node; a finished pod
// counts no more.
func (s *snapshot) setPod(pod *corev1.Pod) {
	s.removePod(pod.UID)
	if pod.Spec.NodeName == "" || pods.Finished(pod) {
		return
	}
	delete(s.nominated, pod.UID) // it has its node
	s.put(newPodInfo(pod), pod.Spec.NodeName)
}

// assume counts a pod on the node that was chosen for it.
func (s *snapshot) assume(p *podInfo, node string) {
	s.removePod(p.pod.UID)
	delete(s.nominated, p.pod.UID)
	s.put(p, node)
	s.assumed[p.pod.UID] = true
}

// forget takes back assume, unless an informer has confirmed the pod since.
func (s *snapshot) forget(uid types.UID) {
	if s.assumed[uid] {
		s.removePod(uid)
	}
}

func (s *snapshot) put(p *podInfo, node string) {
	n := s.entry(node)
	n.pods[p.pod.UID] = p
	n.requested.add(p.requests)
	n.weight.add(p.weight)
	s.placed[p.pod.UID] = node
	if p.counts() {
		s.own(n, p.owner, 1)
	}
	s.tallied(n, p, 1)
}

// counts reports whether the pod is one of its owner's for spreading.
func (p *podInfo) counts() bool { return p.owner != "" && p.pod.DeletionTimestamp == nil }

func (s *snapshot) removePod(uid types.UID) {
	name, ok := s.placed[uid]
	if !ok {
		return
	}
	n := s.nodes[name]
	p := n.pods[uid]
	n.requested.sub(p.requests)
	n.weight.sub(p.weight)
	delete(n.pods, uid)
	delete(s.placed, uid)
	delete(s.assumed, uid)
	if p.counts() {
		s.own(n, p.owner, -1)
	}
	s.tallied(n, p, -1)
	s.prune(n)
}
