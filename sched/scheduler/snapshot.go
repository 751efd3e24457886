package scheduler

import (
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
	storage   *demand // what its claims ask for; nil: it has none
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
	p.attract, p.repel, p.preferred = terms(pod)
	return p
}

// nodeInfo is a node with the pods that are bound or about to be bound to it.
type nodeInfo struct {
	name string
	// node is nil while only pods of the node are known.
	node        *corev1.Node
	allocatable amounts
	pods        map[types.UID]*podInfo
	requested   amounts
	weight      amounts
}

// snapshot is the cluster as the scheduler sees it: what informers report plus
// what it has itself decided and they do not show yet (assumed pods). It is
// kept up to date change by change; nothing is copied for a decision. The
// scheduler's mutex guards it.
type snapshot struct {
	// storage finds claims and volumes; nil: there are none.
	storage *storageView
	nodes   map[string]*nodeInfo
	// placed maps each counted pod to its node.
	placed map[types.UID]string
	// assumed holds pods whose binding no informer has confirmed.
	assumed map[types.UID]bool
	// repelling counts placed pods with required anti-affinity: while it is 0
	// nobody has to look for them.
	repelling int
	// nominated holds the waiting pods that were promised a node.
	nominated map[types.UID]nomination
	// namespaces' labels, for terms with a namespaceSelector.
	namespaces map[string]labels.Set
}

func newSnapshot() *snapshot {
	return &snapshot{
		nodes:      map[string]*nodeInfo{},
		placed:     map[types.UID]string{},
		assumed:    map[types.UID]bool{},
		nominated:  map[types.UID]nomination{},
		namespaces: map[string]labels.Set{},
	}
}

func (s *snapshot) entry(name string) *nodeInfo {
	n := s.nodes[name]
	if n == nil {
		n = &nodeInfo{name: name, pods: map[types.UID]*podInfo{}, requested: amounts{}, weight: amounts{}}
		s.nodes[name] = n
	}
	return n
}

func (s *snapshot) setNode(node *corev1.Node) {
	n := s.entry(node.Name)
	n.node = node
	n.allocatable = amountsOf(node.Status.Allocatable)
}

func (s *snapshot) removeNode(name string) {
	if n := s.nodes[name]; n != nil {
		n.node = nil
		s.prune(n)
	}
}

func (s *snapshot) prune(n *nodeInfo) {
	if n.node == nil && len(n.pods) == 0 {
		delete(s.nodes, n.name)
	}
}

// setPod counts a pod that the API shows bound to a node; a finished pod
// counts no more.
func (s *snapshot) setPod(pod *corev1.Pod) {
	s.removePod(pod.UID)
	if pod.Spec.NodeName == "" || pods.Finished(pod) {
		return
	}
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
	if len(p.repel) > 0 {
		s.repelling++
	}
}

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
	if len(p.repel) > 0 {
		s.repelling--
	}
	s.prune(n)
}
