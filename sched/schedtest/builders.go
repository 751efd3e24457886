// Package schedtest builds objects for tests of controllers in one line each,
// and has a fake cluster: client-go's fake clientset with the behaviour of an
// API server that controllers rely on (versions, conflicts, generations,
// graceful deletion, bindings), and nodes that run what is bound to them.
package schedtest

import (
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Namespace of all built objects that have one.
const Namespace = "default"

// PodBuilder builds a pod; every method changes and returns it.
type PodBuilder struct{ P *corev1.Pod }

// Pod starts a pod with one container that asks for nothing.
func Pod(name string) *PodBuilder {
	return &PodBuilder{&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: Namespace, UID: types.UID("uid-" + name)},
		Spec: corev1.PodSpec{
			SchedulerName: corev1.DefaultSchedulerName,
			Containers:    []corev1.Container{{Name: "c", Image: "i"}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}}
}

// Obj returns the pod.
func (b *PodBuilder) Obj() *corev1.Pod { return b.P }

// On binds the pod to a node.
func (b *PodBuilder) On(node string) *PodBuilder { b.P.Spec.NodeName = node; return b }

// CPU sets the container's CPU request.
func (b *PodBuilder) CPU(q string) *PodBuilder { return b.request(corev1.ResourceCPU, q) }

// Memory sets the container's memory request.
func (b *PodBuilder) Memory(q string) *PodBuilder { return b.request(corev1.ResourceMemory, q) }

// Disk asks for local ephemeral storage.
func (b *PodBuilder) Disk(q string) *PodBuilder { return b.request(corev1.ResourceEphemeralStorage, q) }

func (b *PodBuilder) request(name corev1.ResourceName, q string) *PodBuilder {
	r := &b.P.Spec.Containers[0].Resources
	if r.Requests == nil {
		r.Requests = corev1.ResourceList{}
	}
	r.Requests[name] = resource.MustParse(q)
	return b
}

// Label sets a label.
func (b *PodBuilder) Label(k, v string) *PodBuilder {
	if b.P.Labels == nil {
		b.P.Labels = map[string]string{}
	}
	b.P.Labels[k] = v
	return b
}

// Annotate sets an annotation.
func (b *PodBuilder) Annotate(k, v string) *PodBuilder {
	if b.P.Annotations == nil {
		b.P.Annotations = map[string]string{}
	}
	b.P.Annotations[k] = v
	return b
}

// Select sets an entry of the node selector.
func (b *PodBuilder) Select(k, v string) *PodBuilder {
	if b.P.Spec.NodeSelector == nil {
		b.P.Spec.NodeSelector = map[string]string{}
	}
	b.P.Spec.NodeSelector[k] = v
	return b
}

// Tolerate adds a toleration.
func (b *PodBuilder) Tolerate(t corev1.Toleration) *PodBuilder {
	b.P.Spec.Tolerations = append(b.P.Spec.Tolerations, t)
	return b
}

// HostPort adds a host port.
func (b *PodBuilder) HostPort(port int32) *PodBuilder {
	c := &b.P.Spec.Containers[0]
	c.Ports = append(c.Ports, corev1.ContainerPort{ContainerPort: port, HostPort: port})
	return b
}

// Priority sets the priority.
func (b *PodBuilder) Priority(n int32) *PodBuilder { b.P.Spec.Priority = &n; return b }

// Group makes the pod one of a PodGroup.
func (b *PodBuilder) Group(name string) *PodBuilder {
	b.P.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: &name}
	return b
}

// Gang returns a PodGroup of which n pods must have nodes at the same time.
func Gang(name string, n int32) *schedulingv1beta1.PodGroup {
	return &schedulingv1beta1.PodGroup{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: Namespace, UID: types.UID("uid-" + name), Generation: 1},
		Spec: schedulingv1beta1.PodGroupSpec{
			SchedulingPolicy: schedulingv1beta1.PodGroupSchedulingPolicy{Gang: &schedulingv1beta1.GangSchedulingPolicy{MinCount: n}},
		},
	}
}

// Apart refuses to share a domain of the topology key with pods of the label.
func (b *PodBuilder) Apart(topology, k, v string) *PodBuilder {
	a := b.affinity()
	if a.PodAntiAffinity == nil {
		a.PodAntiAffinity = &corev1.PodAntiAffinity{}
	}
	a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution = append(
		a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution, affinityTerm(topology, k, v))
	return b
}

// Together asks to share a domain of the topology key with a pod of the label.
func (b *PodBuilder) Together(topology, k, v string) *PodBuilder {
	a := b.affinity()
	if a.PodAffinity == nil {
		a.PodAffinity = &corev1.PodAffinity{}
	}
	a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution = append(
		a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution, affinityTerm(topology, k, v))
	return b
}

// Prefer wishes to share a domain of the topology key with pods of the label, by that
// weight; not to, if the weight is negative.
func (b *PodBuilder) Prefer(weight int32, topology, k, v string) *PodBuilder {
	a, t := b.affinity(), affinityTerm(topology, k, v)
	if weight < 0 {
		if a.PodAntiAffinity == nil {
			a.PodAntiAffinity = &corev1.PodAntiAffinity{}
		}
		wishes := &a.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution
		*wishes = append(*wishes, corev1.WeightedPodAffinityTerm{Weight: -weight, PodAffinityTerm: t})
		return b
	}
	if a.PodAffinity == nil {
		a.PodAffinity = &corev1.PodAffinity{}
	}
	wishes := &a.PodAffinity.PreferredDuringSchedulingIgnoredDuringExecution
	*wishes = append(*wishes, corev1.WeightedPodAffinityTerm{Weight: weight, PodAffinityTerm: t})
	return b
}

func affinityTerm(topology, k, v string) corev1.PodAffinityTerm {
	return corev1.PodAffinityTerm{TopologyKey: topology, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{k: v}}}
}

func (b *PodBuilder) affinity() *corev1.Affinity {
	if b.P.Spec.Affinity == nil {
		b.P.Spec.Affinity = &corev1.Affinity{}
	}
	return b.P.Spec.Affinity
}

// Spread adds a topology spread constraint over pods of the label.
func (b *PodBuilder) Spread(topology string, skew int32, action corev1.UnsatisfiableConstraintAction, k, v string) *PodBuilder {
	b.P.Spec.TopologySpreadConstraints = append(b.P.Spec.TopologySpreadConstraints, corev1.TopologySpreadConstraint{
		MaxSkew: skew, TopologyKey: topology, WhenUnsatisfiable: action,
		LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{k: v}},
	})
	return b
}

// OwnedBy sets the controller.
func (b *PodBuilder) OwnedBy(owner metav1.Object, kind schema.GroupVersionKind) *PodBuilder {
	b.P.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(owner, kind)}
	return b
}

// Created sets the creation time.
func (b *PodBuilder) Created(t time.Time) *PodBuilder {
	b.P.CreationTimestamp = metav1.NewTime(t)
	return b
}

// Phase sets the phase.
func (b *PodBuilder) Phase(p corev1.PodPhase) *PodBuilder { b.P.Status.Phase = p; return b }

// Ready makes the pod Running and ready since t.
func (b *PodBuilder) Ready(since time.Time) *PodBuilder {
	b.P.Status.Phase = corev1.PodRunning
	b.P.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(since)}}
	return b
}

// Deleting marks the pod as being deleted.
func (b *PodBuilder) Deleting(t time.Time) *PodBuilder {
	stamp := metav1.NewTime(t)
	b.P.DeletionTimestamp = &stamp
	return b
}

// NodeBuilder builds a node; every method changes and returns it.
type NodeBuilder struct{ N *corev1.Node }

// Node starts a ready node with 4 CPUs, 8 GiB and room for 110 pods.
func Node(name string) *NodeBuilder {
	b := &NodeBuilder{&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{corev1.LabelHostname: name}},
		Status: corev1.NodeStatus{
			Allocatable: corev1.ResourceList{},
			Conditions:  []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"}},
		},
	}}
	return b.Has(corev1.ResourceCPU, "4").Has(corev1.ResourceMemory, "8Gi").Has(corev1.ResourcePods, "110")
}

// Obj returns the node.
func (b *NodeBuilder) Obj() *corev1.Node { return b.N }

// Has sets an allocatable resource.
func (b *NodeBuilder) Has(name corev1.ResourceName, q string) *NodeBuilder {
	b.N.Status.Allocatable[name] = resource.MustParse(q)
	return b
}

// Label sets a label.
func (b *NodeBuilder) Label(k, v string) *NodeBuilder { b.N.Labels[k] = v; return b }

// Taint adds a taint.
func (b *NodeBuilder) Taint(k, v string, effect corev1.TaintEffect) *NodeBuilder {
	b.N.Spec.Taints = append(b.N.Spec.Taints, corev1.Taint{Key: k, Value: v, Effect: effect})
	return b
}

// Cordon makes the node unschedulable.
func (b *NodeBuilder) Cordon() *NodeBuilder { b.N.Spec.Unschedulable = true; return b }

// Deployment returns a rolling Deployment of n pods with a surge and an
// unavailability of 25 %, as defaulting makes it.
func Deployment(name string, n int32) *appsv1.Deployment {
	quarter := intstr.FromString("25%")
	limit, deadline := int32(10), int32(600)
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: Namespace, UID: types.UID("uid-" + name), Generation: 1},
		Spec: appsv1.DeploymentSpec{
			Replicas:                &n,
			Selector:                &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}},
			Template:                Template(name, "v1"),
			RevisionHistoryLimit:    &limit,
			ProgressDeadlineSeconds: &deadline,
			Strategy: appsv1.DeploymentStrategy{
				Type:          appsv1.RollingUpdateDeploymentStrategyType,
				RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: &quarter, MaxUnavailable: &quarter},
			},
		},
	}
}

// ReplicaSet returns a ReplicaSet of n pods.
func ReplicaSet(name string, n int32) *appsv1.ReplicaSet {
	return &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: Namespace, UID: types.UID("uid-" + name), Generation: 1},
		Spec: appsv1.ReplicaSetSpec{
			Replicas: &n,
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}},
			Template: Template(name, "v1"),
		},
	}
}

// Template returns a pod template with the label app=name and one container.
func Template(name, image string) corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": name}},
		Spec: corev1.PodSpec{
			SchedulerName: corev1.DefaultSchedulerName,
			Containers:    []corev1.Container{{Name: "c", Image: image}},
		},
	}
}
