package daemonset

import (
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/sched/internal/history"
	"github.com/clusterd/clusterd/sched/internal/podctl"
)

// place says what a set has to do with one node.
type place int

const (
	keepOff place = iota // no pod may be there
	allowed              // a pod that is there may stay, none is made
	wanted               // one pod should be there
)

// fitter answers for one set which nodes it is for.
type fitter struct {
	nodeName    string
	affinity    nodeaffinity.RequiredNodeAffinity
	tolerations []corev1.Toleration
}

func newFitter(set *appsv1.DaemonSet) fitter {
	pod := &corev1.Pod{Spec: *set.Spec.Template.Spec.DeepCopy()}
	return fitter{
		nodeName:    pod.Spec.NodeName,
		affinity:    nodeaffinity.GetRequiredNodeAffinity(pod),
		tolerations: append(pod.Spec.Tolerations, tolerations(&pod.Spec)...),
	}
}

// on says what the set has to do with the node. Resources play no part: a pod
// that does not fit waits for room on its node, visibly.
func (f *fitter) on(node *corev1.Node) place {
	if f.nodeName != "" && f.nodeName != node.Name {
		return keepOff
	}
	if ok, err := f.affinity.Match(node); err != nil || !ok {
		return keepOff
	}
	where := wanted
	for i := range node.Spec.Taints {
		taint := &node.Spec.Taints[i]
		if taint.Effect == corev1.TaintEffectPreferNoSchedule || f.tolerates(taint) {
			continue
		}
		if taint.Effect == corev1.TaintEffectNoExecute {
			return keepOff
		}
		where = allowed
	}
	return where
}

func (f *fitter) tolerates(taint *corev1.Taint) bool {
	return slices.ContainsFunc(f.tolerations, func(t corev1.Toleration) bool {
		return t.ToleratesTaint(klog.Background(), taint, true)
	})
}

// tolerations are those that every daemon gets: it belongs to its node and
// stays with it through its troubles.
func tolerations(spec *corev1.PodSpec) []corev1.Toleration {
	exists := func(key string, effect corev1.TaintEffect) corev1.Toleration {
		return corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: effect}
	}
	out := []corev1.Toleration{
		exists(corev1.TaintNodeNotReady, corev1.TaintEffectNoExecute),
		exists(corev1.TaintNodeUnreachable, corev1.TaintEffectNoExecute),
		exists(corev1.TaintNodeDiskPressure, corev1.TaintEffectNoSchedule),
		exists(corev1.TaintNodeMemoryPressure, corev1.TaintEffectNoSchedule),
		exists(corev1.TaintNodePIDPressure, corev1.TaintEffectNoSchedule),
		exists(corev1.TaintNodeUnschedulable, corev1.TaintEffectNoSchedule),
	}
	if spec.HostNetwork {
		out = append(out, exists(corev1.TaintNodeNetworkUnavailable, corev1.TaintEffectNoSchedule))
	}
	return out
}

// newPod returns the set's pod for a node, without a name. The scheduler binds it, so that
// resources and ports are counted; it can go nowhere else.
func newPod(set *appsv1.DaemonSet, node, hash string) *corev1.Pod {
	pod := podctl.FromTemplate(set, Kind, &set.Spec.Template)
	pod.GenerateName = set.Name + "-"
	if pod.Labels == nil {
		pod.Labels = map[string]string{}
	}
	pod.Labels[history.HashLabel] = hash
	for _, t := range tolerations(&pod.Spec) {
		if !slices.ContainsFunc(pod.Spec.Tolerations, func(have corev1.Toleration) bool { return have.MatchToleration(&t) }) {
			pod.Spec.Tolerations = append(pod.Spec.Tolerations, t)
		}
	}
	if pod.Spec.Affinity == nil {
		pod.Spec.Affinity = &corev1.Affinity{}
	}
	if pod.Spec.Affinity.NodeAffinity == nil {
		pod.Spec.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution = &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{
			Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node},
		}}}},
	}
	return pod
}

// nodeOf returns the node that a pod is on, or is made for.
func nodeOf(pod *corev1.Pod) string {
	if pod.Spec.NodeName != "" {
		return pod.Spec.NodeName
	}
	a := pod.Spec.Affinity
	if a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return ""
	}
	for _, term := range a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		for _, f := range term.MatchFields {
			if f.Key == metav1.ObjectNameField && f.Operator == corev1.NodeSelectorOpIn && len(f.Values) == 1 {
				return f.Values[0]
			}
		}
	}
	return ""
}
