package kubectl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXPreemption fills a resource that only this test uses, so that pods of
// other tests are left alone.
func TestE2EXPreemption(t *testing.T) {
	t.Parallel()
	k := start(t, "preemption")
	const scarce = "example.com/scarce"
	k.ok("patch", "node", node, "--subresource=status", "--type=merge", "-p", `{"status":{"capacity":{"`+scarce+`":"5"},"allocatable":{"`+scarce+`":"5"}}}`)
	pod := func(name, class string, amount int, more ...string) string {
		return strings.Replace(simple(name, "sleep", append(more, "priorityClassName: "+class)...), "args:",
			fmt.Sprintf("resources: {requests: {%s: %d}, limits: {%[1]s: %[2]d}}, args:", scarce, amount), 1)
	}
	k.ok("create", "priorityclass", "preempt-low", "--value=10")
	k.ok("create", "priorityclass", "preempt-high", "--value=1000")
	k.sub("a pod of higher priority displaces one of lower", func(k *kit) {
		features.Shows(k, 124)
		features.Conforms(k, 369, 371)
		k.okIn(strings.Replace(pod("low", "preempt-low", 3), "metadata: {", "metadata: {finalizers: [example.com/hold], ", 1), "create", "-f", "-")
		k.okIn(pod("other", "preempt-high", 2), "create", "-f", "-")
		k.ready("low")
		k.ready("other")
		k.okIn(pod("high", "preempt-high", 3), "create", "-f", "-")
		// The finalizer keeps the victim, so that its condition and the
		// nomination can be read.
		victim := k.podIs("low", "is to go", func(p *corev1.Pod) bool { return p.DeletionTimestamp != nil })
		if condition(victim, corev1.DisruptionTarget) != corev1.ConditionTrue {
			k.Errorf("the victim's conditions: %v", victim.Status.Conditions)
		}
		k.podIs("high", "is nominated", func(p *corev1.Pod) bool { return p.Status.NominatedNodeName == node || p.Spec.NodeName == node })
		k.ok("patch", "pod", "low", "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
		k.gone("low")
		k.ready("high")
		k.is("untouched", string(k.pod("other").Status.Phase), "Running")
		k.ok("delete", "pod", "high", "other")
	})
	k.sub("a critical pod displaces one of lower priority", func(k *kit) {
		features.Conforms(k, 370)
		k.okIn(pod("meek", "preempt-high", 5), "create", "-f", "-")
		k.ready("meek")
		k.okIn(pod("critical", "system-cluster-critical", 5), "create", "-f", "-")
		k.gone("meek")
		k.ready("critical")
		k.ok("delete", "pod", "critical")
	})
	k.sub("none goes where none may", func(k *kit) {
		k.okIn(pod("stays", "preempt-low", 5), "create", "-f", "-")
		k.ready("stays")
		k.ok("create", "priorityclass", "preempt-never", "--value=2000", "--preemption-policy=Never")
		k.okIn(pod("patient", "preempt-never", 5), "create", "-f", "-")
		k.eventually("it waits", func(context.Context) error {
			if got := k.field("pod/patient", `{.status.conditions[?(@.type=="PodScheduled")].message}`); !strings.Contains(got, "Insufficient "+scarce) {
				return errors.New(got)
			}
			return nil
		})
		k.is("the one that was there", string(k.pod("stays").Status.Phase), "Running")
		k.ok("delete", "pod", "patient", "stays")
	})
	k.sub("ReplicaSets of four priorities end with what is left for each", func(k *kit) {
		features.Conforms(k, 367)
		k.ok("patch", "node", node, "--subresource=status", "--type=merge", "-p", `{"status":{"capacity":{"`+scarce+`":"10"},"allocatable":{"`+scarce+`":"10"}}}`)
		sets := []struct {
			name                            string
			priority, replicas, each, ready int
		}{{"first", 1, 3, 1, 0}, {"second", 2, 2, 1, 2}, {"third", 3, 2, 1, 2}, {"fourth", 4, 2, 3, 2}}
		for _, set := range sets {
			k.ok("create", "priorityclass", "preempt-"+set.name, fmt.Sprint("--value=", set.priority))
			manifest := strings.NewReplacer("{terminationGracePeriodSeconds", "{priorityClassName: preempt-"+set.name+", terminationGracePeriodSeconds",
				"args:", fmt.Sprintf("resources: {requests: {%s: %d}, limits: {%[1]s: %[2]d}}, args:", scarce, set.each)).Replace(replicaSet("preempt-"+set.name, "preempt-"+set.name, set.replicas))
			k.okIn(manifest, "create", "-f", "-")
			if set.name != "fourth" { // for which there is not enough room
				k.ok("wait", "replicaset/preempt-"+set.name, fmt.Sprint("--for=jsonpath={.status.readyReplicas}=", set.replicas), timeoutFlag)
			}
		}
		for _, set := range sets {
			k.eventually(set.name+" has what is left for it", func(context.Context) error {
				got := k.field("replicaset/preempt-"+set.name, "{.status.replicas} {.status.readyReplicas}")
				want := fmt.Sprint(set.replicas, " ", set.ready)
				if set.ready == 0 {
					want = fmt.Sprint(set.replicas, " ") // a field that is 0 is left out
				}
				if got != want {
					return fmt.Errorf("its replicas, and those that are ready, are %q, want %q", got, want)
				}
				return nil
			})
		}
		for _, set := range sets {
			k.ok("delete", "replicaset", "preempt-"+set.name)
		}
		for _, set := range sets {
			k.ok("wait", "pod", "--selector=app=preempt-"+set.name, "--for=delete", timeoutFlag)
			k.ok("delete", "priorityclass", "preempt-"+set.name)
		}
		k.ok("patch", "node", node, "--subresource=status", "--type=merge", "-p", `{"status":{"capacity":{"`+scarce+`":"5"},"allocatable":{"`+scarce+`":"5"}}}`)
	})
	k.sub("a gang gets its nodes at once or not at all", func(k *kit) {
		member := func(name string, amount int) string { return pod(name, "preempt-low", amount) }
		in := func(group, manifest string) string {
			return strings.Replace(manifest, "priorityClassName:", "schedulingGroup: {podGroupName: "+group+"}\n  priorityClassName:", 1)
		}
		gang := func(name string) string {
			return `{apiVersion: scheduling.k8s.io/v1beta1, kind: PodGroup, metadata: {name: ` + name + `}, spec: {priorityClassName: preempt-low, schedulingPolicy: {gang: {minCount: 2}}}}`
		}
		waits := func(name, why string) {
			k.eventually(name+" waits", func(context.Context) error {
				if got := k.field("pod/"+name, `{.status.conditions[?(@.type=="PodScheduled")].message}`); !strings.Contains(got, why) {
					return errors.New(got)
				}
				return nil
			})
		}
		k.okIn(gang("left"), "create", "-f", "-")
		k.okIn(gang("right"), "create", "-f", "-")
		k.okIn(in("left", member("left-0", 2)), "create", "-f", "-")
		waits("left-0", `1 of the 2 pods that PodGroup "left" needs at the same time are there`)
		k.okIn(in("left", member("left-1", 2)), "create", "-f", "-")
		k.ready("left-0")
		k.ready("left-1")
		k.okIn(in("right", member("right-0", 1)), "create", "-f", "-")
		k.okIn(in("right", member("right-1", 1)), "create", "-f", "-")
		waits("right-0", "1 of 2 found one") // of five one is left, and it stays free
		k.is("the one that would have fitted", k.pod("right-0").Spec.NodeName, "")
		k.okIn(pod("single", "preempt-low", 1), "create", "-f", "-")
		k.ready("single")
		k.eventually("right, in the table", func(context.Context) error { // its condition is written after its pods'
			if got := strings.Join(strings.Fields(k.ok("get", "podgroup", "right", "--no-headers")), " "); !strings.HasPrefix(got, "right Gang(2) False") {
				return errors.New(got)
			}
			return nil
		})
		k.ok("delete", "pod", "left-0", "left-1")
		k.ready("right-0")
		k.ready("right-1")
		k.ok("wait", "--for=condition=PodGroupInitiallyScheduled", "podgroup/right", timeoutFlag)
		k.ok("delete", "pod", "single", "right-0", "right-1")
		k.ok("delete", "podgroup", "left", "right")
	})
	k.ok("delete", "priorityclass", "preempt-low", "preempt-high", "preempt-never")
}
