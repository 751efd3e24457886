package node_test

import (
	"context"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/clusterd/clusterd/agent/node"
)

// TestRegistration: a Node has its first labels and taints from the write that makes it,
// and they are not put back when somebody has taken them away.
func TestRegistration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api, dir := fake.NewClientset(), t.TempDir()
		labels, err := node.ParseLabels("disk=ssd, topology.kubernetes.io/zone=a")
		if err != nil {
			t.Fatal(err)
		}
		taints, err := node.ParseTaints("dedicated=db:NoSchedule,maintenance:NoExecute")
		if err != nil {
			t.Fatal(err)
		}
		run := func(do func()) {
			n := node.New(node.Config{
				Name: "n1", IPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Client: api, DataDir: dir, Labels: map[string]string{"role": "agent"},
				Registration: node.Registration{Labels: labels, Taints: taints},
			})
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() {
				if err := n.Run(ctx); err != nil {
					t.Error(err)
				}
			})
			time.Sleep(time.Second) // the bubble's time
			synctest.Wait()
			do()
			cancel()
			wg.Wait()
		}
		get := func() *v1.Node {
			t.Helper()
			o, err := api.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			return o
		}
		run(func() {
			o := get()
			if o.Labels["disk"] != "ssd" || o.Labels[v1.LabelTopologyZone] != "a" || o.Labels["role"] != "agent" || len(o.Spec.Taints) != 2 || o.Spec.Taints[0] != (v1.Taint{Key: "dedicated", Value: "db", Effect: v1.TaintEffectNoSchedule}) {
				t.Errorf("made with %v, %v", o.Labels, o.Spec.Taints)
			}
			for _, a := range api.Actions() {
				if a.Matches("update", "nodes") && a.GetSubresource() == "" {
					t.Error("it was made first and labelled then: pods may get there between")
				}
			}
			delete(o.Labels, "disk")
			delete(o.Labels, "role")
			o.Spec.Taints = nil
			if _, err := api.CoreV1().Nodes().Update(t.Context(), o, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
		})
		run(func() {
			if o := get(); o.Labels["disk"] != "" || o.Labels["role"] != "agent" || len(o.Spec.Taints) != 0 {
				t.Errorf("after a restart: %v, %v", o.Labels, o.Spec.Taints)
			}
		})
	})
}

func TestParseRegistration(t *testing.T) {
	for text, want := range map[string]string{
		"disk":                     "write it as KEY=VALUE",
		"a b=c":                    `the key "a b"`,
		"a=b c":                    `the value "b c"`,
		"a=1,a=2":                  "a is given twice",
		"kubernetes.io/hostname=x": "each node has kubernetes.io/hostname by itself",
	} {
		if _, err := node.ParseLabels(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("labels %q: %v, want %s", text, err, want)
		}
	}
	for text, want := range map[string]string{
		"dedicated=db":                                "write it as KEY=VALUE:EFFECT",
		"dedicated=db:Never":                          `not "Never"`,
		"=db:NoSchedule":                              `the key ""`,
		"a=1:NoSchedule,a=2:NoSchedule":               "is given twice",
		"a=" + strings.Repeat("x", 64) + ":NoExecute": "the value",
	} {
		if _, err := node.ParseTaints(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("taints %q: %v, want %s", text, err, want)
		}
	}
	if l, err := node.ParseLabels(" "); err != nil || len(l) != 0 {
		t.Errorf("none: %v, %v", l, err)
	}
}
