package pod_test

import (
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// debug adds an ephemeral container to the pod in the API.
func (n *node) debug(pod, name, target string) {
	n.t.Helper()
	p := n.get(pod)
	p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, v1.EphemeralContainer{
		EphemeralContainerCommon: v1.EphemeralContainerCommon{Name: name, Image: "app:1", ImagePullPolicy: v1.PullIfNotPresent},
		TargetContainerName:      target,
	})
	if _, err := n.api.CoreV1().Pods("default").Update(n.t.Context(), p, metav1.UpdateOptions{}); err != nil {
		n.t.Fatal(err)
	}
}

// TestEphemeralContainer: it joins a running pod, sees the processes of its
// target, and its end changes nothing of the pod.
func TestEphemeralContainer(t *testing.T) {
	inBubble(t, func(n *node) {
		var mu sync.Mutex
		targets := map[string]string{} // container → id of its target
		ids := map[string]string{}
		n.runtime.OnStart = func(c api.Container) {
			mu.Lock()
			defer mu.Unlock()
			targets[c.Name], ids[c.Name] = c.TargetID, c.ID
		}
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("app")))
		n.after(time.Second)
		n.debug("p", "plain", "")
		n.after(time.Second)
		n.debug("p", "looking", "app")
		n.after(time.Second)
		st := n.get("p").Status.EphemeralContainerStatuses
		if len(st) != 2 || st[0].State.Running == nil || st[1].State.Running == nil {
			t.Fatalf("ephemeral containers: %+v", st)
		}
		mu.Lock()
		if targets["plain"] != "" || targets["looking"] != ids["app"] {
			t.Errorf("targets %v of %v", targets, ids)
		}
		mu.Unlock()
		n.runtime.Exit("looking", 3)
		n.after(time.Minute)
		p := n.get("p")
		if end := p.Status.EphemeralContainerStatuses[1].State.Terminated; end == nil || end.ExitCode != 3 {
			t.Errorf("ended: %+v", p.Status.EphemeralContainerStatuses[1].State)
		}
		if p.Status.EphemeralContainerStatuses[1].RestartCount != 0 || p.Status.Phase != v1.PodRunning || condition(p, v1.PodReady) != v1.ConditionTrue {
			t.Errorf("the pod: %+v", p.Status)
		}
	})
}

// TestEphemeralTargetNotRunning: one whose target does not run says so, and
// starts when it does.
func TestEphemeralTargetNotRunning(t *testing.T) {
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("app"), ctr("side")))
		n.after(time.Second)
		for range 2 { // the first restart comes at once
			n.runtime.Exit("app", 1)
			n.after(time.Second)
		}
		n.debug("p", "looking", "app")
		n.after(time.Second)
		if w := n.get("p").Status.EphemeralContainerStatuses[0].State.Waiting; w == nil || w.Reason != "CreateContainerError" || w.Message == "" {
			t.Errorf("before: %+v", n.get("p").Status.EphemeralContainerStatuses[0].State)
		}
		n.after(time.Minute) // the app is back after its back-off
		if n.get("p").Status.EphemeralContainerStatuses[0].State.Running == nil {
			t.Errorf("after: %+v", n.get("p").Status.EphemeralContainerStatuses[0].State)
		}
	})
}
