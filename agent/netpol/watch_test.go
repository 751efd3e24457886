package netpol

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/clusterd/clusterd/netsetup/policy"
)

// setRules is an Enforcer that hands on what it is given.
type setRules chan []policy.Group

func (s setRules) Set(g []policy.Group) error { s <- g; return nil }
func (setRules) Run(ctx context.Context)      { <-ctx.Done() }

// TestWatchesWhatMatters: without a policy no node asks for the pods of all others;
// with the first one it does, and puts it into force.
func TestWatchesWhatMatters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := fake.NewClientset(
			&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}},
			&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default", UID: "web"}, Spec: v1.PodSpec{NodeName: "n1"},
				Status: v1.PodStatus{PodIPs: []v1.PodIP{{IP: "10.244.0.7"}}}},
		)
		rules := make(setRules, 100)
		m, err := New(Config{NodeName: "n1", Client: api, Enforcer: rules})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- m.Run(ctx) }()
		defer func() { cancel(); <-ended }()
		if err := m.Guard(ctx, "other", []netip.Addr{netip.MustParseAddr("10.244.0.8")}); err != nil {
			t.Fatal(err)
		}
		asked := func(resource string) bool {
			for _, a := range api.Actions() {
				if a.GetResource().Resource == resource {
					return true
				}
			}
			return false
		}
		if asked("pods") || asked("namespaces") {
			t.Error("pods are watched without a policy")
		}
		watched := func() bool {
			return slices.ContainsFunc(api.Actions(), func(a clienttesting.Action) bool {
				return a.GetVerb() == "watch" && a.GetResource().Resource == "networkpolicies"
			})
		}
		for !watched() { // what changes between list and watch is lost with this fake
			time.Sleep(time.Millisecond)
		}
		_, err = api.NetworkingV1().NetworkPolicies("default").Create(ctx, &networkingv1.NetworkPolicy{
			ObjectMeta: metav1.ObjectMeta{Name: "closed", Namespace: "default"}, Spec: networkingv1.NetworkPolicySpec{PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		limit := time.After(time.Minute)
		for {
			select {
			case groups := <-rules:
				if len(groups) == 0 {
					continue // before the policy
				}
				if !slices.ContainsFunc(groups, func(g policy.Group) bool { return slices.Contains(g.Addrs, netip.MustParseAddr("10.244.0.7")) }) {
					t.Errorf("the first rules do not know the pod: %+v", groups)
				}
				return
			case <-limit:
				t.Fatal("the policy is not in force")
			}
		}
	})
}
