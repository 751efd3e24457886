package kubectl

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/features"
)

// conditionTimes are when the conditions of a pod last changed, as the API writes
// it: to the second.
func conditionTimes(p *corev1.Pod) map[corev1.PodConditionType]metav1.Time {
	times := map[corev1.PodConditionType]metav1.Time{}
	for _, c := range p.Status.Conditions {
		times[c.Type] = c.LastTransitionTime
	}
	return times
}

// conditionFields fails the test unless every condition of the pods has all its
// fields on the wire. lastProbeTime is null where nothing was probed (so it is at
// kubelets, too), but it is there.
func (k *kit) conditionFields(pods ...string) {
	k.Helper()
	for _, name := range pods {
		var p struct {
			Status struct{ Conditions []map[string]json.RawMessage }
		}
		k.decode(k.ok("get", "pod", name, "-o", "json"), &p)
		if len(p.Status.Conditions) == 0 {
			k.Errorf("%s has no conditions", name)
		}
		for _, c := range p.Status.Conditions {
			fields := []string{"type", "status", "lastTransitionTime"}
			if string(c["status"]) == `"False"` {
				fields = append(fields, "reason", "message")
			}
			for _, f := range fields {
				if v := string(c[f]); v == "" || v == `""` || v == "null" {
					k.Errorf("%s: %s of %s is %q", name, f, c["type"], v)
				}
			}
			if _, there := c["lastProbeTime"]; !there {
				k.Errorf("%s: %s has no lastProbeTime", name, c["type"])
			}
		}
	}
}

// TestE2EXConditionTimes: a condition's lastTransitionTime moves when its status
// does, and only then.
func TestE2EXConditionTimes(t *testing.T) {
	t.Parallel()
	k := start(t, "conditions")
	features.Shows(k, 217)
	k.apply(simple("gated", "sleep", "readinessGates: [{conditionType: example.com/gate}]"))
	const gate = corev1.PodConditionType("example.com/gate")
	turn := func(status corev1.ConditionStatus, fields string) { // its times are its writer's to say
		k.Helper()
		k.ok("patch", "pod", "gated", "--subresource=status", "-p", `{"status":{"conditions":[{"type":"`+string(gate)+`","status":"`+string(status)+`",`+fields+`}]}}`)
	}
	k.podIs("gated", "waits for its gate", func(p *corev1.Pod) bool {
		return condition(p, corev1.ContainersReady) == corev1.ConditionTrue && condition(p, corev1.PodReady) == corev1.ConditionFalse
	})
	k.apply(simple("nowhere", "sleep", "nodeSelector: {no: such}"))
	k.podIs("nowhere", "is unschedulable", func(p *corev1.Pod) bool { return condition(p, corev1.PodScheduled) == corev1.ConditionFalse })
	k.conditionFields("gated", "nowhere")

	// second waits for the next second of the server's clock, as an object made there
	// shows it: a time that moves by less than one cannot be seen to.
	second := func(after metav1.Time) {
		k.Helper()
		k.eventually("the next second", func(ctx context.Context) error {
			cm, err := k.api.CoreV1().ConfigMaps(k.ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "clock-"}}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if err == nil && !after.Time.Before(cm.CreationTimestamp.Time) {
				err = errors.New("not yet")
			}
			return err
		})
	}
	moved := func(what string, before, after map[corev1.PodConditionType]metav1.Time, want ...corev1.PodConditionType) {
		k.Helper()
		for kind, at := range before {
			now := after[kind]
			if slices.Contains(want, kind) != at.Time.Before(now.Time) {
				k.Errorf("%s: %s was of %s and is of %s", what, kind, at, now)
			}
		}
	}
	for _, tt := range []struct{ status, ready corev1.ConditionStatus }{{"True", "True"}, {"False", "False"}} {
		before := conditionTimes(k.pod("gated"))
		second(before[corev1.PodReady])
		turn(tt.status, `"reason":"Turned","message":"turned","lastTransitionTime":"`+time.Now().UTC().Format(time.RFC3339)+`"`)
		p := k.podIs("gated", "Ready is "+string(tt.ready), func(p *corev1.Pod) bool { return condition(p, corev1.PodReady) == tt.ready })
		moved("the gate is "+string(tt.status), before, conditionTimes(p), corev1.PodReady, gate)
		k.conditionFields("gated")
	}
	// What changes no status moves no time: a label, an annotation, and a message.
	before := k.pod("gated")
	second(conditionTimes(before)[corev1.PodReady])
	k.ok("label", "pod", "gated", "changed=yes")
	k.ok("annotate", "pod", "gated", "changed=yes")
	turn(corev1.ConditionFalse, `"message":"still"`)
	after := k.podIs("gated", "has the message", func(p *corev1.Pod) bool {
		for _, c := range p.Status.Conditions {
			if c.Type == gate {
				return c.Message == "still"
			}
		}
		return false
	})
	moved("a message", conditionTimes(before), conditionTimes(after))
	// Nor does a status that the agent writes again: the container's restart moves the
	// times of readiness alone.
	// The first one is at once: it may be over before a status tells of the end. The
	// second waits for its back-off.
	for i := int32(1); ; i++ {
		before = after
		second(conditionTimes(before)[corev1.ContainersReady])
		k.kill(k.process(string(before.UID), "sleep"))
		after = k.podIs("gated", "was started again", func(p *corev1.Pod) bool {
			return p.Status.ContainerStatuses[0].RestartCount == i && condition(p, corev1.ContainersReady) == corev1.ConditionTrue
		})
		if i == 1 && conditionTimes(before)[corev1.ContainersReady] == conditionTimes(after)[corev1.ContainersReady] {
			moved("a restart that no status told of", conditionTimes(before), conditionTimes(after))
			continue
		}
		moved("a restart", conditionTimes(before), conditionTimes(after), corev1.ContainersReady)
		break
	}
	k.ok("delete", "pod", "gated", "nowhere", "--wait=false")
}
