package netpol

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	typednetworking "k8s.io/client-go/kubernetes/typed/networking/v1"

	"github.com/clusterd/clusterd/netsetup/policy"
)

// lastRules is an Enforcer that remembers what it was given last.
type lastRules struct {
	mu   sync.Mutex
	last []policy.Group
}

func (l *lastRules) Set(g []policy.Group) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = g
	return nil
}

func (*lastRules) Run(context.Context) {}

func (l *lastRules) isolates(addr string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.last, func(g policy.Group) bool { return slices.Contains(g.Addrs, netip.MustParseAddr(addr)) })
}

func closedPolicy() *networkingv1.NetworkPolicy {
	return np("closed", networkingv1.NetworkPolicySpec{PolicyTypes: ingress})
}

// running runs a manager of node n1 on an API that has the policy and those pods.
func running(t *testing.T, cfg Config, pods ...*v1.Pod) (*Manager, *fake.Clientset) {
	m, api := runningOn(t, cfg, fake.NewClientset(&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, closedPolicy()), pods...)
	return m, api
}

// runningOn is running on an API that may have no policy.
func runningOn(t *testing.T, cfg Config, api *fake.Clientset, pods ...*v1.Pod) (*Manager, *fake.Clientset) {
	for _, p := range pods {
		if err := api.Tracker().Add(p); err != nil {
			t.Fatal(err)
		}
	}
	cfg.NodeName, cfg.Client = "n1", api
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	wg.Go(func() { _ = m.Run(ctx) })
	time.Sleep(time.Second) // of the bubble
	return m, api
}

// TestPoliciesHoldUntilTheEnd: a pod that the API has no more, or that somebody
// says has ended, keeps its policies as long as it has its addresses.
func TestPoliciesHoldUntilTheEnd(t *testing.T) {
	for name, change := range map[string]func(*fake.Clientset, *v1.Pod) error{
		"deleted by force": func(api *fake.Clientset, p *v1.Pod) error {
			return api.CoreV1().Pods(p.Namespace).Delete(t.Context(), p.Name, metav1.DeleteOptions{})
		},
		"ended by another's word": func(api *fake.Clientset, p *v1.Pod) error {
			p = p.DeepCopy()
			p.Status.Phase = v1.PodFailed
			_, err := api.CoreV1().Pods(p.Namespace).UpdateStatus(t.Context(), p, metav1.UpdateOptions{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				attached := map[types.UID]bool{"web": true}
				rules, web := &lastRules{}, pod("a", "web", "n1", "10.244.0.7")
				m, api := running(t, Config{Enforcer: rules, Attached: func(uid types.UID) bool {
					mu.Lock()
					defer mu.Unlock()
					return attached[uid]
				}}, web, pod("a", "former", "n1", "10.244.0.8"))
				if !rules.isolates("10.244.0.7") {
					t.Fatal("the policy is not in force")
				}
				if err := change(api, web); err != nil {
					t.Fatal(err)
				}
				if err := api.CoreV1().Pods("a").Delete(t.Context(), "former", metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Minute)
				if !rules.isolates("10.244.0.7") {
					t.Error("the policy is gone while the pod runs")
				}
				if rules.isolates("10.244.0.8") {
					t.Error("the policy is in force for an address that no pod has")
				}
				mu.Lock()
				delete(attached, "web")
				mu.Unlock()
				m.Release("web")
				time.Sleep(time.Second)
				if rules.isolates("10.244.0.7") {
					t.Error("the policy is in force for an address that was given back")
				}
			})
		})
	}
}

// TestHeldWithoutPolicies: a pod that is deleted by force, or that somebody says has
// ended, while there is no policy, is under the first one that comes as long as it
// has its addresses.
func TestHeldWithoutPolicies(t *testing.T) {
	policies := func(api *fake.Clientset) typednetworking.NetworkPolicyInterface {
		return api.NetworkingV1().NetworkPolicies("a")
	}
	web := func() *v1.Pod { return pod("a", "web", "n1", "10.244.0.7") }
	only := func(uid types.UID) bool { return uid == "web" }
	for name, tc := range map[string]struct {
		before bool // there was a policy, and pods were watched
		known  func() []*v1.Pod
		ended  bool // instead of deleted
	}{
		"none was ever":        {false, func() []*v1.Pod { return []*v1.Pod{web()} }, false},
		"none was ever, ended": {false, func() []*v1.Pod { return []*v1.Pod{web()} }, true},
		"there was one":        {true, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := fake.NewClientset(&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a"}})
				if tc.before {
					if err := api.Tracker().Add(closedPolicy()); err != nil {
						t.Fatal(err)
					}
				}
				rules := &lastRules{}
				runningOn(t, Config{Enforcer: rules, Attached: only, Running: tc.known}, api, web())
				if tc.before {
					if err := policies(api).Delete(t.Context(), "closed", metav1.DeleteOptions{}); err != nil {
						t.Fatal(err)
					}
					time.Sleep(time.Second)
					// One that comes while no policy is there.
					late := pod("a", "web", "n1", "10.244.0.9")
					if _, err := api.CoreV1().Pods("a").Update(t.Context(), late, metav1.UpdateOptions{}); err != nil {
						t.Fatal(err)
					}
					time.Sleep(time.Second)
				}
				var err error
				if tc.ended {
					p := web()
					p.Status.Phase = v1.PodFailed
					_, err = api.CoreV1().Pods("a").UpdateStatus(t.Context(), p, metav1.UpdateOptions{})
				} else {
					err = api.CoreV1().Pods("a").Delete(t.Context(), "web", metav1.DeleteOptions{})
				}
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Second)
				if _, err := policies(api).Create(t.Context(), closedPolicy(), metav1.CreateOptions{}); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Second)
				want := "10.244.0.7"
				if tc.before {
					want = "10.244.0.9"
				}
				if !rules.isolates(want) {
					t.Errorf("the first policy is not in force for a pod that still runs: %+v", rules.last)
				}
			})
		})
	}
}

// TestGuardWantsThePod: a pod that the watch does not show has labels that are not
// known, and does not start; one of the node itself does.
func TestGuardWantsThePod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, api := running(t, Config{Enforcer: noRules{}, Static: func(uid types.UID) bool { return uid == "static" }})
		addrs := []netip.Addr{netip.MustParseAddr("10.244.0.7")}
		if err := m.Guard(t.Context(), "late", addrs); err == nil || !strings.Contains(err.Error(), "the watch of pods has not shown this one") {
			t.Errorf("a pod that is not known: %v", err)
		}
		if err := m.Guard(t.Context(), "static", addrs); err != nil {
			t.Errorf("a static pod: %v", err)
		}
		if _, err := api.CoreV1().Pods("a").Create(t.Context(), pod("a", "late", "n1", ""), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := m.Guard(t.Context(), "late", addrs); err != nil {
			t.Errorf("once it is known: %v", err)
		}
	})
}
